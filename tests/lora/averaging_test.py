"""The low-rank average against the dense one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import lora
from tests.oracles import oracles, test_utils

SHAPES = [(9, 7, 2), (6, 8, 3), (9, 7, 2)]
DECAY = 0.9


def _iterates(steps, size=0.05, seed=0):
  """Smooth random walks on the manifold: dense Z of every step."""
  rng = np.random.default_rng(seed)
  zs = [
    left @ right.T
    for left, right in (oracles.random_factors(rng, *s, 3.0) for s in SHAPES)
  ]
  extra = rng.normal(size=4)
  drift = [rng.normal(size=s[:2]) for s in SHAPES]
  for _ in range(steps):
    zs = [
      oracles.best_approximation(
        z + size * (0.2 * d + rng.normal(size=z.shape) / 4), rank
      )
      for z, d, (*_, rank) in zip(zs, drift, SHAPES, strict=True)
    ]
    extra = extra + size * rng.normal(size=4)
    yield zs, extra


def _tree(zs, extra, dtype=jnp.float64, rng=None, condition=1.0):
  """Factors of the matrices, in a random gauge if there is an ``rng``."""
  factors = []
  for z, (*_, rank) in zip(zs, SHAPES, strict=True):
    u, s, vt = np.linalg.svd(z)
    pair = u[:, :rank] * np.sqrt(s[:rank]), vt[:rank].T * np.sqrt(s[:rank])
    if rng is not None:
      pair = oracles.change_gauge(
        pair, oracles.random_gauge(rng, rank, condition, 3.0)
      )
    factors.append(pair)
  return test_utils.tree_of(factors, extra, dtype)


@functools.cache
def _jitted(**options):
  tx = lora.ema(DECAY, **options)
  return tx.init, jax.jit(tx.update)


def _average(trees, **options):
  init, update = _jitted(**options)
  state = None
  for tree in trees:
    state = init(tree) if state is None else state
    out, state = update(tree, state)
  return out, state


def _dense(iterates, decay=DECAY):
  """Weights in proportion to decay^(t - i), by the definition."""
  weights = decay ** np.arange(len(iterates))[::-1]
  weights = weights / weights.sum()
  zs = [
    sum(w * zs[i] for w, (zs, _) in zip(weights, iterates, strict=True))
    for i in range(len(SHAPES))
  ]
  return zs, sum(w * x for w, (_, x) in zip(weights, iterates, strict=True))


def _distance(tree, zs):
  """Largest relative Frobenius distance of the modules."""
  return max(
    np.linalg.norm(got - z) / np.linalg.norm(z)
    for got, z in zip(test_utils.products_of(tree), zs, strict=True)
  )


@pytest.mark.usefixtures('x64')
def test_close_to_the_best_approximation_of_the_dense_average():
  iterates = list(_iterates(40))
  zs, extra = _dense(iterates)
  best = [
    oracles.best_approximation(z, r)
    for z, (*_, r) in zip(zs, SHAPES, strict=True)
  ]
  trees = [_tree(*x) for x in iterates]
  got, state = _average(trees)
  # Much closer than the last iterate is, with a rank to spare or not.
  last = _distance(trees[-1], best)
  assert last > 0.1
  narrow, _ = _average(trees, rank_multiple=1)
  assert _distance(got, best) < 0.3 * _distance(narrow, best) < 0.01 * last
  np.testing.assert_allclose(got['extra'], extra, rtol=1e-6)
  assert int(state.count) == 40
  assert [x.left.shape for x in state.pairs] == [(2, 9, 4), (1, 6, 6)]


@pytest.mark.usefixtures('x64')
def test_exact_where_nothing_is_lost():
  """Iterates in one space of the rank kept inside: the average is in it."""
  rng = np.random.default_rng(3)
  u = [oracles.random_orthonormal(rng, s[0], s[2]) for s in SHAPES]
  v = [oracles.random_orthonormal(rng, s[1], s[2]) for s in SHAPES]
  iterates = [
    ([a @ rng.normal(size=(a.shape[1],) * 2) @ b.T for a, b in zip(u, v)],  # noqa: B905
     rng.normal(size=4))
    for _ in range(6)
  ]  # fmt: skip
  zs, extra = _dense(iterates)
  got, _ = _average([_tree(*x) for x in iterates], rank_multiple=1)
  # The weights are computed in float32.
  assert _distance(got, zs) < 1e-6
  np.testing.assert_allclose(got['extra'], extra, atol=1e-6)


@pytest.mark.usefixtures('x64')
@pytest.mark.parametrize('condition', [1.0, 1e3])
def test_any_gauge_gives_the_same_average_and_averaged_factors_do_not(
  condition,
):
  iterates = list(_iterates(12))
  plain = [_tree(*x) for x in iterates]
  rng = np.random.default_rng(4)
  turned = [_tree(*x, rng=rng, condition=condition) for x in iterates]
  got, want = _average(turned)[0], _average(plain)[0]
  assert _distance(got, test_utils.products_of(want)) < 1e-12 * condition
  # The average of the factors is another matrix in every gauge.
  factors = optax.ema(DECAY)
  means = []
  for trees in (plain, turned):
    state = factors.init(trees[0])
    for tree in trees:
      mean, state = factors.update(tree, state)
    means.append(test_utils.products_of(mean))
  assert (
    max(
      np.linalg.norm(a - b) / np.linalg.norm(a)
      for a, b in zip(*means, strict=True)
    )
    > 0.5
  )


def test_the_average_is_in_the_balanced_gauge_and_in_the_types_given():
  (zs, extra), *_ = _iterates(1)
  tree = _tree(zs, extra, jnp.bfloat16)
  got, state = _average([tree])
  jax.tree.map(
    lambda x, y: np.testing.assert_equal(x.dtype, y.dtype), got, tree
  )
  assert {x.dtype for x in jax.tree.leaves(state[1:])} == {jnp.dtype('float32')}
  # The first average is the first iterate, up to rounding to bfloat16.
  assert _distance(got, test_utils.products_of(tree)) < 0.01
  got, _ = _average([_tree(zs, extra, jnp.float32)])
  a, b = got['m1']['lora_a'], got['m1']['lora_b']
  np.testing.assert_allclose(a.T @ a, b @ b.T, atol=1e-6)


def test_slow_averages_of_bfloat16_parameters_still_move():
  """In bfloat16 itself a change of one per mille would be lost."""
  (first, extra), *_, (last, _) = _iterates(30)
  tx = lora.ema(0.999)
  update = jax.jit(tx.update)
  state = tx.init(_tree(first, extra, jnp.bfloat16))
  for zs in [first] * 30 + [last] * 30:
    _, state = update(_tree(zs, extra, jnp.bfloat16), state)
  z = np.asarray(state.pairs[1].left[0] @ state.pairs[1].right[0].T)
  middle = (first[1] + last[1]) / 2
  assert np.linalg.norm(z - middle) < 0.05 * np.linalg.norm(last[1] - first[1])


def test_scale_and_stacks_pass_through():
  """The layout's scale is the model's: factors come back without it."""
  rng = np.random.default_rng(6)
  params = {
    'lora_a': jnp.asarray(rng.normal(size=(3, 6, 2)), jnp.float32),
    'lora_b': jnp.asarray(rng.normal(size=(3, 2, 5)), jnp.float32),
  }
  tx = lora.ema(0.5, layout=lora.Layout(scale=8.0))
  out, state = tx.update(params, tx.init(params))
  np.testing.assert_allclose(
    out['lora_a'] @ out['lora_b'], params['lora_a'] @ params['lora_b'],
    atol=1e-5,
  )  # fmt: skip
  assert state.pairs[0].left.shape == (3, 5, 4)


def test_zero_adapters_average_to_zero_and_can_be_trained():
  params = {'lora_a': jnp.eye(6, 2), 'lora_b': jnp.zeros((2, 5))}
  tx = lora.ema(0.9)
  out, _ = tx.update(params, tx.init(params))
  assert not out['lora_b'].any()
  assert np.linalg.matrix_rank(out['lora_a']) == 2


@pytest.mark.parametrize(
  ('options', 'match'),
  [
    ({'decay': 1.0}, 'decay=1.0'),
    ({'decay': 0.9, 'rank_multiple': 0}, 'rank_multiple=0'),
  ],
)
def test_refusals(options, match):
  with pytest.raises(ValueError, match=match):
    lora.ema(**options)
