"""What a private training is made of."""

import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import numpy as np
import optax

from prism_optax._proofs._proof import Proof
from prism_optax._types import ArrayTree
from prism_optax.training._execution import Execution
from prism_optax.training._means import Means
from prism_optax.training._records import Form
from prism_optax.training._releases import PriorReleases
from prism_optax.training._sampling import Sampling

# What a tag of the user's may be.
Tag: TypeAlias = str | int | float | bool


class Settings(NamedTuple):
  """What the guarantee depends on, besides the data and the program."""

  sampling: Sampling
  noise_multiplier: float
  steps: int
  delta: float
  l2_clip_norm: float
  clipping: str
  seeded: bool
  entries: int
  prior_releases: PriorReleases
  stops: tuple[int, ...]
  record: Form | None = None
  tags: tuple[tuple[str, Tag], ...] = ()


class Parts(NamedTuple):
  """What a training is made of.

  Attributes:
    settings: What the guarantee depends on.
    transformation: Clip, noise and optimizer.
    gradients: ``gradients(params, frozen, examples)`` of many examples.
    means: ``means(params, frozen, examples, is_padding_example, is_present)``,
      not private.
    shapes: Of the parameters.
    new_seed: Makes a seed of batches.
    put: Puts arrays on the devices.
    execution: How it is run.
    check: ``check(params, frozen, batch)`` proves by shapes that no record
      meets another, or refuses the loss.
    check_declared: ``check_declared(name, arrays)`` refuses a release that is
      not declared.
    adapters: From what is trained to what the model takes.
    releases_per_step: How often a step adds noise: to the gradients, and to the
      votes of a quantile.
    key_is_given: Whether all runs have the same keys.
    journal: Where releases are written down, or None.
  """

  settings: Settings
  transformation: optax.GradientTransformationExtraArgs
  gradients: Callable[..., ArrayTree]
  means: Callable[..., Means]
  shapes: ArrayTree
  new_seed: Callable[[], np.ndarray]
  put: Callable[[ArrayTree], ArrayTree]
  execution: Execution
  check: Callable[..., Proof]
  check_declared: Callable[[str, ArrayTree], None]
  adapters: Callable[[ArrayTree], ArrayTree]
  releases_per_step: int
  key_is_given: bool
  journal: str | os.PathLike[str] | None
