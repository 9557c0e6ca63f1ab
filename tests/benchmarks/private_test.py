"""A program of many runs does what `make_private` does in one."""

import functools

import jax
import numpy as np
import pytest

import prism_optax
from benchmarks.common import private
from prism_optax import diagnostics
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS


def make(numbers, key):
  return cases.make(
    functools.partial(prism_optax.prism, numbers['rate']), prng_key=key
  )


@pytest.mark.slow
def test_runs_of_a_program_are_private_trainings():
  """Batches and all of the step; only the noise has another stream.

  The step is proved: nothing of a record bypasses the noise.
  """
  program = private.Program(make)
  rate, seed = {'rate': 0.1}, 3
  batches = list(program.batches(PARAMS, DATA, rate, seed))
  one, state = program.train(PARAMS, FROZEN, batches, rate, seed)
  other = program.end(PARAMS, FROZEN, private.stacked(batches), rate, seed)
  # Compiled in another way.
  cases.assert_close(one, other, 1e-6, 1e-4)
  own = make(rate, seed)
  drawn = list(own.batches(own.init(PARAMS), DATA))
  for ours, theirs in zip(batches, drawn, strict=True):
    jax.tree.map(np.testing.assert_array_equal, ours[0], theirs.examples)
  slow, _ = program.train(PARAMS, FROZEN, batches, {'rate': 0.01}, seed)
  assert np.abs(slow['head']).max() < np.abs(one['head']).max()

  examples, *others = batches[0]
  proof = diagnostics.prove_released(
    lambda params, state, examples, is_padding: program.step(
      params, state, FROZEN, (examples, is_padding, others[1]), rate,
      jax.random.key(0),
    ),
    PARAMS, state, examples, others[0], private=2, padding=3,
  )  # fmt: skip
  assert proof, proof
