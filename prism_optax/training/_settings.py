"""What a private training is made of."""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import dp_accounting
import jax
import numpy as np
import optax

from prism_optax.lora import InputMetric
from prism_optax.training._sampling import Sampling


class Before(NamedTuple):
  """What was released about the same records before the training.

  Attributes:
    events: In the words of dp-accounting.
    entries: Number of entries that got noise.
    description: What makes it another release.
  """

  events: tuple[dp_accounting.DpEvent, ...] = ()
  entries: int = 0
  description: str = ''

  @classmethod
  def of(cls, metric: InputMetric | None) -> 'Before':
    """An input metric, or nothing."""
    if metric is None:
      return cls()
    digest = hashlib.sha256()
    for x in jax.tree.leaves((metric.bases, metric.scales)):
      digest.update(np.asarray(x).tobytes())
    return cls((metric.event,), metric.entries, digest.hexdigest())


class Settings(NamedTuple):
  """What the guarantee depends on, besides the data."""

  sampling: Sampling
  noise_multiplier: float
  steps: int
  delta: float
  l2_clip_norm: float
  clipping: str
  seeded: bool
  entries: int
  before: Before


class Parts(NamedTuple):
  """What a training is made of.

  Attributes:
    settings: What the guarantee depends on.
    transformation: Clip, noise and optimizer.
    gradients: ``gradients(params, frozen, examples)`` of many examples.
    shapes: Of the parameters.
    new_seed: Makes a seed of batches.
    put: Puts arrays on the devices.
    skip_padding: Whether micro-batches of padding are passed over.
    check: ``check(params, frozen, batch)`` refuses a loss, by shapes and
      made-up records.
    adapters: From what is trained to what the model takes.
  """

  settings: Settings
  transformation: optax.GradientTransformationExtraArgs
  gradients: Callable[..., Any]
  shapes: Any
  new_seed: Callable[[], np.ndarray]
  put: Callable[[Any], Any]
  skip_padding: bool
  check: Callable[..., None]
  adapters: Callable[[Any], Any]
