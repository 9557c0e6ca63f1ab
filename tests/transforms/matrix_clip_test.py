"""Per-matrix clipping against loops, and its sensitivity."""

import functools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import transforms
from tests.oracles import muon_oracle

Dims = optax.contrib.MuonDimensionNumbers
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE

SHAPES = {'a': (3, 5), 'bias': (4,), 'stack': (2, 4, 3), 'z': (6,)}
SPECS = {'a': Dims(), 'bias': None, 'stack': Dims(1, 2), 'z': None}
NORMS = {'a': 0.7, 'bias': 1.5, 'stack': 0.4, 'z': 1.5}
# By default only `a` is a matrix, and all others have one norm.
DEFAULT_NORMS = {**NORMS, 'stack': 1.5}
PARAMS = {k: jnp.zeros(shape) for k, shape in SHAPES.items()}


def _grads(rng, batch, scale=1.0):
  return {
    k: (scale * rng.standard_normal((batch, *shape))).astype(np.float32)
    for k, shape in SHAPES.items()
  }


@functools.cache
def _update(by_matrix, normalize_by):
  tx = transforms.per_matrix_clip(
    NORMS if by_matrix else DEFAULT_NORMS,
    normalize_by=normalize_by,
    weight_dimension_numbers=SPECS if by_matrix else None,
  )
  return jax.jit(functools.partial(tx.update, state=tx.init(PARAMS)))


def _clip(grads, *, specs=SPECS, padding=None, normalize_by=1.0, dtype=None):
  extra = {} if padding is None else {'is_padding_example': padding}
  grads = jax.tree.map(lambda x: jnp.asarray(x, dtype), grads)
  update = _update(specs is not None, normalize_by)
  out, _ = update(grads, params=PARAMS, **extra)
  return out


def _oracle(grads, specs):
  """Loops over examples and matrices in float64."""
  total = {k: np.zeros(shape) for k, shape in SHAPES.items()}
  for i in range(len(grads['a'])):
    g = {k: np.asarray(v[i], np.float64) for k, v in grads.items()}
    total['a'] += muon_oracle.clip(g['a'], NORMS['a'])
    others = ['bias', 'stack', 'z'] if specs is None else ['bias', 'z']
    if specs is not None:
      for j in range(SHAPES['stack'][0]):
        total['stack'][j] += muon_oracle.clip(g['stack'][j], NORMS['stack'])
    flat = np.concatenate([g[k].ravel() for k in others])
    flat = muon_oracle.clip(flat, NORMS['z'])
    ends = np.cumsum([g[k].size for k in others])
    for k, part in zip(others, np.split(flat, ends[:-1]), strict=True):
      total[k] += part.reshape(SHAPES[k])
  return total


@pytest.mark.parametrize('specs', [None, SPECS])
@pytest.mark.parametrize('scale', [1e-2, 0.3, 100.0])
def test_agrees_with_loops(specs, scale):
  """Nothing clipped, some of it, all of it."""
  grads = _grads(np.random.default_rng(0), 7, scale)
  out = _clip(grads, specs=specs, normalize_by=2.0)
  expected = _oracle(grads, specs)
  for k, v in out.items():
    assert v.dtype == jnp.float32
    # 1e-6 is the margin below the clip norm, the rest rounding of 7 terms.
    np.testing.assert_allclose(v, expected[k] / 2.0, rtol=3e-6, atol=3e-6)


def test_stacked_layers_are_clipped_like_single_ones():
  grads = _grads(np.random.default_rng(1), 5, 3.0)
  out = _clip(grads)
  layers = {f'l{j}': grads['stack'][:, j] for j in range(2)}
  params = {k: jnp.zeros(v.shape[1:]) for k, v in layers.items()}
  tx = transforms.per_matrix_clip(NORMS['stack'])
  single, _ = jax.jit(tx.update)(layers, tx.init(params), params)
  for j in range(2):
    # Sums of five terms of at most 0.4, in another order.
    np.testing.assert_allclose(out['stack'][j], single[f'l{j}'], atol=1e-6)
  total = tx.sensitivity(params=params)
  assert total == pytest.approx(2**0.5 * NORMS['stack'])


@pytest.mark.parametrize('batch_axis', [0, 1, 2])
def test_matrices_may_be_stacked_along_any_axis(batch_axis):
  """And matrix axes may be several: the norm is that of all of them."""
  rng = np.random.default_rng(2)
  grads = rng.standard_normal((3, 4, 2, 5)).astype(np.float32)  # (B, 4, 2, 5).
  rest = [a for a in range(3) if a != batch_axis]
  tx = transforms.per_matrix_clip(
    0.5, weight_dimension_numbers=Dims(rest[1], rest[0])
  )
  params = jnp.zeros((4, 2, 5))
  out, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  expected = np.zeros((4, 2, 5))
  for g in grads:
    for j in range(g.shape[batch_axis]):
      where = tuple(j if a == batch_axis else slice(None) for a in range(3))
      expected[where] += muon_oracle.clip(g[where].astype(np.float64), 0.5)
  np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('specs', [None, SPECS])
