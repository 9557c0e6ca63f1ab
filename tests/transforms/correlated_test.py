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
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import (
  banded,
  buffered_toeplitz,
  streaming_matrix,
  toeplitz,
)  # fmt: skip

import prism_optax
from prism_optax import transforms
from tests import cases
from tests.oracles import problems

STEPS = 5
STDDEV = 0.7
# One module, where a second one of another shape would only be compiled too.
SHAPES = [(9, 7, 3)]
TWO_SHAPES = [*SHAPES, (6, 11, 2)]
make = transforms.correlated_tangent_privatizer


def _coefs():
  return toeplitz.optimal_max_error_strategy_coefs(STEPS)


NOISING = {
  'gaussian': streaming_matrix.identity,
  'dense': lambda: toeplitz.materialize_lower_triangular(
    toeplitz.optimal_max_error_noising_coefs(STEPS)
  ),
  'streaming prefix sum': streaming_matrix.prefix_sum,
  'banded': lambda: banded.ColumnNormalizedBanded.default(
    STEPS, 3
  ).inverse_as_streaming_matrix(),
  'banded Toeplitz': lambda: toeplitz.inverse_as_streaming_matrix(_coefs()[:3]),
  'inverse banded': lambda: toeplitz.inverse_as_streaming_matrix(
    _coefs()[:2] / jnp.linalg.norm(_coefs()[:2]), column_normalize_for_n=STEPS
  ),
  'buffered Toeplitz': lambda: buffered_toeplitz.BufferedToeplitz.build(
    [0.9, 0.4], [0.3, 0.2], dtype=jnp.float32
  ).inverse_as_streaming_matrix(),
}


def _materialized(noising):
  if hasattr(noising, 'materialize'):
    noising = noising.materialize(STEPS)
  return np.float64(noising)


def _factory(noising, stddev=STDDEV):
  return lambda key: noise_addition.matrix_factorization_privatizer(
    noising, stddev=stddev, prng_key=key
  )


def _params(layout='plain'):
  if layout == 'plain':
    return cases.adapters(SHAPES)
  layers = [cases.adapters(TWO_SHAPES, seed) for seed in range(4)]
  stacked = jax.tree.map(lambda *x: np.stack(x), *layers)
  return stacked | {'extra': layers[0]['extra']}


def _path(params, steps=STEPS, size=0.1):
  """Parameters that move by a good part of themselves at every step."""
  out = [params]
  for step in range(steps - 1):
    change = cases.normal(params, step, scale=size)
    out.append(jax.tree.map(np.add, out[-1], change))
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


def _run(tx, path, signals, update):
  state, out = tx.init(path[0]), []
  for params, signal in zip(path, signals, strict=True):
    noisy, state = update(signal, state, params)
    out.append(jax.device_get(noisy))
  return out, state


def _signals(path):
  return [cases.normal(x, 2 + i) for i, x in enumerate(path)]


def _independent(params, key, noising):
  """The standard normal draws behind a privatizer, [tree of step t].

  The same keys reach an identity matrix; a dense privatizer draws otherwise
  than a streaming one.
  """
  dense = not hasattr(noising, 'materialize')
  identity = jnp.eye(STEPS) if dense else streaming_matrix.identity()
  privatizer = _factory(identity, 1.0)(key)
  zeros = jax.tree.map(np.zeros_like, params)
  given = [params] * STEPS, [zeros] * STEPS
  return _run(privatizer, *given, jax.jit(privatizer.update))[0]


def _polar(x):
  u, _, vt = np.linalg.svd(x)
  return u @ vt


def _oracle(path, signals, fixed_noise):
  """``project(signal + noise turned into the frame)``, step by step."""
  frames = [
    [tuple(map(np.float64, frame[:2])) for frame in problems.frames(params)]
    for params in path
  ]
  aligned, out = frames[0], []
  for at, signal, noise in zip(frames, signals, fixed_noise, strict=True):
    turns = jax.tree.map(
      lambda q, old: _polar(np.swapaxes(q, -1, -2) @ old), at, aligned
    )
    aligned = jax.tree.map(np.matmul, at, turns)
    pairs = []
    for x, z, new, turn in zip(
      *map(cases.factors_of, (signal, noise)), at, turns, strict=True
    ):
      left = x[0] + z[0] @ np.swapaxes(turn[1], -1, -2)
      right = x[1] + z[1] @ np.swapaxes(turn[0], -1, -2)
      left = left - new[0] @ (np.swapaxes(new[0], -1, -2) @ left)
      pairs.append((left, right))
    out.append((pairs, signal['extra'] + noise['extra']))
  return out


