"""What a private training is made of."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax

from prism_optax._proofs._proof import Proof
from prism_optax.training._records import Form
from prism_optax.training._releases import PriorReleases
from prism_optax.training._sampling import Sampling


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
  prior_releases: PriorReleases
  record: Form | None = None


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
    check: ``check(params, frozen, batch)`` proves by shapes that no record
      meets another, or refuses the loss.
    check_declared: ``check_declared(name, arrays)`` refuses a release that is
      not declared.
    adapters: From what is trained to what the model takes.
    releases_per_step: How often a step adds noise: to the gradients, and to the
      votes of a quantile.
  """

  settings: Settings
  transformation: optax.GradientTransformationExtraArgs
  gradients: Callable[..., Any]
  shapes: Any
  new_seed: Callable[[], np.ndarray]
  put: Callable[[Any], Any]
  skip_padding: bool
  check: Callable[..., Proof]
  check_declared: Callable[[str, Any], None]
  adapters: Callable[[Any], Any]
  releases_per_step: int
