"""`prism_optax.chain`: the numbers of `optax.chain`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax.transforms import _chain
from tests.oracles import problems
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')


@pytest.fixture
def followed(monkeypatch):
  """Whether each transformation went on with the stacks of the last one."""
  found = []
  follow = _chain.trail.follow

  def recorded(*args):
    result = follow(*args)
    found.append(result is not None)
    return result

  monkeypatch.setattr(_chain.trail, 'follow', recorded)
  return found


def test_prism_is_the_chain_of_its_six_lines_bit_for_bit():
  alias = chains.train(prism_optax.prism(0.05, **chains.OPTIONS))
  chains.assert_bits(
    chains.train(problems.chain_of(0.05, **chains.OPTIONS)), alias
  )
  assert np.abs(alias[-1]['extra'] - alias[0]['extra']).max() > 1e-3


def test_so_it_is_with_a_schedule_as_rate():
  schedule = optax.linear_schedule(0.1, 0.0, 3)
  chains.assert_bits(
    chains.train(problems.chain_of(schedule, **chains.OPTIONS)),
    chains.train(prism_optax.prism(schedule, **chains.OPTIONS)),
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
  }

  def chained(
    learning_rate, l2_clip_norm, noise_multiplier, expected_batch_size,
    weight_decay, b1,
  ):  # fmt: skip
    return problems.chain_of(
      learning_rate,
      l2_clip_norm=l2_clip_norm,
      noise_multiplier=noise_multiplier,
      expected_batch_size=expected_batch_size,
      weight_decay=weight_decay,
      b1=b1,
      prng_key=7,
    )

  alias = optax.inject_hyperparams(
    prism_optax.prism,
    static_args=('prng_key', 'per_example_gradients', 'layout'),
  )(prng_key=7, **numbers)
  chains.assert_bits(
    chains.train(optax.inject_hyperparams(chained)(**numbers)),
    chains.train(alias),
  )


@pytest.mark.parametrize('jit', [False, True])
def test_optax_chains_the_same_numbers(jit, followed):
  fused = chains.train(problems.chain_of(0.05, **chains.OPTIONS), steps=2)
  assert not followed  # A fused chain has nothing to look for.
  plain = problems.chain_of(0.05, **chains.OPTIONS, chain=optax.chain)
  steps = chains.train(plain, steps=2, jit=jit)
  chains.assert_close(steps, fused)
  # Five transformations behind the clip; traced once.
  assert followed == [True] * (5 if jit else 10)


def test_nested_chains_are_flat_ones():
  flat = chains.train(problems.chain_of(0.05, **chains.OPTIONS))
  release = prism_optax.chain(chains.clip(), chains.noise())
  descent = prism_optax.chain(
    prism_optax.add_decayed_factors(0.1),
    prism_optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )
  nested = prism_optax.chain(
    release, prism_optax.chain(chains.direction()), prism_optax.chain(descent)
  )
  chains.assert_bits(chains.train(nested), flat)
  assert (
    nested.sensitivity()
    == release.sensitivity()
    == chains.CLIP / chains.BATCH_SIZE
  )
  chains.assert_close(
    chains.train(optax.chain(release, chains.direction(), descent)), flat
  )


FOREIGN = {
  'a cap of the norm': lambda: [
    chains.direction(),
    optax.clip_by_global_norm(0.3),
  ],
  'an average': lambda: [optax.ema(0.9), optax.scale(-0.1)],
  'their rate': lambda: [
    chains.direction(),
    optax.scale_by_learning_rate(0.05),
  ],
  'their schedule': lambda: [
    optax.scale_by_learning_rate(optax.linear_schedule(0.1, 0.0, 3)),
    prism_optax.add_decayed_factors(0.1),
    optax.identity(),
  ],
}


@pytest.mark.parametrize('kind', FOREIGN)
def test_transformations_of_optax_may_be_among_them(kind):
  def parts():
    return (
      chains.clip(),
      chains.noise(),
      *FOREIGN[kind](),
      prism_optax.retract(),
    )

  fused, plain = prism_optax.chain(*parts()), optax.chain(*parts())
  chains.assert_close(chains.train(fused), chains.train(plain))
  _, params = chains.problem_and_params()
  assert jax.tree.structure(fused.init(params)) == (
    jax.tree.structure(plain.init(params))
  )


def test_extra_arguments_reach_those_who_want_them():
  """The padding mask is for the clip, behind which all get it and drop it."""
  problem, params = chains.problem_and_params()
  grads = chains.batch(problem, params)
  tx = prism_optax.chain(chains.clip(), chains.noise(), optax.scale(1.0))
  padding = jnp.arange(problem.batch) > 2
  some, _ = tx.update(
    grads, tx.init(params), params, is_padding_example=padding
  )
  first = jax.tree.map(lambda x: x[:3], grads)
  chains.assert_close(some, tx.update(first, tx.init(params), params)[0])
