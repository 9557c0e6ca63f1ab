"""The intrinsic clip against the dense oracle, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import lora, training
from tests import cases
from tests.oracles import oracles, problems

SHAPES = [(9, 7, 3), (9, 7, 3), (6, 11, 2)]
pytestmark = pytest.mark.usefixtures('x64')


@jax.jit
def _clip(params, grads, norm, normalize_by, padding):
  tx = prism_optax.intrinsic_clip(norm, normalize_by=normalize_by)
  state = tx.init(params)
  return tx.update(grads, state, params, is_padding_example=padding)[0]


def _problem(batch=5, condition=1.0, dtype=jnp.float64, canonical=False):
  rng = np.random.default_rng(0)
  factors, dense = cases.random_problem(rng, SHAPES, batch, condition)
  if canonical:
    factors = [oracles.balance(pair) for pair in factors]
  extra = rng.normal(size=(batch, 4))
  params = cases.tree_of(factors, np.ones(4), dtype)
  return factors, dense, extra, params


@pytest.mark.parametrize('condition', [1.0, 1e3, 1e6])
@pytest.mark.parametrize('norm', [0.5, 15.0, 1e6])
@pytest.mark.parametrize('canonical', [False, True])
def test_clipped_sum_equals_the_dense_oracle(norm, condition, canonical):
  factors, dense, extra, params = _problem(
    condition=condition, canonical=canonical
  )
  # Rounding of factors of that condition, relative to gradients of order 10.
  tolerance = 1e-13 * condition
  padding = np.array([False, False, True, False, False])
  grads = cases.factor_gradients(factors, dense, extra)
  got = _clip(params, grads, norm, 8.0, padding)
  points = [oracles.Point.from_factors(*f) for f in factors]
  want, (want_extra,), _ = oracles.clipped_mean(
    points, dense, [extra], l2_clip_norm=norm, normalize_by=8.0, padding=padding
  )
  found = [*problems.embed(params, got), got['extra']]
  cases.assert_close(found, [*want, want_extra], max(tolerance, 1e-14), 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize('value', [1e-3, 1e20, 3e38])
def test_what_a_zero_factor_hides_stays_hidden_whatever_its_size(value):
  """No overflow of the sum either: NaN in the release would tell of it."""
  _, dense, extra, params = _problem(dtype=jnp.float32, canonical=True, batch=8)
  names = 'm0', 'm1', 'm2'
  for name in names:
    params[name]['lora_b'] = jnp.zeros_like(params[name]['lora_b'])
  params = lora.canonicalize(params)
  factors = cases.factors_of(params)
  grads = cases.factor_gradients(factors, dense, extra, jnp.float32)
  hidden = grads | {
    name: {**grads[name], 'lora_a': np.full_like(grads[name]['lora_a'], value)}
    for name in names
  }
  clipped, with_hidden = (
    _clip(params, x, 100.0, 1.0, np.zeros(8, bool)) for x in (grads, hidden)
  )
  for name in names:
    np.testing.assert_array_equal(with_hidden[name]['lora_a'], 0)
    if value < 1e27:
      found, want = (x[name]['lora_b'] for x in (with_hidden, clipped))
      np.testing.assert_allclose(found, want, atol=1e-4)
  assert cases.norm(with_hidden) <= 8 * 100.0


@pytest.mark.slow
def test_a_rule_of_its_own_in_either_chain():
  """A quantile: its votes are added up in the same pass as the gradients."""
  rule = training.QuantileClipping(0.9, fraction_stddev=0.0)
  params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
  grads = jax.tree.map(lambda x: jnp.stack([x, 9 * x]), params)
  parts = (
    prism_optax.intrinsic_clip(3.0, rule=rule, normalize_by=2.0, prng_key=1),
    prism_optax.tangent_privatizer(1e-3, prng_key=2),
  )
  fused = prism_optax.chain(*parts, retract_elsewhere=True)
  assert fused.sensitivity() == 0.5

  @jax.jit
  def update(grads):
    return [
      tx.update(grads, tx.init(params), params)
      for tx in (fused, optax.chain(*parts))
    ]

  (one, state), (two, other) = update(grads)
  cases.assert_same_bits(one, two)
  # The norms are in [1, 2] and nine times this: one of two is below C = 3.
  for found in (state, other):
    assert float(found[0].l2_clip_norm) == pytest.approx(
      3 * np.exp(-0.2 * (0.5 - 0.9)), rel=1e-5
    )
