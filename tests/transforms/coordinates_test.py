"""Tangent coordinates where inverse cores are diagonal, and where not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import fixed_rank, lora
from prism_optax.fixed_rank import _lifts, _tangents
from tests.oracles import oracles

RANK = 4


def _factors(gauge, dtype):
  """(left, right) with singular values over two decades, in some gauge."""
  rng = np.random.default_rng(0)
  u, v = (np.linalg.qr(rng.normal(size=(k, RANK)))[0] for k in (9, 7))
  root = np.logspace(0, -1, RANK)
  turn = np.eye(RANK)
  if gauge == 'turned':
    turn = np.linalg.qr(rng.normal(size=(RANK, RANK)))[0]
  left, right = (u * root @ turn).astype(dtype), (v * root @ turn).astype(dtype)
  if gauge == 'a start':  # One factor zero, and a lost column in the other.
    left, right[:, 1] = 0 * left, 0
  if gauge == 'nearly':
    right[:, 1] += 1e-3 * right[:, 0]
  return left, right


GAUGES = {'retracted': True, 'a start': True, 'turned': False, 'nearly': False}


@pytest.mark.parametrize('gauge', GAUGES)
@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_they_are_those_of_the_oracle(gauge, dtype, monkeypatch):
  """By columns where that is the same to rounding, and nowhere else."""
  by_columns, times_diagonal = [], _tangents.times_diagonal

  def counted(x, matrix):
    by_columns.append(True)
    return times_diagonal(x, matrix)

  monkeypatch.setattr(_tangents, 'times_diagonal', counted)
  with jax.enable_x64(dtype is np.float64):
    left, right = _factors(gauge, dtype)
    params = {'lora_a': jnp.asarray(right), 'lora_b': jnp.asarray(left.T)}
    dense = np.random.default_rng(1).normal(size=(9, 7))
    grads = {
      'lora_a': jnp.asarray(dense.T @ left, dtype),
      'lora_b': jnp.asarray((dense @ right).T, dtype),
    }
    found = prism_optax.tangent_coordinates(params)(grads)
    assert bool(by_columns) == GAUGES[gauge]
    # Under jit the program has both and decides by the parameters.
    jitted = jax.jit(lambda p, g: prism_optax.tangent_coordinates(p)(g))
    eps = float(np.finfo(dtype).eps)
    jax.tree.map(
      lambda x, y: np.testing.assert_allclose(x, y, atol=64 * eps),
      jitted(params, grads), found,
    )  # fmt: skip
    frame = fixed_rank.frame(
      fixed_rank.Factors(*map(jnp.asarray, (left, right)))
    )
    tangent = fixed_rank.Tangent(found['lora_b'].T, found['lora_a'])
    embedded = np.float64(_lifts.embed(frame, tangent))
  point = oracles.Point.from_factors(np.float64(left), np.float64(right))
  # A gradient of order one over singular values down to a tenth.
  np.testing.assert_allclose(embedded, point.project(dense), atol=200 * eps)


def test_columns_stay_orthogonal_in_training():
  """To the rounding that counts as none, at a high rank and in float32."""
  rng = np.random.default_rng(0)
  params = lora.canonicalize({
    'lora_a': jnp.asarray(rng.normal(size=(96, 48)), jnp.float32),
    'lora_b': jnp.zeros((48, 80)),
  })  # fmt: skip
  tx = prism_optax.prism(
    0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8,
    per_example_gradients=False, prng_key=0,
  )  # fmt: skip
  state, nothing = tx.init(params), jax.tree.map(jnp.zeros_like, params)

  @jax.jit
  def step(params, state):
    updates, state = tx.update(nothing, state, params)
    params = optax.apply_updates(params, updates)
    frame = fixed_rank.frame(
      fixed_rank.Factors(params['lora_b'].T, params['lora_a'])
    )
    return params, state, _tangents.has_diagonal_inverses(frame)

  for _ in range(5):
    params, state, diagonal = step(params, state)
    assert diagonal
