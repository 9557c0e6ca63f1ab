"""`prism_optax.chain`: the numbers of `optax.chain`."""

import functools

import jax
import numpy as np
import optax
import pytest

import prism_optax
from tests.oracles import oracles, problems
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')
followed = chains.followed


def test_prism_is_the_chain_of_its_six_lines_bit_for_bit():
  chains.assert_same_program(
    prism_optax.prism(0.05, **chains.OPTIONS),
    problems.chain_of(0.05, **chains.OPTIONS),
    chains.SHAPES,
  )
  steps = chains.reference()
  assert np.abs(steps[-1]['extra'] - steps[0]['extra']).max() > 1e-3


def test_so_it_is_with_a_schedule_as_rate():
  schedule = optax.linear_schedule(0.1, 0.0, 3)
  chains.assert_same_program(
    prism_optax.prism(schedule, **chains.OPTIONS),
    problems.chain_of(schedule, **chains.OPTIONS),
  )


def test_so_it_is_with_traced_hyper_parameters():
  """Injected into both: every number an array in the state."""
  numbers = {
    'learning_rate': optax.linear_schedule(0.1, 0.0, 3),
    'l2_clip_norm': chains.CLIP,
    'noise_multiplier': chains.MULTIPLIER,
    'expected_batch_size': chains.BATCH_SIZE,
    'weight_decay': 0.2,
    'b1': 0.8,
    'b2': 0.99,
  }

  def chained(
    learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size,
    weight_decay, b1, b2,
  ):  # fmt: skip
    return problems.chain_of(
      learning_rate,
      l2_clip_norm=l2_clip_norm,
      noise_multiplier=noise_multiplier,
      expected_batch_size=expected_batch_size,
      weight_decay=weight_decay,
      b1=b1,
      b2=b2,
      prng_key=7,
    )

  alias = optax.inject_hyperparams(
    prism_optax.prism,
    static_args=('prng_key', 'per_example_gradients', 'layout'),
  )(prng_key=7, **numbers)
  chains.assert_same_program(
    alias, optax.inject_hyperparams(chained)(**numbers)
  )


@pytest.mark.parametrize(
  'jit', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_optax_chains_the_same_numbers(jit, followed):
  fused = chains.reference()[:2]
  assert not followed  # A fused chain has nothing to look for.
  plain = problems.chain_of(0.05, **chains.OPTIONS, chain=optax.chain)
  steps = chains.train(plain, steps=2, jit=jit)
  chains.assert_close(steps, fused)
  # Five transformations behind the clip; traced once.
  assert followed == [True] * (5 if jit else 10)


def test_nested_chains_are_flat_ones():
  release = prism_optax.chain(
    chains.clip(), chains.noise(), retract_elsewhere=True
  )
  descent = prism_optax.chain(
    prism_optax.add_decayed_factors(0.1),
    prism_optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )
  nested = prism_optax.chain(
    release, prism_optax.chain(chains.direction()), prism_optax.chain(descent)
  )
  chains.assert_same_program(nested, problems.chain_of(0.05, **chains.OPTIONS))
  assert (
    nested.sensitivity()
    == release.sensitivity()
    == chains.CLIP / chains.BATCH_SIZE
  )


@pytest.mark.slow
def test_chains_in_a_chain_of_optax_give_the_same_numbers():
  release = prism_optax.chain(
    chains.clip(), chains.noise(), retract_elsewhere=True
  )
  descent = prism_optax.chain(
    prism_optax.add_decayed_factors(0.1),
    prism_optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )
  chains.assert_close(
    chains.train(optax.chain(release, chains.direction(), descent)),
    chains.reference(),
  )


FOREIGN = {
  'a cap of the norm, and their rate': [
    chains.direction,
    optax.clip_by_global_norm(0.3),
    optax.scale_by_learning_rate(0.05),
  ],
  'an average': [optax.ema(0.9), optax.scale(-0.1)],
  'their schedule': [
    optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0.0, 3)),
    prism_optax.add_decayed_factors(0.1),
    optax.identity(),
  ],
}


def release():
  return optax.chain(chains.clip(), chains.noise())


@functools.cache
def compiled(make):
  """A transformation whose updates are compiled, once for all chains."""
  tx = make()
  return optax.GradientTransformationExtraArgs(tx.init, jax.jit(tx.update))


@pytest.mark.parametrize(
  'kind',
  [
    pytest.param(kind, marks=() if kind == 'an average' else pytest.mark.slow)
    for kind in FOREIGN
  ],
)
def test_transformations_of_optax_may_be_among_them(kind):
  def behind(one):
    ours = (chains.direction, prism_optax.retract)
    return [
      one(x) if x in ours else x for x in (*FOREIGN[kind], prism_optax.retract)
    ]

  parts = [chains.clip(), chains.noise(), *behind(lambda make: make())]
  fused = prism_optax.chain(*parts)
  apart = optax.chain(compiled(release), *behind(compiled))
  chains.assert_close(chains.train(fused), chains.train(apart, jit=False))
  _, params = chains.problem_and_params()
  assert jax.tree.structure(fused.init(params)) == (
    jax.tree.structure(optax.chain(*parts).init(params))
  )


def test_extra_arguments_reach_those_who_want_them():
  """The padding mask is for the clip, behind which all get it and drop it."""
  problem, params = chains.problem_and_params(chains.ONE_SHAPE)
  grads = jax.device_get(chains.batch(problem, params))
  tx = prism_optax.chain(
    chains.clip(), chains.noise(), optax.scale(1.0), retract_elsewhere=True
  )
  state, update = tx.init(params), jax.jit(tx.update)
  padding = np.arange(problem.batch) > 2

  def released(grads, padding):
    return update(grads, state, params, is_padding_example=padding)[0]

  some = released(grads, padding)
  first = {
    'extra': np.where(padding[:, None], 0.0, grads['extra']),
    **{
      m: jax.tree.map(lambda x: np.where(padding[:, None, None], 0.0, x), v)
      for m, v in grads.items()
      if m != 'extra'
    },
  }
  nobody = np.zeros_like(padding)
  chains.assert_close(some, released(first, nobody))
  everybody = released(grads, nobody)
  assert oracles.relative_error(some['extra'], everybody['extra']) > 1e-3
