"""The state of a run, and what it may differ in from another."""

from typing import NamedTuple

import jax
import numpy as np
import optax

from prism_optax._types import ArrayTree
from prism_optax.training._fingerprint import Fingerprint


class TrainingState(NamedTuple):
  """All of a run: save it, restore it, go on.

  As secret as the data: it holds the keys of the noise and of the batches. Only
  ``params`` and ``held`` may be released.

  Attributes:
    params: The trainable parameters.
    optimizer: State of clip, noise and optimizer.
    step: Number of steps done, NumPy, shape ().
    held: Number of steps whose result was not finite, so that parameters and
      moments stayed as they were, int32, shape ().
    seed: Of the batches, NumPy, (4,) uint32.
    fingerprint: What it belongs to: digests of settings, environment, program
      and data, NumPy, (8,) uint32 each.
  """

  params: ArrayTree
  optimizer: optax.OptState
  step: np.ndarray
  held: jax.Array
  seed: np.ndarray
  fingerprint: Fingerprint


# What a state may differ in, for messages: nothing private.
PARTS = {
  'settings': 'sizes, clip, noise, steps, delta, stop, shapes of parameters,'
  ' tags',
  'environment': 'backend, devices, layout of batches, versions',
  'program': 'loss, optimizer, frozen weights, shapes of records',
  'data': 'the records, or who they are of',
}
