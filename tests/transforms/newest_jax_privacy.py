"""A stand-in for the part of jax-privacy's newest source that takes optimizers.

Written from its interface (version 2.3.0.dev0): the class, and the rule by
which a trainer takes what is not of it. Where the installed version has the
class, :func:`modules` gives the real one, too.
"""

import contextlib
import importlib
import types
from collections.abc import Callable
from typing import Any, NamedTuple


class AugmentedGradientTransformation(NamedTuple):
  """An optimizer of optax and a function of its state."""

  init: Callable[..., Any]
  update: Callable[..., Any]
  pre_clipping_transform: Callable[..., Any]


def as_augmented_optimizer(optimizer):
  """What is not of the class gets a transform that does nothing."""
  if isinstance(optimizer, AugmentedGradientTransformation):
    return optimizer
  return AugmentedGradientTransformation(
    optimizer.init, optimizer.update, lambda state: lambda grads: grads
  )


def modules():
  """What ``jax_privacy.optimizers`` may be, by the name of a test's case."""
  stand_in = types.ModuleType('jax_privacy.optimizers')
  for x in (AugmentedGradientTransformation, as_augmented_optimizer):
    setattr(stand_in, x.__name__, x)
  found = {'stand-in': stand_in}
  with contextlib.suppress(ImportError):  # Version 2.0.0 has no such module.
    found['installed'] = importlib.import_module('jax_privacy.optimizers')
  return found
