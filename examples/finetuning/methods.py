"""The optimizers that can be compared, each as one transformation.

It takes the gradients of all examples and has its clip, the exact sum of what
is clipped, its noise and its optimizer in it. The rest of the step is shared.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

import prism_optax
from prism_optax import contrib, lora

METHODS = ('prism', 'prism-rows', 'dp-muon', 'dp-adamw', 'adamw')
# What the default task compares.
COMPARED = ('prism', 'dp-adamw', 'adamw')


@dataclasses.dataclass(frozen=True)
class Method:
  """One way to train.

  Attributes:
    name: One of ``METHODS``.
    transform: Takes gradients of examples, held or in micro-batches, and
      ``is_padding_example``.
    coordinates: From the trainable parameters to a function of one example's
      gradient: what has the norm that is clipped, for diagnostics.
    prepare: Applied once to the parameters before training.
  """

  name: str
  transform: optax.GradientTransformationExtraArgs
  coordinates: Callable[[Any], Callable[[Any], Any]] = lambda params: (
    lambda gradients: gradients
  )
  prepare: Callable[[Any], Any] = lambda params: params

  @property
  def is_private(self) -> bool:
    return self.name != 'adamw'


def prism_with_rows(
  learning_rate: optax.ScalarOrSchedule,
  *,
  l2_clip_norm: float,
  noise_multiplier: float,
  expected_batch_size: int,
  prng_key: jax.Array,
  steps: int | None,
  layout: lora.Layout | None,
) -> prism_optax.transforms.TangentTransformation:
  """``prism`` line by line, with scales of rows directly behind the noise."""
  stddev = noise_multiplier * l2_clip_norm / expected_batch_size
  return prism_optax.chain(
    prism_optax.intrinsic_clip(l2_clip_norm, normalize_by=expected_batch_size),
    prism_optax.tangent_privatizer(stddev, prng_key=prng_key, steps=steps),
    contrib.scale_by_row_moments(noise_stddev=stddev),
    prism_optax.scale_by_rank_preconditioner(noise_stddev=stddev),
    prism_optax.add_decayed_factors(0.1),
    prism_optax.scale_by_learning_rate(learning_rate),
    prism_optax.retract(),
    layout=layout,
  )


def _no_matrices(params: Any) -> Any:
  """All leaves are one clip group, and none is orthogonalized."""
  return jax.tree.map(lambda _: None, params)


def matrices(params: Any) -> Any:
  """Which leaves are matrices or stacks of them, for DP-Muon."""
  return jax.tree.map(
    lambda x: (
      optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)
      if x.ndim >= 2
      else None
    ),
    params,
  )


def make(
  name: str,
  *,
  learning_rate: optax.ScalarOrSchedule,
  l2_clip_norm: float,
  noise_multiplier: float,
  expected_batch_size: int,
  prng_key: jax.Array,
  params: Any,
  steps: int | None = None,
  layout: lora.Layout | None = None,
) -> Method:
  """Builds a method.

  Args:
    name: ``prism``: PRISM (arXiv:2606.00944) on the manifold of the adapters.
      ``prism-rows``: the same with ``contrib.scale_by_row_moments``, which
      evens out its inputs and outputs. ``dp-muon``: DP-Muon
      (arXiv:2605.12994) on the two factors of every adapter and the matrix of
      the head, each clipped by itself to an equal share of the norm, Adam for
      biases. ``dp-adamw``: AdamW on the two factors of every adapter, see
      :func:`dp_adamw`. ``adamw``: the same with neither clip nor noise; NOT
      private.
    learning_rate: A number or a schedule.
    l2_clip_norm: Largest norm of one example's gradient over all trainable
      leaves.
    noise_multiplier: Standard deviation of the noise on the mean, divided by
      ``l2_clip_norm / expected_batch_size``.
    expected_batch_size: The divisor of the sum, a declared constant.
    prng_key: Key of the noise, secret; see ``randomness.noise_key``.
    params: The trainable parameters: how many matrices there are.
    steps: Number of updates that were accounted for: our noise releases nothing
      beyond them.
    layout: How PRISM finds the pairs of factors; see
      ``prism_optax.lora.describe_pairs``.

  Returns:
    The method.

  Raises:
    ValueError: If the name is unknown.
  """
  mechanism = {
    'noise_multiplier': noise_multiplier,
    'expected_batch_size': expected_batch_size,
    'prng_key': prng_key,
    'steps': steps,
  }
  if name in ('prism', 'prism-rows'):
    make = prism_optax.prism if name == 'prism' else prism_with_rows
    transform = make(
      learning_rate, l2_clip_norm=l2_clip_norm, layout=layout, **mechanism
    )
    return Method(
      name,
      transform,
      functools.partial(prism_optax.tangent_coordinates, layout=layout),
      # Same adapters in the gauge where their frames are exact.
      prepare=functools.partial(lora.canonicalize, layout=layout),
    )
  if name == 'dp-muon':
    # K groups of norm C / sqrt(K) each: together C, as for the others.
    groups = {'weight_dimension_numbers': matrices}
    unit = prism_optax.per_matrix_clip(1.0, **groups)
    transform = prism_optax.dp_muon(
      learning_rate,
      l2_clip_norms=l2_clip_norm / unit.sensitivity(params=params),
      consistent_rms=0.2,
      **mechanism,
      **groups,
    )
    return Method(name, transform)
  if name == 'dp-adamw':
    return Method(
      name, dp_adamw(learning_rate, l2_clip_norm=l2_clip_norm, **mechanism)
    )
  if name == 'adamw':
    return Method(
      name, adamw(learning_rate, expected_batch_size=expected_batch_size)
    )
  raise ValueError(f'Expected a method of {METHODS}, got {name!r}.')


def dp_adamw(
  learning_rate: optax.ScalarOrSchedule,
  *,
  l2_clip_norm: float,
  b1: float = 0.9,
  weight_decay: float = 1e-4,
  **mechanism: Any,
) -> optax.GradientTransformationExtraArgs:
  """DP-AdamW: one clip of the whole gradient, the exact sum, noise, AdamW.

  It is DP-Muon of a tree that has no matrices. The defaults are those of
  ``optax.adamw``.

  Args:
    learning_rate: A number or a schedule.
    l2_clip_norm: Of one example's gradient over all leaves.
    b1: Decay of the first moment.
    weight_decay: As AdamW has it.
    **mechanism: As for ``prism_optax.dp_muon``: ``noise_multiplier``,
      ``expected_batch_size``, ``prng_key``, ``steps``.
  """
  return prism_optax.dp_muon(
    learning_rate,
    l2_clip_norms=l2_clip_norm,
    weight_dimension_numbers=_no_matrices,
    adam_b1=b1,
    weight_decay=weight_decay,
    **mechanism,
  )


def adamw(
  learning_rate: optax.ScalarOrSchedule,
  *,
  expected_batch_size: float,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """AdamW of a sum of gradients over a constant; NOT private.

  An example whose gradient is not finite counts as zero, as for the others.

  Args:
    learning_rate: A number or a schedule.
    expected_batch_size: The divisor.
    **options: Of ``optax.adamw``.
  """
  add_up = prism_optax.per_matrix_clip(
    1e30,  # No gradient of a network is that long.
    normalize_by=expected_batch_size,
    weight_dimension_numbers=_no_matrices,
  )
  return optax.chain(add_up, optax.adamw(learning_rate, **options))
