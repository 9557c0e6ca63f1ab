"""Optimizers whose pre-clipping transform reads the state alone."""

import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
import pytest
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import toeplitz

import prism_optax
from prism_optax import transforms
from tests import cases
from tests.oracles import oracles
from tests.transforms import newest_jax_privacy

# Of one shape: one stack, and half of the compiling.
SHAPES = [(9, 7, 3)] * 2
CLIP, BATCH, STDDEV = 1.0, 8.0, 0.05


def _params():
  rng = np.random.default_rng(0)
  factors = [oracles.random_factors(rng, *shape) for shape in SHAPES]
  return cases.tree_of(factors, np.ones(4), jnp.float32)


def _batch(params, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.standard_normal((8, *x.shape)), jnp.float32),
    params,
  )


def _loss(params, example):
  """Curved, and its gradients are no multiples of each other."""
  terms = jax.tree.map(
    lambda p, x: jnp.sum(jnp.tanh(p * x) + p * x), params, example
  )
  return sum(jax.tree.leaves(terms))


def _optimizer():
  return optax.chain(
    prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )


def _clipped(params, batch, transform):
  return jax_privacy.clipped_grad(
    _loss, l2_clip_norm=CLIP, normalize_by=BATCH, keep_batch_dim=False,
    pre_clipping_transform=transform,
  )(params, batch)  # fmt: skip


def _train_augmented(params, privatizer, steps):
  init, update, transform_of = transforms.augmented_optimizer(_optimizer())
  state, noise_state = init(params), privatizer.init(params)

  @jax.jit
  def step(params, state, noise_state, batch):
    mean = _clipped(params, batch, transform_of(state))
    noisy, noise_state = privatizer.update(mean, noise_state)
    updates, state = update(noisy, state, params)
    return optax.apply_updates(params, updates), state, noise_state

  for t in range(steps):
    params, state, noise_state = step(
      params, state, noise_state, _batch(params, t)
    )
  return params


def _train_chain(params, noise, steps):
  tx = optax.chain(noise, _optimizer())
  state = tx.init(params)

  @jax.jit
  def step(params, state, batch):
    transform = prism_optax.tangent_coordinates(params)
    updates, state = tx.update(
      _clipped(params, batch, transform), state, params
    )
    return optax.apply_updates(params, updates), state

  for t in range(steps):
    params, state = step(params, state, _batch(params, t))
  return params


@pytest.mark.slow
def test_a_trainer_that_adds_correlated_noise_itself_gives_the_same_steps():
  """Its noise meets fixed coordinates, as in correlated_tangent_privatizer."""
  steps = 4
  noising = toeplitz.inverse_as_streaming_matrix(
    toeplitz.optimal_max_error_strategy_coefs(steps)
  )

  def make(key):
    return noise_addition.matrix_factorization_privatizer(
      noising, stddev=STDDEV, prng_key=key
    )

  start = _params()
  got = _train_augmented(start, make(jax.random.key(3)), steps)
  want = _train_chain(
    start,
    prism_optax.correlated_tangent_privatizer(make, steps=steps, prng_key=3),
    steps,
  )
  for x, y in zip(cases.products_of(got), cases.products_of(want), strict=True):
    np.testing.assert_allclose(x, y, atol=2e-5)  # Four float32 steps of 0.05.
  np.testing.assert_allclose(got['extra'], want['extra'], atol=1e-5)
  moved = cases.products_of(start)[0] - cases.products_of(got)[0]
  assert np.abs(moved).max() > 0.02  # A thousand times the tolerance.


@pytest.mark.slow
def test_the_state_knows_the_parameters_that_its_update_leads_to():
  """Norms under the transform are intrinsic at the NEW parameters."""
  params = _params()
  init, update, transform_of = transforms.augmented_optimizer(_optimizer())
  state = init(params)
  for t in range(3):
    grads = jax.tree.map(lambda x: x[0], _batch(params, 10 + t))
    mean = transform_of(state)(grads)
    expected = prism_optax.tangent_coordinates(params)(grads)
    for name in ('m0', 'm1'):
      for side in ('lora_a', 'lora_b'):
        assert jnp.linalg.norm(mean[name][side]) == pytest.approx(
          float(jnp.linalg.norm(expected[name][side])), rel=1e-4
        )
    updates, state = update(mean, state, params)
    params = optax.apply_updates(params, updates)


