"""Options of `prism` are the parts they stand for; bad ones are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from tests.oracles import problems

SHAPES = [(8, 6, 3), (5, 9, 2)]
REQUIRED = {
  'l2_clip_norm': 2.0,
  'noise_multiplier': 0.4,
  'expected_batch_size': 5.0,
}
STDDEV = 0.4 * 2.0 / 5.0


def _train(tx, steps=4):
  problem = problems.Problem(SHAPES)
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


def _assert_same(alias, chain):
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5),
    _train(alias),
    _train(chain),
  )


@pytest.mark.slow
def test_prism_is_its_chain():
  alias = prism_optax.prism(
    0.05, **REQUIRED, prng_key=7, weight_decay=0.1, b1=0.8, debias=True,
    max_update_norm=3.0, retraction_method='second_order',
  )  # fmt: skip
  chain = optax.chain(
    *_head(),
    prism_optax.scale_by_rank_preconditioner(
      0.8, noise_stddev=STDDEV, debias=True, max_update_norm=3.0
    ),
    prism_optax.add_decayed_factors(0.1),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(method='second_order'),
  )
  _assert_same(alias, chain)


@pytest.mark.slow
def test_orthogonalize_is_muon_on_the_manifold():
  alias = prism_optax.prism(
    0.05, **REQUIRED, prng_key=7, orthogonalize=True, b1=0.8
  )
  chain = optax.chain(
    *_head(),
    prism_optax.orthogonalize_tangents(0.8, b1=0.8, coordinate_rms=1.0),
    prism_optax.add_decayed_factors(0.1),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )
  _assert_same(alias, chain)


@pytest.mark.slow
def test_paper_mode_aligns_its_retraction():
  alias = prism_optax.prism(0.05, **REQUIRED, prng_key=7, basis='factor')
  chain = optax.chain(
    *_head(),
    prism_optax.scale_by_rank_preconditioner(
      noise_stddev=STDDEV, basis='factor'
    ),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(align=True),
  )
  _assert_same(alias, chain)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('basis', 'decay', 'bias_correction'),
  [('orthonormal', 0.1, False), ('factor', 0.0, True)],
)
def test_what_is_not_given_depends_on_the_basis(basis, decay, bias_correction):
  params = {'lora_a': jnp.eye(4, 1), 'lora_b': jnp.full((1, 3), 0.5)}
  grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), params)

  def moved_by(**options):
    tx = prism_optax.prism(0.05, **REQUIRED, prng_key=7, basis=basis, **options)
    return jax.jit(tx.update)(grads, tx.init(params), params)[0]

  default = moved_by()
  given = {'weight_decay': decay, 'bias_correction': bias_correction}
  jax.tree.map(np.testing.assert_array_equal, default, moved_by(**given))
  for other in (
    {**given, 'weight_decay': 0.1 - decay},
    {**given, 'bias_correction': not bias_correction},
  ):
    changed = jax.tree.map(
      lambda x, y: np.max(np.abs(x - y)), default, moved_by(**other)
    )
    assert max(jax.tree.leaves(changed)) > 1e-4, other


def test_sensitivity_is_that_of_the_clip():
  tx = prism_optax.prism(0.1, **REQUIRED)
  assert tx.sensitivity() == pytest.approx(0.4)


def test_hyper_parameters_may_be_injected():
  """A schedule of the learning rate and a traced noise multiplier."""
  tx = optax.inject_hyperparams(
    prism_optax.prism,
    static_args=(
      'prng_key', 'per_example_gradients', 'retraction_method', 'basis',
      'orthogonalize', 'floor_mode', 'debias', 'transport', 'layout',
      'max_update_norm', 'weight_decay',
    ),
  )(
    learning_rate=optax.linear_schedule(0.05, 0.0, 4), **REQUIRED, prng_key=7
  )  # fmt: skip
  plain = prism_optax.prism(
    optax.linear_schedule(0.05, 0.0, 4), **REQUIRED, prng_key=7
  )
  _assert_same(tx, plain)


@pytest.mark.parametrize(
  ('name', 'value'),
  [
    ('l2_clip_norm', 0.0),
    ('l2_clip_norm', float('nan')),
    ('noise_multiplier', -1.0),
    ('expected_batch_size', 0),
    ('weight_decay', -0.1),
    ('b1', 1.0),
    ('b2', -0.1),
    ('eps', -1e-8),
    ('floor_mode', 'trace'),
    ('floor_factor', -1.0),
    ('max_condition_number', 0.5),
    ('basis', 'svd'),
    ('max_update_norm', 0.0),
    ('retraction_method', 'qr'),
    ('prng_key', 'secret'),
  ],
)
def test_bad_arguments_are_named(name, value):
  options = {**REQUIRED, name: value}
  label = {'retraction_method': 'method'}.get(name, name)
  with pytest.raises(ValueError, match=label):
    prism_optax.prism(0.1, **options)


@pytest.mark.parametrize(
  'options', [{}, {'basis': 'factor'}, {'orthogonalize': True}]
)
def test_parameters_and_state_may_be_donated(options):
  """From the first step on: no buffer of the initial state is there twice."""
  problem = problems.Problem(SHAPES)
  params = problem.params(*problem.start(), jnp.float32)
  tx = prism_optax.prism(0.05, **REQUIRED, **options)
  state = tx.init(params)
  grads = jax.tree.map(lambda x: jnp.ones((3, *x.shape)), params)

  def step(params, state):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  donating = jax.jit(step, donate_argnums=(0, 1))
  for _ in range(2):
    params, state = donating(params, state)
  assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params))
