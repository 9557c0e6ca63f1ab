"""Schedules and injected hyper-parameters."""

import functools

import jax
import numpy as np
import optax
import pytest

import prism_optax
from tests.integration import cases

OPTIONS = {
  'l2_clip_norm': cases.CLIP,
  'noise_multiplier': cases.MULTIPLIER,
  'expected_batch_size': cases.BATCH,
  'prng_key': cases.SEED,
}
SCHEDULE = optax.piecewise_constant_schedule(0.125, {1: 0.5})


def _grads(params):
  return cases.trainable(
    cases.per_example_gradients({**cases.params(), **params}, cases.batch())
  )


def _train(tx, steps=2, change=lambda state: state):
  params = cases.trainable(cases.params())
  state, update = tx.init(params), jax.jit(tx.update)
  for _ in range(steps):
    updates, state = update(_grads(params), state, params)
    params, state = optax.apply_updates(params, updates), change(state)
  return params, state


@functools.cache
def _scheduled():
  return _train(prism_optax.prism(SCHEDULE, **OPTIONS))[0]


def _assert_same(got, want):
  """Up to rounding, which the preconditioner divides by noise of 0.02."""
  np.testing.assert_allclose(cases.z(got), cases.z(want), atol=1e-5)
  np.testing.assert_allclose(got['head'], want['head'], atol=1e-5)


@pytest.mark.slow
def test_a_hyperparameter_changed_between_steps_counts():
  injected = optax.inject_hyperparams(
    prism_optax.prism, static_args=('prng_key',)
  )(0.125, **OPTIONS)

  def halve(state):
    state.hyperparams['learning_rate'] /= 2
    return state

  got, _ = _train(injected, change=halve)
  _assert_same(got, _scheduled())


def test_an_injected_seed_is_refused():
  """Traced it would be an array in the state, and a constant of no use."""
  tx = optax.inject_hyperparams(prism_optax.prism)(0.1, **OPTIONS)
  with pytest.raises(ValueError, match='prng_key to be None, an int or a typ'):
    tx.init(cases.trainable(cases.params()))


def test_structure_is_not_injected():
  """Options that decide what is compiled stay what they are."""
  muon = functools.partial(
    prism_optax.dp_muon,
    l2_clip_norms=1.0,
    noise_multiplier=1.0,
    expected_batch_size=8,
    prng_key=1,
  )
  params = {'w': np.ones((3, 4), np.float32)}
  with pytest.raises(ValueError, match='degree'):
    optax.inject_hyperparams(muon, static_args=('prng_key', 'ns_steps'))(
      0.1
    ).init(params)
  static = ('prng_key', 'degree', 'ns_steps')
  optax.inject_hyperparams(muon, static_args=static)(0.1).init(params)