def test_it_unpacks_into_a_class_of_a_trainer():
  """A class that the library cannot know."""

  class Theirs(NamedTuple):
    init: Any
    update: Any
    pre_clipping_transform: Any

  theirs = Theirs(*transforms.augmented_optimizer(_optimizer()))
  params = {k: x for k, x in _params().items() if k != 'm1'}
  grads = jax.tree.map(lambda x: np.asarray(x)[0], _batch(params, 0))

  def update(grads, params):
    state = theirs.init(params)
    transform = theirs.pre_clipping_transform(state)
    return theirs.update(transform(grads), state, params)

  updates, _ = jax.eval_shape(update, grads, params)
  assert jax.tree.structure(updates) == jax.tree.structure(params)


@pytest.fixture(params=newest_jax_privacy.modules())
def newest(request, monkeypatch):
  """``jax_privacy.optimizers`` as the newest source has it."""
  module = newest_jax_privacy.modules()[request.param]
  monkeypatch.setitem(sys.modules, 'jax_privacy.optimizers', module)
  return module


@pytest.fixture
def without_class(monkeypatch):
  """As with version 2.0.0, or without jax-privacy."""
  monkeypatch.setitem(sys.modules, 'jax_privacy.optimizers', None)


def _another_gauge(params):
  """The same matrices ``Z`` from other factors."""
  gauge = np.array([[3.0, 1, 0], [0, 0.5, 2], [1, 0, 1]])
  new = dict(params)
  for name, (_, _, rank) in zip(('m0', 'm1'), SHAPES, strict=True):
    g = gauge[:rank, :rank]
    a, b = (np.float64(params[name][x]) for x in ('lora_a', 'lora_b'))
    new[name] = {
      'lora_a': jnp.float32(a @ g),
      'lora_b': jnp.float32(np.linalg.solve(g, b)),
    }
  return new


def _of_matrices(params, record):
  """A loss of the matrices, whose gradient is no multiple of one matrix."""
  total = jnp.vdot(params['extra'], record['extra'])
  for name in ('m0', 'm1'):
    z = params[name]['lora_a'] @ params[name]['lora_b']
    direction = record[name]['lora_a'] @ record[name]['lora_b']
    total += jnp.sum(jnp.tanh(z * direction) + z * direction)
  return total


def _distance_of_gauges(optimizer):
  """How far the matrices that a trainer reaches depend on the gauge."""
  start = _params()
  batches = [_batch(start, t) for t in range(2)]
  train = newest_jax_privacy.trainer(
    optimizer, _of_matrices, l2_clip_norm=CLIP, normalize_by=BATCH
  )
  ends = [
    cases.products_of(train(params, batches))
    for params in (start, _another_gauge(start))
  ]
  return max(
    np.linalg.norm(x - y) / np.linalg.norm(x)
    for x, y in zip(*ends, strict=True)
  )


@pytest.mark.slow
def test_the_newest_trainers_take_it_with_its_transform(newest):
  """Their rule looks at the class; what they train is gauge invariant."""
  optimizer = transforms.augmented_optimizer(_optimizer())
  assert isinstance(optimizer, newest.AugmentedGradientTransformation)
  taken = newest.as_augmented_optimizer(optimizer)
  assert taken is optimizer
  # 1.2e-6 after two float32 steps: factors of condition 7 in one gauge.
  assert _distance_of_gauges(taken) < 1e-5
  # What their rule makes of an optimizer of optax leaves the transform out.
  init, update, _ = optimizer
  plain = newest.as_augmented_optimizer(
    optax.GradientTransformation(init, update)
  )
  assert _distance_of_gauges(plain) > 1e-3  # 2.9e-2.


def test_without_their_class_it_is_no_optimizer_of_optax(without_class):
  """Such a trainer would leave out the transform and not say so."""
  optimizer = transforms.augmented_optimizer(_optimizer())
  assert not isinstance(optimizer, tuple)
  with pytest.raises(AttributeError, match='leave out `pre_clipping_transf'):
    newest_jax_privacy.as_augmented_optimizer(optimizer)
  with pytest.raises(AttributeError, match=r'`\.init` was read'):
    optax.chain(optimizer).init(_params())
  with pytest.raises(ValueError, match='unpack'):
    _init, _update = optimizer
  assert not hasattr(optimizer, 'init')
  assert not hasattr(optimizer, 'update')


def test_bad_use_is_named():
  init, update, _ = transforms.augmented_optimizer(_optimizer())
  params = _params()
  with pytest.raises(ValueError, match='needs `params`'):
    update(params, init(params))
  dead = {'m0': jax.tree.map(jnp.zeros_like, params['m0'])}
  with pytest.raises(ValueError, match='Both factors are zero'):
    init(dead)
