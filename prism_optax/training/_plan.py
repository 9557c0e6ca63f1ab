"""Steps, batch and noise of a training, from public numbers alone."""

import math
import warnings
from typing import Any, NamedTuple

import jax
import numpy as np

from prism_optax import _validate
from prism_optax._types import ArrayTree
from prism_optax.accounting import _calibration, _gaussian
from prism_optax.training._sampling import Execution, Sampling

# Fewer steps have more signal over noise at equal cost, and below some sixty
# there are too few of them to go anywhere (docs/how_to/plan.md).
_STEPS = 120
_OTHER_STEPS = (30, 60, 240, 480)
# Of the batch from which on the noise alone grows: it has .94 of the signal
# over noise that all records in every batch have.
_LARGEST_BATCH = 2.0


class Alternative(NamedTuple):
  """A training that one might run.

  Attributes:
    steps: T.
    expected_batch_size: b, of records, or of users.
    noise_multiplier: sigma that meets the target, to one percent.
    example_gradients: T b, times a user's records.
    signal_over_noise: ``sqrt(T) b / sigma``: the largest norm that the sum of
      all steps' clipped gradients can have, over the standard deviation of its
      noise in each direction.
  """

  steps: int
  expected_batch_size: int
  noise_multiplier: float
  example_gradients: int
  signal_over_noise: float


class Plan(NamedTuple):
  """What :func:`plan` advises. ``print`` shows it beside its alternatives.

  Attributes:
    chosen: The advice.
    alternatives: Other steps at the same cost, and other costs at the same
      steps, in the order of their steps and costs. The advice is one of them.
    limit: Signal over noise of all records in every batch.
    arguments: For ``make_private(loss, params, **plan.arguments, ...)``:
      ``steps``, ``expected_batch_size``, ``dataset_size``, ``delta``,
      ``target_epsilon``, ``examples_per_user`` and ``execution``.
  """

  chosen: Alternative
  alternatives: tuple[Alternative, ...]
  limit: float
  arguments: dict[str, Any]

  def __str__(self) -> str:
    rows = [
      '  steps   batch  noise multiplier  example gradients  signal over noise'
    ]
    rows += [
      f'{">" if x == self.chosen else " "}{x.steps:6,}'
      f'{x.expected_batch_size:8,}{x.noise_multiplier:18.3f}'
      f'{x.example_gradients:19,}{x.signal_over_noise:12,.0f}'
      f'{x.signal_over_noise / self.limit:5.0%}'
      for x in self.alternatives
    ]
    return '\n'.join([*rows, f'All records in every batch: {self.limit:,.0f}.'])


