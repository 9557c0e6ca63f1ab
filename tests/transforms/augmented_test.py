"""Optimizers whose pre-clipping transform reads the state alone."""

import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import prism_optax
from prism_optax import transforms
from tests import cases
from tests.transforms import newest_jax_privacy

# Of one shape: one stack, and half of the compiling.
PARAMS = cases.adapters([(9, 7, 3)] * 2)
STDDEV = 0.05


def _optimizer():
  return optax.chain(
    prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )


@pytest.mark.usefixtures('x64')
def test_it_walks_as_the_gradient_in_tangent_coordinates_says():
  """The state alone, which is one step ahead, stands for the parameters."""
  whole = optax.chain(optax.scale(-0.1), prism_optax.retract())
  inner = optax.GradientTransformation(
    whole.init, lambda updates, *rest: whole.update(updates, *rest)
  )
  # Of a class that the library cannot know, it unpacks for a trainer.
  init, update, pre_clipping_transform = transforms.augmented_optimizer(inner)
  params = cases.adapters([(9, 7, 3)] * 2, dtype=jnp.float64)

  @jax.jit
  def step(grads, state, params):
    x = pre_clipping_transform(state)(grads)
    wanted = prism_optax.tangent_coordinates(params)(grads)
    found, state = update(x, state, params, loss=0.0)  # For others.
    updates, _ = inner.update(wanted, inner.init(params), params)
    # Turns of fixed coordinates keep norms.
    norms = optax.tree.norm(x), optax.tree.norm(wanted)
    return (found, norms[0]), (updates, norms[1]), state

  state = init(params)
  for seed in range(3):
    found, wanted, state = step(cases.normal(params, seed), state, params)
    cases.assert_close(found, wanted, 1e-12)
    params = optax.apply_updates(params, found[0])


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
  assert not hasattr(optimizer, 'sensitivity')
  with pytest.raises(AttributeError, match='leave out `pre_clipping_transf'):
    newest_jax_privacy.as_augmented_optimizer(optimizer)
  with pytest.raises(AttributeError, match=r'`\.init` was read'):
    optax.chain(optimizer).init(PARAMS)
  with pytest.raises(ValueError, match='unpack'):
    _init, _update = optimizer
  assert not hasattr(optimizer, 'init')
  assert not hasattr(optimizer, 'update')
