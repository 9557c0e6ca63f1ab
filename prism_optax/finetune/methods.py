"""The optimizers that can be compared, for ``training.make_private``."""

import functools
from typing import Any

import jax
import optax

import prism_optax
from prism_optax import lora

from .command_line import METHODS

# What the default task compares.
COMPARED = ('prism', 'dp-adamw', 'adamw')


def optimizer(
  name: str, learning_rate: Any, l2_clip_norm: float, params: Any
) -> Any:
  """What follows clip and noise, or a function that makes all three.

  Args:
    name: ``prism``: PRISM (arXiv:2606.00944) on the manifold of the adapters.
      ``dp-muon``: DP-Muon (arXiv:2605.12994) on the two factors of every
      adapter and the matrix of the head, each clipped by itself to an equal
      share of the norm, Adam for biases. ``dp-adamw``: AdamW on the two factors
      of every adapter. ``adamw``: the same, to be used with neither clip nor
      noise; NOT private.
    learning_rate: A number or a schedule.
    l2_clip_norm: Largest norm of one example's gradient over all trainable
      leaves.
    params: The trainable parameters: how many matrices there are.

  Raises:
    ValueError: If the name is unknown.
  """
  if name == 'prism':
    return functools.partial(prism_optax.prism, learning_rate)
  if name == 'dp-muon':
    # K groups of norm C / sqrt(K) each: together C, as for the others.
    groups: dict[str, Any] = {'weight_dimension_numbers': matrices}
    unit = prism_optax.per_matrix_clip(1.0, **groups).sensitivity(params=params)
    options = groups | {'l2_clip_norms': l2_clip_norm / unit}
    options |= {'consistent_rms': 0.2}
    return functools.partial(prism_optax.dp_muon, learning_rate, **options)
  if name in ('dp-adamw', 'adamw'):
    return optax.adamw(learning_rate)
  raise ValueError(f'Expected a method of {METHODS}, got {name!r}.')


def prepared(name: str, params: Any) -> Any:
  """The same adapters; PRISM's in the gauge where their frames are exact."""
  return lora.canonicalize(params) if name == 'prism' else params


def matrices(params: Any) -> Any:
  """Which leaves are matrices or stacks of them, for DP-Muon."""

  def numbers(x):
    if x.ndim < 2:
      return None
    return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)

  return jax.tree.map(numbers, params)