def plan(
  dataset_size: int,
  *,
  target_epsilon: float,
  delta: float,
  example_gradients: float | None = None,
  examples_per_user: int | None = None,
  params: ArrayTree | None = None,
  memory_bytes: float | None = None,
  bytes_per_example: float | None = None,
) -> Plan:
  """Steps, batch and noise of a training, from public numbers alone.

  Nothing here reads a record, so the advice costs no privacy, and the best of
  several trainings need not be chosen on private data.

  The advice has 120 steps and the largest batch that is worth its cost. Let mu
  be the parameter of Gaussian differential privacy of the target. By the
  central limit theorem of Bu et al., T steps of expected batch b have

      sqrt(T) b / sigma = mu N x sqrt(log(1 + 1 / x^2)),  x = sqrt(T) b / (mu N)

  signal over noise. This depends on x alone and rises to the limit mu N; x = 1
  reaches .83 of it, and x = 2, where the advice stops, .94. The accountant
  computes the noise multipliers, and finds less signal than this for small
  noise.

  **What it does not know.** Signal over noise says how much of a gradient can
  be seen, not how far 30 steps get or how hard a task is. It ranked trainings
  of sentence encoders correctly, but ranked few steps on small images too high,
  so the number of steps is fixed. You choose learning rate and rank.

  Args:
    dataset_size: N, the public number of records, or of users.
    target_epsilon: Epsilon of the training.
    delta: Its delta, below ``1 / dataset_size``.
    example_gradients: How many gradients of examples you can afford, such as
      the hours that you have times the gradients of an hour. None is any
      number.
    examples_per_user: For privacy of users: the most records that a user
      contributes to one batch. A user then costs this number of gradients.
    params: The trainable parameters, arrays or shapes. If you give them, a
      warning tells you when the noise must hide the gradients.
    memory_bytes: Memory of the device for gradients and activations.
    bytes_per_example: Memory that the gradient of one example takes.

  Returns:
    The advice, with ``chosen``, ``alternatives``, ``limit``, and ``arguments``
    for ``make_private(loss, params, **plan.arguments, ...)``. ``print`` shows a
    table.

  Raises:
    ValueError: If an argument is out of its range, you can afford fewer example
      gradients than steps, or one of ``memory_bytes`` and ``bytes_per_example``
      is given without the other.

  References:
    Bu, Dong, Long and Su, Deep Learning with Gaussian Differential Privacy,
    arXiv:1911.11607, Corollary 2.

  Example:
    >>> from prism_optax import training
    >>> plan = training.plan(10_000, target_epsilon=3.0, delta=1e-5,
    ...                      example_gradients=60_000)
    >>> plan.chosen.steps, plan.chosen.expected_batch_size
    (120, 500)
    >>> {'steps', 'expected_batch_size'} <= set(plan.arguments)
    True
  """
  _validate.integer('dataset_size', dataset_size, 1)
  target_epsilon = _validate.known_positive('target_epsilon', target_epsilon)
  delta = _validate.known_open_probability('delta', delta)
  records = 1 if examples_per_user is None else examples_per_user
  _validate.integer('examples_per_user', records, 1)
  affordable = math.inf
  if example_gradients is not None:
    affordable = _validate.known_positive(
      'example_gradients', example_gradients
    )
  if affordable < _STEPS * records:
    raise ValueError(
      f'Expected at least {_STEPS * records} example gradients, one record (or'
      f' user) in each of {_STEPS} steps, got {example_gradients=}.'
    )
  fit = _fit(memory_bytes, bytes_per_example, records)
  mu = _gaussian.gaussian_mu(target_epsilon, delta)

  def alternative(steps: int, batch: float) -> Alternative:
    b = min(max(round(batch), 1), dataset_size)
    sigma = _calibration.approximate_noise_multiplier(
      target_epsilon, delta, b / dataset_size, steps
    )
    signal = math.sqrt(steps) * b / sigma
    return Alternative(steps, b, sigma, steps * b * records, signal)

  largest = _LARGEST_BATCH * mu * dataset_size / math.sqrt(_STEPS)
  # Rounded down: no more than one can afford.
  batch = math.floor(min(affordable / (_STEPS * records), largest)) or 1
  chosen = alternative(_STEPS, batch)
  b = chosen.expected_batch_size
  padded = Sampling.of(b, dataset_size, Execution(), None).padded_batch_size
  others = [alternative(t, _STEPS * b / t) for t in _OTHER_STEPS]
  others += [alternative(_STEPS, b * x) for x in (1 / 4, 1 / 2, 2, 4)]
  limit = mu * dataset_size
  if params is not None:
    _warn_if_hidden(chosen, params, dataset_size)
  return Plan(
    chosen,
    tuple(sorted({chosen, *others})),
    limit,
    {
      'dataset_size': dataset_size,
      'target_epsilon': target_epsilon,
      'delta': delta,
      'steps': _STEPS,
      'expected_batch_size': b,
      'examples_per_user': examples_per_user,
      'execution': Execution(
        # A power of two, or all at once.
        None if fit >= padded else 1 << (int(fit).bit_length() - 1)
      ),
    },
  )


def _warn_if_hidden(
  chosen: Alternative, params: ArrayTree, dataset_size: int
) -> None:
  """Warns where the noise is longer than all clipped gradients together."""
  entries = sum(math.prod(np.shape(x)) for x in jax.tree.leaves(params))
  if chosen.signal_over_noise < math.sqrt(entries):
    warnings.warn(
      f'Signal over noise {chosen.signal_over_noise:.0f} is below the root of'
      f' the {entries} trainable numbers, {math.sqrt(entries):.0f}: over all'
      ' steps the noise is longer than the gradients could be if they all'
      f' agreed. {dataset_size} records are few for this: train fewer numbers'
      ' (a lower rank, fewer layers, a head alone), or ask for a larger'
      ' epsilon.',
      stacklevel=3,
    )


def _fit(
  memory_bytes: float | None, bytes_per_example: float | None, records: int
) -> float:
  """How many gradients of records, or users, fit into the memory together.

  Raises:
    ValueError: For one without the other, or where not one record fits.
  """
  if memory_bytes is None and bytes_per_example is None:
    return math.inf
  if memory_bytes is None or bytes_per_example is None:
    raise ValueError(
      'Expected memory_bytes and bytes_per_example together, got'
      f' {memory_bytes=} and {bytes_per_example=}.'
    )
  memory = _validate.known_positive('memory_bytes', memory_bytes)
  each = _validate.known_positive('bytes_per_example', bytes_per_example)
  fit = math.floor(memory / (each * records))
  if not fit:
    raise ValueError(
      'Expected memory for the gradient of one record (or user), got'
      f' {memory_bytes=} and {bytes_per_example=}, of {records}.'
    )
  return fit
