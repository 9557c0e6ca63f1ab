"""What a private training is made of."""

import os
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import optax

from prism_optax._types import ArrayTree, PRNGKeyLike
from prism_optax.training._records import Form
from prism_optax.training._releases import (
  ChangeOfVariables,
  PriorReleases,
  Release,
)
from prism_optax.training._sampling import Execution, Sampling

Loss: TypeAlias = Callable[..., ArrayTree]
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
    loss: Of what is trained; returns ``(loss, aux)``.
    batched_loss: Whether it takes many examples.
    transformation: Clip, noise and optimizer.
    releases_per_step: How often a step adds noise: to the gradients, and to the
      votes of a quantile.
    shapes: Of the parameters.
    execution: How it is run.
    change: What is trained in place of the parameters of the model, or None.
    declared: All releases that may be in arrays.
    prng_key: As it was given.
    journal: Where releases are written down, or None.
  """

  settings: Settings
  loss: Loss
  batched_loss: bool
  transformation: optax.GradientTransformationExtraArgs
  releases_per_step: int
  shapes: ArrayTree
  execution: Execution
  change: ChangeOfVariables | None
  declared: tuple[Release, ...]
  prng_key: PRNGKeyLike
  journal: str | os.PathLike[str] | None

  @property
  def of_users(self) -> bool:
    return self.settings.sampling.examples_per_user is not None
