"""A program of many runs does what `make_private` does in one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import prism_optax
from benchmarks.common import private
from prism_optax import diagnostics, training

PARAMS = {'lora_a': np.eye(6, 2, dtype=np.float32),
          'lora_b': np.zeros((2, 5), np.float32)}  # fmt: skip
RNG = np.random.default_rng(0)
DATA = tuple(RNG.normal(size=(40, n)).astype(np.float32) for n in (6, 5))


def loss(params, frozen, x, y):
  return jnp.sum((frozen * x @ params['lora_a'] @ params['lora_b'] - y) ** 2)


def make(numbers, key):
  return training.make_private(
    loss, PARAMS,
    optimizer=functools.partial(prism_optax.prism, numbers['rate']),
    l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8,
    dataset_size=40, steps=3, delta=1e-5, prng_key=key,
  )  # fmt: skip


def test_runs_of_a_program_are_private_trainings():
  """Batches and all of the step; only the noise has another stream.

  The step is proved: nothing of a record bypasses the noise.
  """
  program = private.Program(make)
  rate, seed = {'rate': 0.1}, 3
  batches = list(program.batches(PARAMS, DATA, rate, seed))
  one, state = program.train(PARAMS, 2.0, batches, rate, seed)
  other = program.end(PARAMS, 2.0, private.stacked(batches), rate, seed)
  # Compiled in another way.
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
    one, other,
  )  # fmt: skip
  own = make(rate, seed)
  drawn = list(own.batches(own.init(PARAMS), DATA))
  for ours, theirs in zip(batches, drawn, strict=True):
    jax.tree.map(np.testing.assert_array_equal, ours[0], theirs.examples)
  slow, _ = program.train(PARAMS, 2.0, batches, {'rate': 0.01}, seed)
  assert np.abs(slow['lora_b']).max() < np.abs(one['lora_b']).max()

  examples, *others = batches[0]
  proof = diagnostics.prove_released(
    lambda params, state, examples, is_padding: program.step(
      params, state, 2.0, (examples, is_padding, others[1]), rate,
      jax.random.key(0),
    ),
    PARAMS, state, examples, others[0], private=2, padding=3,
  )  # fmt: skip
  assert proof, proof
