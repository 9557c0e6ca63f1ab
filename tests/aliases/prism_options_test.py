"""The optimizers are their chains; bad arguments are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import contrib, transforms
from tests.oracles import problems

SHAPES = [(8, 6, 3), (5, 9, 2)]
REQUIRED = {
  'l2_clip_norm': 2.0,
  'noise_multiplier': 0.4,
  'expected_batch_size': 5.0,
}
STDDEV = 0.4 * 2.0 / 5.0


def _train(tx, shapes, steps=4):
  problem = problems.Problem(shapes)
  params = problem.params(*problem.start(), jnp.float32)
  state = tx.init(params)
  update = jax.jit(tx.update)
  for step in range(steps):
    grads = problem.factor_gradients(
      params, problem.gradients(step, problem.dense(params))
    )
    updates, state = update(grads, state, params)
    params = optax.apply_updates(params, updates)
  return params


def _head():
  return (
    prism_optax.intrinsic_clip(2.0, normalize_by=5.0),
    prism_optax.tangent_privatizer(STDDEV, prng_key=7),
  )


def _assert_same(alias, chain, shapes=SHAPES[:1]):
  """One shape is one program: that there may be two, one test shows."""
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5),
    _train(alias, shapes),
    _train(chain, shapes),
  )


@pytest.mark.slow
def test_rows_are_scaled_in_the_fused_chain_as_in_that_of_optax():
  lines = (
    *_head(),
    contrib.scale_by_row_moments(noise_stddev=STDDEV),
    prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV),
    prism_optax.add_decayed_factors(0.1),
    prism_optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )
  _assert_same(prism_optax.chain(*lines), optax.chain(*lines))


@pytest.mark.slow
def test_prism_muon_is_muon_on_the_manifold():
  alias = contrib.prism_muon(0.05, **REQUIRED, prng_key=7, momentum=0.8)
  chain = optax.chain(
    *_head(),
    contrib.orthogonalize_tangents(0.8, b1=0.8, coordinate_rms=1.0),
    prism_optax.add_decayed_factors(0.1),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )
  _assert_same(alias, chain)


@pytest.mark.slow
def test_published_prism_aligns_its_retraction():
  alias = prism_optax.published_prism(0.05, **REQUIRED, prng_key=7)
  chain = optax.chain(
    *_head(),
    transforms.scale_by_published_preconditioner(noise_stddev=STDDEV),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(align=True),
  )
  _assert_same(alias, chain)


def _first_update(tx):
  params = {'lora_a': jnp.eye(4, 1), 'lora_b': jnp.full((1, 3), 0.5)}
  grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), params)
  return jax.jit(tx.update)(grads, tx.init(params), params)[0]


def _difference(one, other):
  return max(
    float(np.max(np.abs(x - y)))
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True)
  )


@pytest.mark.slow
def test_what_is_not_given_to_prism():
  """A little decay, and no correction of the first moment's bias."""
  default = _first_update(prism_optax.prism(0.05, **REQUIRED, prng_key=7))
  given = {'weight_decay': 0.1, 'bias_correction': False}

  def chained(**options):
    return _first_update(
      problems.chain_of(0.05, **REQUIRED, prng_key=7, **options)
    )

  jax.tree.map(np.testing.assert_array_equal, default, chained(**given))
  for other in (
    {**given, 'weight_decay': 0.0},
    {**given, 'bias_correction': True},
  ):
    assert _difference(default, chained(**other)) > 1e-4, other


@pytest.mark.slow
def test_what_is_fixed_in_published_prism():
  """No decay, and the correction of the bias: the first step has no b1."""

  def first(**options):
    return _first_update(
      prism_optax.published_prism(0.05, **REQUIRED, prng_key=7, **options)
    )

  def chained(decay):
    return _first_update(
      prism_optax.chain(
        *_head(),
        transforms.scale_by_published_preconditioner(noise_stddev=STDDEV),
        prism_optax.add_decayed_factors(decay),
        prism_optax.scale_by_learning_rate(0.05),
        prism_optax.retract(align=True),
      )
    )

  # A decay of zero adds a product with zeros: the same to rounding.
  assert _difference(first(), chained(0.0)) < 1e-6
  assert _difference(first(), chained(0.1)) > 1e-4
  # (1 - b1) g / (1 - b1^1) = g, to rounding.
  assert _difference(first(), first(b1=0.0)) < 1e-6


def test_sensitivity_is_that_of_the_clip():
  tx = prism_optax.prism(0.1, **REQUIRED)
  assert tx.sensitivity() == pytest.approx(0.4)
