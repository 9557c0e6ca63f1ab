"""Optimizers whose pre-clipping transform reads the state alone."""

import sys
from typing import Any, NamedTuple

import jax
import jax_privacy
import numpy as np
import optax
import pytest
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import toeplitz

import prism_optax
from prism_optax import transforms
from tests import cases
from tests.transforms import newest_jax_privacy

# Of one shape: one stack, and half of the compiling.
PARAMS = cases.adapters([(9, 7, 3)] * 2)
STDDEV = 0.05


def _loss(params, example):
  """Curved, and its gradients are no multiples of each other."""
  terms = jax.tree.map(
    lambda p, x: jax.numpy.sum(jax.numpy.tanh(p * x) + p * x), params, example
  )
  return sum(jax.tree.leaves(terms))


def _optimizer():
  return optax.chain(
    prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )


def _trained(init, update, transform_of, steps):
  """``update(mean, state, params)``; the mean is of jax-privacy."""

  @jax.jit
  def step(params, state, batch):
    mean = jax_privacy.clipped_grad(
      _loss, l2_clip_norm=1.0, normalize_by=8.0, keep_batch_dim=False,
      pre_clipping_transform=transform_of(state, params),
    )(params, batch)  # fmt: skip
    updates, state = update(mean, state, params)
    return optax.apply_updates(params, updates), state

  params, state = PARAMS, init(PARAMS)
  for t in range(steps):
    batch = cases.normal(PARAMS, t, lead=(8,))
    params, state = step(params, state, batch)
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

  ours, privatizer = (
    transforms.augmented_optimizer(_optimizer()),
    make(jax.random.key(3)),
  )
  init, update, transform_of = ours

  def noisy_update(mean, state, params):
    noisy, noise_state = privatizer.update(mean, state[1])
    updates, state = update(noisy, state[0], params)
    return updates, (state, noise_state)

  got = _trained(
    lambda params: (init(params), privatizer.init(params)),
    noisy_update,
    lambda state, params: transform_of(state[0]),
    steps,
  )
  noise = prism_optax.correlated_tangent_privatizer(
    make, steps=steps, prng_key=3
  )
  want = _trained(
    *optax.chain(noise, _optimizer()),
    lambda state, params: prism_optax.tangent_coordinates(params),
    steps,
  )
  start, one, other = map(cases.products_of, (PARAMS, got, want))
  cases.assert_close(one, other, 2e-5)  # Four float32 steps of 0.05.
  np.testing.assert_allclose(got['extra'], want['extra'], atol=1e-5)
  assert np.abs(start[0] - one[0]).max() > 0.02  # A thousand times as much.


def test_it_unpacks_into_a_class_of_a_trainer():
  """A class that the library cannot know."""

  class Theirs(NamedTuple):
    init: Any
    update: Any
    pre_clipping_transform: Any

  theirs = Theirs(*transforms.augmented_optimizer(_optimizer()))

  def update(grads, params):
    state = theirs.init(params)
    transform = theirs.pre_clipping_transform(state)
    return theirs.update(transform(grads), state, params)

  updates, _ = jax.eval_shape(update, PARAMS, PARAMS)
  assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


@pytest.mark.parametrize('kind', newest_jax_privacy.modules())
def test_the_newest_trainers_take_it_with_its_transform(kind, monkeypatch):
  """Their rule looks at the class: that of optax gets no transform."""
  module = newest_jax_privacy.modules()[kind]
  monkeypatch.setitem(sys.modules, 'jax_privacy.optimizers', module)
  optimizer = transforms.augmented_optimizer(_optimizer())
  assert isinstance(optimizer, module.AugmentedGradientTransformation)
  assert module.as_augmented_optimizer(optimizer) is optimizer


def test_without_their_class_it_is_no_optimizer_of_optax(monkeypatch):
  """Such a trainer would leave out the transform and not say so."""
  monkeypatch.setitem(sys.modules, 'jax_privacy.optimizers', None)
  optimizer = transforms.augmented_optimizer(_optimizer())
  assert not isinstance(optimizer, tuple)
  with pytest.raises(AttributeError, match='leave out `pre_clipping_transf'):
    newest_jax_privacy.as_augmented_optimizer(optimizer)
  with pytest.raises(AttributeError, match=r'`\.init` was read'):
    optax.chain(optimizer).init(PARAMS)
  with pytest.raises(ValueError, match='unpack'):
    _init, _update = optimizer
  assert not hasattr(optimizer, 'init')
  assert not hasattr(optimizer, 'update')


def test_bad_use_is_named():
  init, update, _ = transforms.augmented_optimizer(_optimizer())
  with pytest.raises(ValueError, match='needs `params`'):
    update(PARAMS, init(PARAMS))
  with pytest.raises(ValueError, match='Both factors are zero'):
    init({'m0': jax.tree.map(np.zeros_like, PARAMS['m0'])})
