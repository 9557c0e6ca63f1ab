"""The intrinsic clip against the dense oracle, and its edge cases."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import _modules, lora, training
from prism_optax.fixed_rank import _lifts
from tests import cases
from tests.oracles import oracles

SHAPES = [(9, 7, 3), (9, 7, 3), (6, 11, 2)]
pytestmark = pytest.mark.usefixtures('x64')


@jax.jit
def _clip_of_any_norm(params, grads, norm, padding, normalize_by):
  tx = prism_optax.intrinsic_clip(norm, normalize_by=normalize_by)
  return tx.update(grads, tx.init(params), params, is_padding_example=padding)[
    0
  ]


def _problem(
  seed=0, batch=5, condition=1.0, dtype=jnp.float64, canonical=False
):
  rng = np.random.default_rng(seed)
  factors, dense = cases.random_problem(rng, SHAPES, batch, condition)
  if canonical:
    factors = [oracles.balance(pair) for pair in factors]
  extra = rng.normal(size=(batch, 4))
  params = cases.tree_of(factors, np.ones(4), dtype)
  return factors, dense, extra, params


def _clip(params, grads, norm, normalize_by=1.0, padding=None):
  if padding is None:
    padding = np.zeros(len(grads['extra']), bool)
  return _clip_of_any_norm(params, grads, norm, padding, normalize_by)


@jax.jit
def _stacks(tree, params):
  modules = _modules.ModuleTree(params)
  stacks = modules.coordinates(tree)
  return [
    _lifts.embed(f, t)
    for f, t in zip(modules.frames(params), stacks.pairs, strict=True)
  ]


def _embedded(tree, params):
  """Coordinates as dense matrices: what no gauge changes."""
  stacks = [np.asarray(x) for x in _stacks(tree, params)]
  return [stacks[0][0], stacks[0][1], stacks[1][0]], np.asarray(tree['extra'])


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
  got, got_extra = _embedded(_clip(params, grads, norm, 8.0, padding), params)
  points = [oracles.Point.from_factors(*f) for f in factors]
  want, (want_extra,), _ = oracles.clipped_mean(
    points, dense, [extra], l2_clip_norm=norm, normalize_by=8.0, padding=padding
  )
  for a, b in zip([*got, got_extra], [*want, want_extra], strict=True):
    np.testing.assert_allclose(a, b, atol=max(tolerance, 1e-14), rtol=1e-13)


def test_coordinates_of_one_example_are_those_of_the_clip():
  factors, dense, extra, params = _problem()
  grads = cases.factor_gradients(factors, dense, extra)
  transform = prism_optax.tangent_coordinates(params)
  each = jax.jit(jax.vmap(transform))(grads)
  summed = _clip(params, grads, 1e9)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x.sum(0), y, atol=1e-12),
    each,
    summed,
  )


def test_scale_means_the_same_whatever_alpha_is():
  """Z = scale L R^T: the same Z, the same dense gradient, the same clip."""
  factors, dense, extra, params = _problem()
  layout = lora.Layout(scale=16.0)
  small = [(left / 8, right / 2) for left, right in factors]
  grads = cases.factor_gradients(
    small, [16 * g for g in dense], extra
  )  # dL/d left = scale G right
  tx = prism_optax.intrinsic_clip(2.0, layout=layout)
  params_small = cases.tree_of(small, np.ones(4))
  got, _ = jax.jit(tx.update)(grads, tx.init(params_small), params_small)
  want = _clip(params, cases.factor_gradients(factors, dense, extra), 2.0)
  # Frames of proportional factors are equal, so the coordinates are.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-13), got, want
  )


@pytest.mark.parametrize('value', [1e-3, 1e20, 3e38])
def test_what_a_zero_factor_hides_stays_hidden_whatever_its_size(value):
  """No overflow of the sum either: NaN in the release would tell of it."""
  _, dense, extra, params = _problem(dtype=jnp.float32, canonical=True, batch=8)
  for name in ('m0', 'm1', 'm2'):
    params[name]['lora_b'] = jnp.zeros_like(params[name]['lora_b'])
  params = lora.canonicalize(params)
  grads = cases.factor_gradients(
    cases.factors_of(params), dense, extra, jnp.float32
  )
  clipped = _clip(params, grads, 100.0)
  hidden = {
    name: {**x, 'lora_a': np.full_like(x['lora_a'], value)}
    if name != 'extra'
    else x
    for name, x in grads.items()
  }
  with_hidden = _clip(params, hidden, 100.0)
  for name in ('m0', 'm1', 'm2'):
    np.testing.assert_array_equal(with_hidden[name]['lora_a'], 0)
    if value < 1e27:
      np.testing.assert_allclose(
        with_hidden[name]['lora_b'], clipped[name]['lora_b'], atol=1e-4
      )
  norm = np.sqrt(
    sum(np.sum(np.square(x)) for x in jax.tree.leaves(with_hidden))
  )
  assert norm <= 8 * 100.0


def test_divisor_is_the_given_constant_not_the_batch():
  factors, dense, extra, params = _problem()
  grads = cases.factor_gradients(factors, dense, extra)
  some = _clip(params, grads, 1.0, 10.0)
  padded = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x)]), grads)
  # Zeros are examples too; they add nothing and change no divisor.
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=1e-15),
    _clip(params, padded, 1.0, 10.0),
    some,
  )


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
  for x, y in zip(*map(jax.tree.leaves, (one, two)), strict=True):
    np.testing.assert_array_equal(x, y)
  # The norms are in [1, 2] and nine times this: one of two is below C = 3.
  for found in (state, other):
    assert float(found[0].l2_clip_norm) == pytest.approx(
      3 * np.exp(-0.2 * (0.5 - 0.9)), rel=1e-5
    )
