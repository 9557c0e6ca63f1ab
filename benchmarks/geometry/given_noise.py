"""PRISM with a given draw of its noise, for two gauges that share it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

import prism_optax
from prism_optax import transforms


class Step(NamedTuple):
  """A step whose noise is an argument.

  Attributes:
    init: From parameters to a state.
    update: ``update(gradients, noise, state, params, is_padding)``, of
      per-example gradients and of a draw in tangent coordinates of standard
      deviation one; updates and the next state.
  """

  init: Callable[[Any], Any]
  update: Callable[..., tuple[Any, Any]]


def tangent_step(
  rate: Any,
  clip_norm: float,
  batch: float,
  stddev: Any,
  published: bool = False,
) -> Step:
  """PRISM without weight decay.

  The noise is made by hand, since one draw in the space of Z has to be seen in
  the frames of two gauges, and no privatizer can be told its draw. It is
  declared, so that ``diagnostics.prove_released`` can follow the records.

  Args:
    rate: Size of a step.
    clip_norm: C.
    batch: b.
    stddev: Of the noise on the mean.
    published: Whether the moments are in the basis of the factors, as in the
      paper.
  """
  clip = prism_optax.intrinsic_clip(clip_norm, normalize_by=batch)
  if published:
    preconditioner = transforms.scale_by_published_preconditioner(
      noise_stddev=stddev, floor_factor=0.5
    )
  else:
    preconditioner = prism_optax.scale_by_rank_preconditioner(
      noise_stddev=stddev
    )
  rest = prism_optax.chain(
    preconditioner,
    prism_optax.scale_by_learning_rate(rate),
    # The published optimizer turns the new factors towards the old ones.
    prism_optax.retract(align=published),
  )

  def update(grads, noise, state, params, is_padding=None):
    mean, _ = clip.update(
      grads, optax.EmptyState(), params, is_padding_example=is_padding
    )

    def add(updates, state, params=None):
      del params
      noisy = jax.tree.map(lambda x, z: x + stddev * z, updates, noise)
      return noisy, state

    given = optax.GradientTransformation(clip.init, add)
    declared = transforms.noised_elsewhere(given)
    noisy, _ = declared.update(mean, optax.EmptyState(), params)
    return rest.update(noisy, state, params)

  return Step(rest.init, update)
