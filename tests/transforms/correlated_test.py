"""Correlated noise in fixed coordinates, against dense matrix products.

The oracle draws the independent noises by themselves (the same privatizer with
an identity matrix and the same key), multiplies by the noising matrix in
float64, and turns with frames that it aligns on its own, in NumPy.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.stats
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import (
  banded,
  buffered_toeplitz,
  streaming_matrix,
  toeplitz,
)

import prism_optax
from prism_optax import _modules, transforms
from tests import cases
from tests.oracles import oracles

STEPS = 5
STDDEV = 0.7
# One module, where a second one of another shape would only be compiled too.
SHAPES = [(9, 7, 3)]
TWO_SHAPES = [*SHAPES, (6, 11, 2)]
make = transforms.correlated_tangent_privatizer


def _coefs():
  return toeplitz.optimal_max_error_strategy_coefs(STEPS)


def _dense():
  coefs = toeplitz.optimal_max_error_noising_coefs(STEPS)
  return toeplitz.materialize_lower_triangular(coefs)


def _banded():
  matrix = banded.ColumnNormalizedBanded.default(STEPS, 3)
  return matrix.inverse_as_streaming_matrix()


def _buffered():
  matrix = buffered_toeplitz.BufferedToeplitz.build(
    [0.9, 0.4], [0.3, 0.2], dtype=jnp.float32
  )
  return matrix.inverse_as_streaming_matrix()


NOISING = {
  'gaussian': streaming_matrix.identity,
  'dense': _dense,
  'streaming prefix sum': streaming_matrix.prefix_sum,
  'banded': _banded,
  'banded Toeplitz': lambda: toeplitz.inverse_as_streaming_matrix(_coefs()[:3]),
  'inverse banded': lambda: toeplitz.inverse_as_streaming_matrix(
    _coefs()[:2] / jnp.linalg.norm(_coefs()[:2]), column_normalize_for_n=STEPS
  ),
  'buffered Toeplitz': _buffered,
}
USUAL = ('gaussian', 'dense', 'buffered Toeplitz')
FAST = USUAL[1:]


def _materialized(noising):
  if hasattr(noising, 'materialize'):
    noising = noising.materialize(STEPS)
  return np.float64(noising)


def _factory(noising, stddev=STDDEV):
  return lambda key: noise_addition.matrix_factorization_privatizer(
    noising, stddev=stddev, prng_key=key
  )


def _params(layout='plain', dtype=jnp.float32, seed=0, shapes=SHAPES):
  rng = np.random.default_rng(seed)
  if layout == 'plain':
    factors = [oracles.random_factors(rng, *shape) for shape in shapes]
  else:
    factors = [
      tuple(
        np.stack(x)
        for x in zip(
          *(oracles.random_factors(rng, *shape) for _ in range(4)), strict=True
        )
      )
      for shape in TWO_SHAPES
    ]
  return jax.device_get(cases.tree_of(factors, np.ones(5), dtype))


def _path(params, steps=STEPS, size=0.1, seed=1):
  """Parameters that move by a good part of themselves at every step."""
  rng = np.random.default_rng(seed)
  out = [params]
  for _ in range(steps - 1):
    out.append(
      jax.tree.map(
        lambda x: x + size * rng.standard_normal(x.shape).astype(x.dtype),
        out[-1],
      )
    )
  return out


@functools.cache
def _named(name):
  """Of a key: a transformation. The update, compiled: the key is in the state.

  So one program is that of all keys.
  """
  noising = NOISING[name]()

  def of(key):
    return make(_factory(noising), steps=STEPS, prng_key=key)

  return noising, of, jax.jit(of(0).update)


def _run(tx, path, signals, update=None):
  state = tx.init(path[0])
  out = []
  update = update or jax.jit(tx.update)
  for params, signal in zip(path, signals, strict=True):
    noisy, state = update(signal, state, params)
    out.append(noisy)
  return out, state


def _zeros(path):
  return [jax.tree.map(np.zeros_like, params) for params in path]


def _random(path, seed=2):
  rng = np.random.default_rng(seed)
  return [
    jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), params)
    for params in path
  ]


def _independent(params, key, noising):
  """The standard normal draws behind a privatizer, [tree of step t].

  The same keys reach an identity matrix; a dense privatizer draws otherwise
  than a streaming one.
  """
  dense = not hasattr(noising, 'materialize')
  identity = jnp.eye(STEPS) if dense else streaming_matrix.identity()
  privatizer = _factory(identity, 1.0)(key)
  zeros = jax.tree.map(np.zeros_like, params)
  state, out = privatizer.init(params), []
  update = jax.jit(privatizer.update)
  for _ in range(STEPS):
    z, state = update(zeros, state)
    out.append(jax.device_get(z))
  return out


@jax.jit
def _frames(params):
  return _modules.ModuleTree(params).frames(params)


@jax.jit
def _coordinates(params, tree):
  return _modules.ModuleTree(params).coordinates(tree)


def _polar(x):
  u, _, vt = np.linalg.svd(x)
  return u @ vt


def _oracle(path, signals, fixed_noise):
  """``project(signal + noise turned into the frame)``, step by step."""
  frames = [
    [(np.float64(f.left), np.float64(f.right)) for f in _frames(params)]
    for params in path
  ]
  aligned = frames[0]
  out = []
  for params, at, signal, noise in zip(
    path, frames, signals, fixed_noise, strict=True
  ):
    x, z = _coordinates(params, signal), _coordinates(params, noise)
    turns = [
      tuple(
        _polar(np.swapaxes(q, -1, -2) @ old)
        for q, old in zip(new, before, strict=True)
      )
      for new, before in zip(at, aligned, strict=True)
    ]
    aligned = [
      tuple(q @ w for q, w in zip(new, turn, strict=True))
      for new, turn in zip(at, turns, strict=True)
    ]
    stacks = []
    for signal_pair, noise_pair, new, turn in zip(
      x.pairs, z.pairs, at, turns, strict=True
    ):
      left = signal_pair.left + noise_pair.left @ np.swapaxes(turn[1], -1, -2)
      right = signal_pair.right + noise_pair.right @ np.swapaxes(
        turn[0], -1, -2
      )
      left = left - new[0] @ (np.swapaxes(new[0], -1, -2) @ left)
      stacks.append((left, right))
    others = [np.add(a, b) for a, b in zip(x.others, z.others, strict=True)]
    out.append((stacks, others))
  return out


@pytest.mark.parametrize(
  'layout', ['plain', pytest.param('stacked', marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
  'name',
  [
    pytest.param(name, marks=() if name == 'dense' else pytest.mark.slow)
    for name in NOISING
  ],
)
def test_every_privatizer_is_a_dense_product_in_fixed_coordinates(name, layout):
  noising, of, update = _named(name)
  path = _path(_params(layout))
  signals = _random(path)
  key = jax.random.key(4)
  got, _ = _run(of(key), path, signals, update)
  z = _independent(path[0], key, noising)
  matrix = STDDEV * _materialized(noising)
  noise = [
    jax.tree.map(
      lambda *xs, row=row: sum(
        b * np.float64(x) for b, x in zip(row, xs, strict=True)
      ),
      *z,
    )
    for row in matrix
  ]
  want = _oracle(path, signals, noise)
  for params, found, (pairs, others) in zip(path, got, want, strict=True):
    stacks = _coordinates(params, found)
    for pair, oracle in zip(stacks.pairs, pairs, strict=True):
      for x, y in zip(pair, oracle, strict=True):
        # float32 sums of a few numbers of order one.
        np.testing.assert_allclose(x, y, atol=2e-5)
    np.testing.assert_allclose(stacks.others[0], others[0], atol=1e-5)


def test_the_privatizer_sees_the_norm_of_what_came_in():
  """Orthogonal turns, whatever happens to the frames: Delta stays Delta."""
  params = _params(shapes=TWO_SHAPES)

  def spy(key):
    del key

    def update(updates, state, params=None):
      del params, state
      return updates, optax.tree.norm(updates)

    return optax.GradientTransformation(lambda tree: jnp.zeros(()), update)

  path = _path(params, size=2.0)
  for name in ('lora_a', 'lora_b'):  # Rank is lost on the way, and found again.
    path[2]['m0'][name] = np.zeros_like(params['m0'][name])
    path[3]['m1'][name] = path[3]['m1'][name] * 1e-12
  tx = make(spy, steps=STEPS, prng_key=0)
  state, update = tx.init(params), jax.jit(tx.update)
  for at, signal in zip(path, _random(path), strict=True):
    out, state = update(signal, state, at)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))
    norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(signal)))
    seen = state.inner.inner
    np.testing.assert_allclose(seen, norm, rtol=2e-6)  # float32


def test_independent_noise_keeps_its_law_in_fixed_coordinates():
  """Projected, turned Gaussian noise is what tangent_privatizer gives."""
  path = _path(_params(), 2)
  moves = jax.tree.map(lambda *x: np.stack(x), *path)

  def energies(key):
    tx = make(_factory(streaming_matrix.identity()), steps=STEPS, prng_key=key)

    def step(state, params):
      zeros = jax.tree.map(jnp.zeros_like, params)
      noise, state = tx.update(zeros, state, params)
      return state, noise

    _, noise = jax.lax.scan(step, tx.init(path[0]), moves)
    noise = noise['m0']
    return jnp.sum(noise['lora_a'][1] ** 2) + jnp.sum(noise['lora_b'][1] ** 2)

  keys = jax.random.split(jax.random.key(0), 1500)
  drawn = jax.jit(lambda k: jax.lax.map(energies, k))(keys)
  ((m, n, rank),) = SHAPES
  law = scipy.stats.chi2(rank * (m + n - rank))
  scaled = np.float64(drawn) / STDDEV**2
  assert scipy.stats.kstest(scaled, law.cdf).pvalue > 1e-3
  for wrong in (2 / 3, 3 / 2):
    assert scipy.stats.kstest(wrong**2 * scaled, law.cdf).pvalue < 1e-6


@pytest.mark.slow
def test_noise_cancels_in_the_dense_sum_where_subspaces_move_little():
  """The sum of differences is the last draw alone; in frames that turn, not."""
  rng = np.random.default_rng(3)
  start = _params()
  steps = 40
  path = [start]
  for _ in range(steps - 1):
    # Another gauge at every step: frames turn at will, Z stays.
    gauge = {
      m: np.linalg.qr(rng.normal(size=(r, r)))[0]
      for m, (_, _, r) in zip(('m0',), SHAPES, strict=True)
    }
    path.append({
      'extra': start['extra'],
      **{
        m: {
          'lora_a': start[m]['lora_a'] @ np.float32(g),
          'lora_b': np.float32(g.T) @ start[m]['lora_b'],
        }
        for m, g in gauge.items()
      },
    })  # fmt: skip
  differences = toeplitz.inverse_as_streaming_matrix(jnp.ones(steps))

  def total(tx):
    noises, _ = _run(tx, path, _zeros(path))
    dense = []
    for params, noise in zip(path, noises, strict=True):
      stacks = _coordinates(params, noise)
      dense.append([
        np.float64(x.left[0]) @ np.float64(f.right[0]).T
        + np.float64(f.left[0]) @ np.float64(x.right[0]).T
        for f, x in zip(_frames(params), stacks.pairs, strict=True)
      ])  # fmt: skip
    energy = sum(np.sum(sum(x) ** 2) for x in zip(*dense, strict=True))
    return energy / STDDEV**2 / sum(r * (m + n - r) for m, n, r in SHAPES)

  aligned = total(make(_factory(differences), steps=steps, prng_key=0))
  moving = total(
    prism_optax.tangent_privatizer(
      privatizer=_factory(differences)(jax.random.key(0)), steps=steps
    )
  )
  # One draw: chi-square of 39 degrees of freedom over their number.
  assert 0.4 < aligned < 1.8
  assert moving > 10  # Unaligned: a sum of 40 differences, up to 80.


# jax-privacy's own test cases for its privatizers, with ours in their place.


@pytest.mark.parametrize('name', FAST)
def test_noise_is_unique_over_steps_entries_leaves_and_keys(name):
  path = _path(_params())
  rows = []
  for key in (1234, 5678):
    _, of, update = _named(name)
    noises, _ = _run(of(key), path, _zeros(path), update)
    rows += [np.ravel(x) for noise in noises for x in jax.tree.leaves(noise)]
  values = np.concatenate(rows)
  assert len(np.unique(values)) == values.size


def _data(*leaves):
  return [
    jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    else x
    for x in leaves
  ]  # fmt: skip


# What the state and the horizon guard.


def test_nothing_is_released_beyond_the_horizon():
  path = _path(_params(), 3)
  tx = make(_factory(_dense()), steps=2, prng_key=0)
  update = jax.jit(tx.update)
  _, state = _run(tx, path[:2], _random(path[:2]), update)
  (signal,) = _random(path[2:])
  with pytest.raises(ValueError, match='steps=2 updates.*update 3'):
    tx.update(signal, state, path[2])
  out, _ = update(signal, state, path[2])
  assert not any(np.any(x) for x in jax.tree.leaves(out))


@pytest.mark.parametrize(
  'name', ['dense', pytest.param('buffered Toeplitz', marks=pytest.mark.slow)]
)
def test_a_restored_state_continues_the_same_stream(name):
  """Also for the dense privatizer, whose own state does not hold its key."""
  path = _path(_params())
  noising, of, update = _named(name)
  state = of(None).init(path[0])  # A fresh secret key.
  whole, saved = [], None
  for t, (params, zeros) in enumerate(zip(path, _zeros(path), strict=True)):
    if t == 2:
      saved = jax.tree.map(lambda x: np.asarray(*_data(x)), state)
    noise, state = update(zeros, state, params)
    whole.append(noise)
  # Another process: another transformation, with nothing but the saved state.
  again = make(_factory(noising), steps=STEPS)
  like = again.init(path[0])
  state = jax.tree.map(
    lambda x, y: (
      jax.random.wrap_key_data(y)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else jnp.asarray(y)
    ),
    like,
    saved,
  )
  update = jax.jit(again.update)
  for params, zeros, want in zip(
    path[2:], _zeros(path[2:]), whole[2:], strict=True
  ):
    noise, state = update(zeros, state, params)
    jax.tree.map(np.testing.assert_array_equal, noise, want)


def test_every_init_without_a_key_is_another_stream():
  params = _params()
  tx = make(_factory(_dense()), steps=STEPS)
  keys = [jax.random.key_data(tx.init(params).prng_key) for _ in range(4)]
  assert len(np.unique(keys, axis=0)) == 4


@pytest.mark.parametrize('side', ['lora_a', 'lora_b'])
def test_a_start_that_has_lost_rank_is_refused_by_name(side):
  params = _params(shapes=TWO_SHAPES)
  tx = make(_factory(_dense()), steps=STEPS, prng_key=0)
  tx.init(params)
  zero = {**params, 'm1': {**params['m1']}}
  zero['m1'][side] = jnp.zeros_like(params['m1'][side])
  with pytest.raises(ValueError, match=r"of \['m1'\] are zero or rank-def"):
    tx.init(zero)
  lost = {**params, 'm0': {**params['m0']}}
  axis = 1 if side == 'lora_a' else 0
  first = jnp.take(params['m0'][side], jnp.array([0]), axis=axis)
  lost['m0'][side] = jnp.broadcast_to(first, params['m0'][side].shape)
  with pytest.raises(ValueError, match=r"of \['m0'\].*warm up"):
    tx.init(lost)


# The noise that the preconditioner is told.


@pytest.mark.parametrize('name', NOISING)
def test_stddev_per_step_is_the_norm_of_the_rows(name):
  noising = NOISING[name]()
  found = transforms.correlated_noise_stddev(noising, 3.0, STEPS)
  rows = np.linalg.norm(_materialized(noising), axis=1)
  np.testing.assert_allclose(found, 3 * rows, rtol=1e-5)
  shorter = transforms.correlated_noise_stddev(noising, 3.0, STEPS - 2)
  np.testing.assert_allclose(shorter, found[:-2], rtol=1e-6)


@pytest.mark.slow
def test_stddev_per_step_is_what_the_floor_sees():
  """Second moments of pure noise tend to s_t^2 I, step by step."""
  params = _params()
  matrix = np.array([[1.0, 0.0, 0.0], [-2.0, 1.0, 0.0], [0.0, 0.5, 3.0]])
  stddevs = transforms.correlated_noise_stddev(matrix, STDDEV, 3)

  def second_moments(key):
    tx = optax.chain(
      make(_factory(np.float32(matrix)), steps=3, prng_key=key),
      prism_optax.scale_by_rank_preconditioner(
        b2=0.0, noise_stddev=stddevs, max_condition_number=1e12
      ),
    )
    zeros = jax.tree.map(jnp.zeros_like, params)

    def step(state, _):
      _, state = tx.update(zeros, state, params)
      return state, [(x.nu, x.noise) for x in state[1].pairs]

    _, out = jax.lax.scan(step, tx.init(params), length=3)
    return out

  keys = jax.random.split(jax.random.key(0), 300)
  moments = jax.jit(lambda k: jax.lax.map(second_moments, k))(keys)
  for step, stddev in enumerate(stddevs):
    for nu, noise in jax.tree.map(lambda x: x[:, step], moments):  # noqa: B023
      for v, known in zip(nu, noise, strict=True):
        rank = v.shape[-1]
        np.testing.assert_allclose(
          known[0, 0], stddev**2 * np.eye(rank), atol=1e-5 * stddev**2
        )
        # 300 draws of 6 to 11 squares on each entry.
        np.testing.assert_allclose(
          np.mean(v, (0, 1)), stddev**2 * np.eye(rank), atol=0.16 * stddev**2
        )