@cases.fast_first('layout', ['plain'], ['plain', 'stacked'])
@cases.fast_first('name', ['dense'], NOISING)
def test_every_privatizer_is_a_dense_product_in_fixed_coordinates(name, layout):
  noising, of, update = _named(name)
  path = _path(_params(layout))
  signals, key = _signals(path), jax.random.key(4)
  got, _ = _run(of(key), path, signals, update)
  z = _independent(path[0], key, noising)
  noise = [
    jax.tree.map(lambda *x, row=row: np.tensordot(row, np.float64(x), 1), *z)
    for row in STDDEV * _materialized(noising)
  ]
  for found, want in zip(got, _oracle(path, signals, noise), strict=True):
    # float32 sums of a few numbers of order one.
    cases.assert_close((cases.factors_of(found), found['extra']), want, 2e-5)


@pytest.mark.slow
def test_the_privatizer_sees_the_norm_of_what_came_in():
  """Orthogonal turns, whatever happens to the frames: Delta stays Delta."""

  def spy(key):
    del key

    def update(updates, state, params=None):
      del params, state
      return updates, optax.tree.norm(updates)

    return optax.GradientTransformation(lambda tree: jnp.zeros(()), update)

  path = _path(cases.adapters(TWO_SHAPES), size=2.0)
  for name in ('lora_a', 'lora_b'):  # Rank is lost on the way, and found again.
    path[2]['m0'][name] = np.zeros_like(path[0]['m0'][name])
    path[3]['m1'][name] = path[3]['m1'][name] * 1e-12
  tx = make(spy, steps=STEPS, prng_key=0)
  state, update = tx.init(path[0]), jax.jit(tx.update)
  for at, signal in zip(path, _signals(path), strict=True):
    out, state = update(signal, state, at)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))
    seen = state.inner.inner
    np.testing.assert_allclose(seen, cases.norm(signal), rtol=2e-6)  # float32


@pytest.mark.parametrize('plain', [False, True])
def test_nothing_is_released_beyond_the_horizon(plain):
  path = _path(_params(), 3)
  tx = make(_factory(NOISING['dense']()), steps=2, prng_key=0)
  if plain:
    tx = prism_optax.tangent_privatizer(2.0, prng_key=2**100, steps=2)
  update = jax.jit(tx.update)
  *first, signal = _signals(path)
  noisy, state = _run(tx, path[:2], first, update)
  assert all(np.any(x) for x in jax.tree.leaves(noisy))
  with pytest.raises(ValueError, match='steps=2 updates.*update 3'):
    tx.update(signal, state, path[2])
  out, _ = update(signal, state, path[2])
  assert not any(np.any(x) for x in jax.tree.leaves(out))


def test_a_restored_state_continues_the_same_stream():
  """Of a fresh secret key, which a dense privatizer has not in its state."""
  path = _path(_params())
  zeros = [jax.tree.map(np.zeros_like, x) for x in path]
  noising, of, update = _named('dense')
  _, state = _run(of(None), path[:2], zeros[:2], update)
  saved = cases.saved(state)
  # Another process: another transformation, with nothing but the saved state.
  again = make(_factory(noising), steps=STEPS)
  starts = [again.init(path[0]) for _ in range(2)]
  restored = cases.restored(saved, starts[0])
  found, _ = jax.jit(again.update)(zeros[2], restored, path[2])
  cases.assert_same_bits(found, update(zeros[2], state, path[2])[0])
  # Every `init` without a key is another stream.
  keys = [jax.random.key_data(x.prng_key) for x in (*starts, state)]
  assert len(np.unique(keys, axis=0)) == 3


@pytest.mark.parametrize('side', ['lora_a', 'lora_b'])
def test_a_start_that_has_lost_rank_is_refused_by_name(side):
  params = cases.adapters(TWO_SHAPES)
  tx = make(_factory(NOISING['dense']()), steps=STEPS, prng_key=0)
  tx.init(params)

  def with_leaf(name, change):
    return params | {name: params[name] | {side: change(params[name][side])}}

  with pytest.raises(ValueError, match=r"of \['m1'\] are zero or rank-def"):
    tx.init(with_leaf('m1', np.zeros_like))
  with pytest.raises(ValueError, match=r"of \['m0'\].*warm up"):
    tx.init(with_leaf('m0', np.ones_like))
  # Where some values are not known, none is looked at.
  several = jax.tree.map(lambda x: x[None], params['m1'])
  jax.vmap(lambda x: tx.init(params | {'m1': x}))(several)


@cases.fast_first('name', set(NOISING) - {'buffered Toeplitz'}, NOISING)
def test_stddev_per_step_is_the_norm_of_the_rows(name):
  """What the preconditioner is told."""
  noising = NOISING[name]()
  found = transforms.correlated_noise_stddev(noising, 3.0, STEPS - 2)
  rows = np.linalg.norm(_materialized(noising), axis=1)[:-2]
  np.testing.assert_allclose(found, 3 * rows, rtol=1e-5)
