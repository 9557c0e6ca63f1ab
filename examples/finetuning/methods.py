"""The optimizers that can be compared, each as two parts of one step.

A method is what happens to one example's gradient before it is clipped, and
an optax transformation of the clipped mean. The rest of the step is shared.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax_privacy
import optax

import prism_optax
from prism_optax import lora

METHODS = ('prism', 'prism-rows', 'dp-muon', 'dp-adamw', 'adamw')
# What the default task compares.
COMPARED = ('prism', 'dp-adamw', 'adamw')


@dataclasses.dataclass(frozen=True)
class Method:
  """One way to train.

  Attributes:
    name: One of ``METHODS``.
    clip_norm: L2 norm that one example may have after ``coordinates``.
    coordinates: From the trainable parameters to the function that is applied
      to the gradient of one example before it is clipped.
    transform: Takes the sum of the clipped gradients divided by the expected
      batch size.
    prepare: Applied once to the parameters before training.
  """

  name: str
  clip_norm: float
  coordinates: Callable[[Any], Callable[[Any], Any]]
  transform: optax.GradientTransformation
  prepare: Callable[[Any], Any] = lambda params: params

  @property
  def is_private(self) -> bool:
    return self.name != 'adamw'


def _unchanged(params: Any) -> Callable[[Any], Any]:
  del params
  return lambda gradients: gradients


def _matrices(params: Any) -> Any:
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
      ``prism-rows``: the same with ``scale_rows``, which evens out its inputs
      and outputs. ``dp-muon``: DP-Muon (arXiv:2605.12994) on the two factors
      of every adapter and the matrix of the head, each clipped by itself to an
      equal share of the norm, Adam for biases. ``dp-adamw``: AdamW on the two
      factors of every adapter, clipped and noised as they are. ``adamw``: the
      same with neither clip nor noise; NOT private.
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
  stddev = noise_multiplier * l2_clip_norm / expected_batch_size
  if name in ('prism', 'prism-rows'):
    transform = prism_optax.prism(
      learning_rate,
      l2_clip_norm=l2_clip_norm,
      noise_multiplier=noise_multiplier,
      expected_batch_size=expected_batch_size,
      per_example_gradients=False,
      scale_rows=name == 'prism-rows',
      prng_key=prng_key,
      steps=steps,
      layout=layout,
    )
    return Method(
      name,
      l2_clip_norm,
      functools.partial(prism_optax.tangent_coordinates, layout=layout),
      transform,
      # Same adapters in the gauge where their frames are exact.
      prepare=functools.partial(lora.canonicalize, layout=layout),
    )
  if name == 'dp-muon':
    # K groups of norm C / sqrt(K) each: together C, as for the others.
    groups = {'weight_dimension_numbers': _matrices}
    unit = prism_optax.per_matrix_clip(1.0, **groups)
    share = l2_clip_norm / unit.sensitivity(params=params)
    transform = prism_optax.dp_muon(
      learning_rate,
      l2_clip_norms=share,
      noise_multiplier=noise_multiplier,
      expected_batch_size=expected_batch_size,
      per_example_gradients=False,
      prng_key=prng_key,
      steps=steps,
      consistent_rms=0.2,
      **groups,
    )
    clip = prism_optax.transforms.clip_each_matrix(share, **groups)
    return Method(name, l2_clip_norm, lambda params: clip, transform)
  if name == 'dp-adamw':
    privatizer = jax_privacy.noise_addition.gaussian_privatizer(
      stddev=stddev,
      # Its generator takes keys of 64 bits.
      prng_key=jax.random.wrap_key_data(
        jax.random.key_data(prng_key)[-2:], impl='threefry2x32'
      ),
    )
    transform = optax.chain(privatizer, optax.adamw(learning_rate))
    return Method(name, l2_clip_norm, _unchanged, transform)
  if name == 'adamw':
    return Method(name, math.inf, _unchanged, optax.adamw(learning_rate))
  raise ValueError(f'Expected a method of {METHODS}, got {name!r}.')