def test_neighbours_differ_by_at_most_the_sensitivity(specs, dtype):
  rng = np.random.default_rng(6)
  tx = transforms.per_matrix_clip(
    DEFAULT_NORMS if specs is None else NORMS,
    normalize_by=8.0,
    weight_dimension_numbers=specs,
  )
  bound = tx.sensitivity(params=PARAMS)
  clips = [0.7, 1.5] if specs is None else [0.7, 0.4, 0.4, 1.5]
  assert bound == pytest.approx(np.sqrt(np.sum(np.square(clips))) / 8)
  assert tx.sensitivity(REPLACE_ONE, params=PARAMS) == 2 * bound

  def distance(x, y):
    x, y = (
      _clip(g, specs=specs, normalize_by=8.0, dtype=dtype) for g in (x, y)
    )
    squares = jax.tree.map(lambda a, b: np.sum(np.subtract(a, b) ** 2), x, y)
    return np.sqrt(sum(jax.tree.leaves(squares)))

  batch = _grads(rng, 64)
  # Sums of 64 examples are rounded: 64 eps of their norm, at most 64 bounds.
  slack = 64 * 64 * 1.2e-7
  largest = 0.0
  for example in [
    {k: 1e4 * np.ones((1, *s)) for k, s in SHAPES.items()},
    {k: np.full((1, *s), 1e30) for k, s in SHAPES.items()},
    {k: np.full((1, *s), np.nan) for k, s in SHAPES.items()},
    {k: np.full((1, *s), 1e-30) for k, s in SHAPES.items()},
    {k: v[:1] for k, v in batch.items()},
    _grads(rng, 1, 1e3),
  ]:
    more = {k: np.concatenate([batch[k], example[k]]) for k in SHAPES}
    moved = distance(batch, more)
    assert moved <= bound * (1 + slack)
    largest = max(largest, moved)
  assert largest > 0.999 * bound  # The bound is reached: it is no slack one.
  other = {k: np.concatenate([v[1:], -1e4 * v[:1]]) for k, v in batch.items()}
  assert distance(batch, other) <= 2 * bound * (1 + slack)


def test_sensitivity_says_what_it_needs():
  tx = transforms.per_matrix_clip(1.0)
  with pytest.raises(ValueError, match='params=None'):
    tx.sensitivity()
  with pytest.raises(ValueError, match='neighboring_relation'):
    tx.sensitivity('add', params=PARAMS)
  shapes = jax.eval_shape(lambda: PARAMS)
  assert tx.sensitivity(params=shapes) == 2**0.5  # A matrix, and the rest.


@pytest.mark.parametrize('microbatch_size', [None, 2])
def test_clipped_grad_with_micro_batches_gives_the_same(microbatch_size):
  jax_privacy_clipping = pytest.importorskip('jax_privacy.clipping')
  rng = np.random.default_rng(7)
  xs = rng.standard_normal((6, 5)).astype(np.float32) * 3
  params = {
    'bias': jnp.ones(3),
    'w': jnp.asarray(rng.standard_normal((5, 3)), jnp.float32),
  }
  norms = {'bias': 0.3, 'w': 0.9}

  def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params['w'] + params['bias']) ** 2)

  tx = transforms.per_matrix_clip(norms, normalize_by=4.0)
  per_example = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(params, xs)
  expected, _ = jax.jit(tx.update)(per_example, tx.init(params), params)
  whole = transforms.per_matrix_clip(norms)
  clipped = jax_privacy_clipping.clipped_grad(
    loss,
    l2_clip_norm=whole.sensitivity(params=params),
    normalize_by=4.0,
    batch_argnums=1,
    keep_batch_dim=False,
    microbatch_size=microbatch_size,
    pre_clipping_transform=whole.pre_clipping_transform,
  )
  assert clipped.sensitivity() == pytest.approx(tx.sensitivity(params=params))
  out = jax.jit(clipped)(params, xs)
  for k in params:
    np.testing.assert_allclose(out[k], expected[k], rtol=1e-5, atol=1e-7)
  # Both matrices were clipped: one norm for both would have given another.
  joint = jax.jit(jax_privacy_clipping.clipped_grad(
    loss, l2_clip_norm=0.9, normalize_by=4.0, batch_argnums=1,
    keep_batch_dim=False,
  ))(params, xs)  # fmt: skip
  assert not np.allclose(joint['bias'], expected['bias'], rtol=0.1)


def test_goes_through_chain_jit_and_traced_thresholds():
  grads = _grads(np.random.default_rng(8), 3, 5.0)

  @jax.jit
  def step(norm, padding):
    tx = optax.chain(transforms.per_matrix_clip(norm), optax.scale(-1.0))
    return tx.update(
      grads, tx.init(PARAMS), PARAMS, is_padding_example=padding
    )[0]

  out = step(0.5, np.array([False, False, True]))
  for v in out.values():
    np.testing.assert_array_less(np.linalg.norm(v), 1.0 + 1e-6)
    assert np.linalg.norm(v) > 0.1
