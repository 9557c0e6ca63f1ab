"""Events: what was released, in the words of dp-accounting, and its size."""

import functools
import json
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence

import dp_accounting
import numpy as np
from dp_accounting import NeighboringRelation, dp_event, rdp

from prism_optax import _validate

# Any Renyi orders give an upper bound of epsilon: a few are enough to judge a
# size. Integers, because fractional orders are slow and warn where their series
# is cut off.
_INTEGER_ORDERS = tuple(round(2 ** (k / 2)) for k in range(2, 21))

# Grid points that the loss distribution of one step, or of all of them, may
# take: some hundred megabytes. Without a bound a noise multiplier of 0.01
# takes all the memory of the machine.
_MAX_GRID = 2e6

# A delta above it gets a warning where the number of records is not known.
_LARGEST_DELTA = 1e-3

# Fields of events that are no numbers >= 0: whole ones, probabilities, lists of
# numbers.
_COUNTS = frozenset({
  'count', 'dataset_size', 'num_buckets', 'sample_size', 'source_dataset_size',
  'step_counts', 'truncated_batch_size',
})  # fmt: skip
_PROBABILITIES = frozenset({'sampling_probability', 'sampling_probs'})
_LISTS = frozenset({'sampling_probs', 'sensitivities', 'step_counts'})

# The default of all that takes a relation: the one of Poisson sampling.
ADD_OR_REMOVE_ONE = NeighboringRelation.ADD_OR_REMOVE_ONE


def dpsgd_event(
  noise_multiplier: float,
  sampling_probability: float,
  steps: int,
  *,
  truncated_batch_size: int | None = None,
  dataset_size: int | None = None,
) -> dp_accounting.DpEvent:
  """Returns the event of ``steps`` noisy sums over Poisson-sampled batches.

  Each record enters each batch independently with ``sampling_probability``, is
  clipped to a norm C, and the sum gets Gaussian noise of standard deviation
  ``noise_multiplier * C`` on every coordinate. Batches of a fixed size, or
  shuffled ones, are another mechanism, with another event. The event holds no
  neighbouring relation: :func:`epsilon` takes it.

  =====================================  ======================================
  ``noise_multiplier=0.0``               no privacy: epsilon is infinite
  ``steps=0``                            costs nothing
  ``sampling_probability=0.0``           costs nothing either
  ``sampling_probability=1.0``           Gaussian releases, nothing is sampled
  batches cut to a size, not said here   an epsilon that does not hold
  =====================================  ======================================

  Args:
    noise_multiplier: Standard deviation of the noise over C, both in the unit
      of the sum (or both in the unit of the mean: C and the noise divided by
      the same public constant). With several clip groups, the joint one:
      :func:`joint_noise_multiplier`. 0.0 means no noise and no privacy.
    sampling_probability: Probability that a batch has a given record, a public
      constant. 1.0 means that every step uses every record: nothing is sampled.
    steps: Number of steps. 0 is an event that costs nothing.
    truncated_batch_size: The largest batch, if larger Poisson batches are cut
      to a random subset of this size. If you cut them without this argument,
      epsilon does not hold.
    dataset_size: Number of records, a public constant, needed only with
      ``truncated_batch_size``.

  Returns:
    A dp-accounting event, for :func:`epsilon` or any accountant.

  Raises:
    ValueError: If a number is negative, NaN or infinite, the probability is
      above 1, the counts are no integers, or only one of
      ``truncated_batch_size`` and ``dataset_size`` is given.

  References:
    Abadi et al., Deep Learning with Differential Privacy, arXiv:1607.00133;
    for truncated batches, arXiv:2508.15089.

  Examples:
    >>> from prism_optax import accounting
    >>> event = accounting.dpsgd_event(0.5, 64 / 9919, 300)
    >>> round(accounting.epsilon(event, 1e-5), 2)
    6.62
  """
  sigma = _validate.known_number('noise_multiplier', noise_multiplier)
  _validate.non_negative('noise_multiplier', sigma)
  probability = _validate.known_probability(
    'sampling_probability', sampling_probability
  )
  _validate.integer('steps', steps, 0)
  if (truncated_batch_size is None) != (dataset_size is None):
    raise ValueError(
      'Expected truncated_batch_size and dataset_size together, got'
      f' {truncated_batch_size=} and {dataset_size=}.'
    )
  if steps == 0:
    return dp_accounting.NoOpDpEvent()
  step: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(sigma)
  if truncated_batch_size is not None and dataset_size is not None:
    _validate.integer('truncated_batch_size', truncated_batch_size, 1)
    _validate.integer('dataset_size', dataset_size, 1)
    step = dp_event.TruncatedSubsampledGaussianDpEvent(
      int(dataset_size), probability, int(truncated_batch_size), sigma
    )
  elif probability < 1:
    # Plain Gaussian steps compose in closed form, under every relation and in
    # both accountants; sampled ones do not.
    step = dp_accounting.PoissonSampledDpEvent(probability, step)
  return dp_accounting.SelfComposedDpEvent(step, int(steps))


def joint_noise_multiplier(noise_multipliers: float | Iterable[float]) -> float:
  """Returns the noise multiplier of several releases about one batch.

  Clip groups (the matrices of DP-Muon, a head beside its adapters) that are
  clipped and noised one by one on the same batch are one Gaussian mechanism:
  in units of each group's noise the whole moves by the root of the sum of
  ``1 / sigma_k^2`` where a neighbour's record is one more or one less.
  Accounting each group alone, as if the others were not there, understates
  epsilon.

  Args:
    noise_multipliers: Each group's standard deviation over its clip norm. A
      zero makes the whole non-private; ``inf`` is a group that reveals nothing.

  Returns:
    ``(sum_k sigma_k^-2)^(-1/2)``: for K equal groups ``sigma / sqrt(K)``.

  Raises:
    ValueError: If there is no group, or a multiplier is negative or NaN.

  References:
    Dong, Roth and Su, Gaussian Differential Privacy, arXiv:1905.02383: the
    squares of ``mu_k = 1 / sigma_k`` add up.

  Examples:
    >>> from prism_optax import accounting
    >>> accounting.joint_noise_multiplier([2.0, 2.0, 2.0, 2.0])
    1.0
  """
  if not isinstance(noise_multipliers, Iterable):
    noise_multipliers = [noise_multipliers]
  check = _validate.known_non_negative
  groups = [check('noise_multipliers', sigma) for sigma in noise_multipliers]
  if not groups:
    raise ValueError('Expected noise_multipliers of one group or more, got [].')
  smallest = min(groups)
  if smallest == 0 or math.isinf(smallest):
    return smallest
  # In units of the smallest: squares of tiny multipliers do not underflow.
  return smallest / math.sqrt(math.fsum((smallest / s) ** 2 for s in groups))


def composed(events: Sequence[dp_event.DpEvent]) -> dp_event.DpEvent:
  """Returns the event of all of them; of one alone, that event."""
  return events[0] if len(events) == 1 else dp_event.ComposedDpEvent([*events])


def frozen(event: dp_event.DpEvent) -> dp_event.DpEvent:
  """Returns the event with tuples for its lists, which may change."""
  if isinstance(event, dp_event.ComposedDpEvent):
    return dp_event.ComposedDpEvent(tuple(map(frozen, event.events)))
  if isinstance(event, dp_event.SelfComposedDpEvent):
    return dp_event.SelfComposedDpEvent(frozen(event.event), event.count)
  return event


def require_event(event: object) -> None:
  """Raises ``ValueError`` unless it is an event whose parts are possible.

  All of them are looked at, also those inside of compositions and samples: a
  part that happens -1 times would be a refund, and accountants add it up.
  """
  if not isinstance(event, dp_event.DpEvent):
    raise ValueError(f'Expected event to be a DpEvent, got {event=}.')
  # What a class of events is made of; one that is not of dp-accounting, and
  # names nothing, is for the accountant to judge.
  for field in getattr(type(event), '__attrs_attrs__', ()):
    value = getattr(event, field.name)
    name = f'{type(event).__name__}.{field.name}'
    if field.name == 'event':
      require_event(value)
    elif field.name == 'events':
      if not isinstance(value, Sequence):
        raise ValueError(
          f'Expected {name} to be a list, got {name}={value!r}: an iterator can'
          ' be read once, and has no events for whoever reads it next.'
        )
      for inner in value:
        require_event(inner)
    elif field.name in _LISTS:
      for number in np.ravel(value):
        _require_number(name, field.name, number)
    else:
      _require_number(name, field.name, value)


def _require_number(name: str, field: str, value: object) -> None:
  """Raises ``ValueError`` for a number that no event can have."""
  if field in _COUNTS:
    _validate.integer(name, value, 0)
  elif field in _PROBABILITIES:
    _validate.known_probability(name, value)
  else:
    _validate.known_non_negative(name, value)


def check_delta(
  event: dp_event.DpEvent, delta: float, dataset_size: int | None = None
) -> float:
  """Refuses, or warns of, a delta that a record published at random meets.

  Called by a public function, whose caller the warning shows.

  Args:
    event: What was released. Truncated batches tell the number of records;
      others that are sampled make one over the probability likely.
    delta: In [0, 1].
    dataset_size: Number of records, if it is known.

  Returns:
    ``delta`` as a float.

  Raises:
    ValueError: If an argument is out of its range, or ``delta`` is not below
      one over a known number of records.
  """
  require_event(event)
  delta = _validate.known_probability('delta', delta)
  known, rates = [] if dataset_size is None else [dataset_size], []
  for leaf, _ in leaves(event):
    if isinstance(leaf, dp_event.TruncatedSubsampledGaussianDpEvent):
      known.append(leaf.dataset_size)
    rates.append(getattr(leaf, 'sampling_probability', 0.0))
  for size in known:
    _validate.integer('dataset_size', size, 1)
    if delta >= 1 / size:
      raise ValueError(
        f'Expected delta < 1 / dataset_size, got {delta=} and dataset_size='
        f'{size}: publishing one record at random, as it is, meets it.'
      )
  if not known and (
    delta > _LARGEST_DELTA or any(delta >= q > 0 for q in rates)
  ):
    warnings.warn(
      f'{delta=} is met by publishing one of {math.ceil(1 / delta)} records at'
      ' random, as it is. Take one well below one over the number of records.',
      stacklevel=3,
    )
  return delta


def with_relation(
  event: dp_event.DpEvent, relation: NeighboringRelation
) -> dp_event.DpEvent:
  """Returns the event that costs as much when a record is added or removed.

  A record that is replaced moves each sum twice as far.
  """
  if relation is not NeighboringRelation.REPLACE_ONE:
    return event
  doubled = functools.partial(with_relation, relation=relation)
  match event:
    case dp_event.GaussianDpEvent() | dp_event.LaplaceDpEvent():
      return type(event)(event.noise_multiplier / 2)
    case dp_event.DiscreteLaplaceDpEvent():
      return type(event)(event.noise_parameter, 2 * event.sensitivity)
    case dp_event.SelfComposedDpEvent():
      return type(event)(doubled(event.event), event.count)
    case dp_event.ComposedDpEvent():
      return type(event)([doubled(inner) for inner in event.events])
    case dp_event.SampledWithoutReplacementDpEvent():
      sizes = event.source_dataset_size, event.sample_size
      return type(event)(*sizes, doubled(event.event))
    case dp_event.RepeatAndSelectDpEvent():
      return type(event)(doubled(event.event), event.mean, event.shape)
  # Whatever remains either states its own guarantee (zCDP, randomised response)
  # or is refused by the accountant under this relation.
  return event


def leaves(
  event: dp_event.DpEvent, count: int = 1
) -> list[tuple[dp_event.DpEvent, int]]:
  """Returns the single releases of a composition, with their counts."""
  if isinstance(event, dp_event.NoOpDpEvent):
    return []
  if isinstance(event, dp_event.SelfComposedDpEvent):
    return leaves(event.event, count * event.count)
  if isinstance(event, dp_event.ComposedDpEvent):
    return [leaf for inner in event.events for leaf in leaves(inner, count)]
  return [(event, count)]


def kinds(event: dp_event.DpEvent) -> set[type]:
  """Returns the types of the single releases."""
  return {type(leaf) for leaf, _ in leaves(event)}


def _unsampled(event: dp_event.DpEvent) -> Iterator[dp_event.DpEvent]:
  """Yields the single releases, without the sampling that comes before."""
  for leaf, _ in leaves(event):
    if isinstance(leaf, dp_event.PoissonSampledDpEvent):
      yield from _unsampled(leaf.event)
    else:
      yield leaf


def has_no_noise(event: dp_event.DpEvent) -> bool:
  """Whether any part of the event is released as it is."""
  return any(
    isinstance(release, dp_event.NonPrivateDpEvent)
    or getattr(release, 'noise_multiplier', None) == 0
    for release in _unsampled(event)
  )


def rough_epsilon(event: dp_event.DpEvent, delta: float) -> float:
  """Returns a cheap upper bound of epsilon, add or remove one record."""
  accountant = rdp.RdpAccountant(_INTEGER_ORDERS)
  for leaf, count in leaves(event):
    if isinstance(leaf, dp_event.TruncatedSubsampledGaussianDpEvent):
      # RDP has no analysis of truncated batches; Poisson batches with half
      # the noise are close enough to judge a size.
      leaf = dp_event.PoissonSampledDpEvent(
        leaf.sampling_probability,
        dp_event.GaussianDpEvent(leaf.noise_multiplier / 2),
      )
    accountant.compose(leaf, count)
  return float(accountant.get_epsilon(delta))


def affordable_interval(event: dp_event.DpEvent, delta: float) -> float:
  """Returns the finest grid on which the loss distribution fits in memory."""
  widest = 0.0
  try:
    doubled = with_relation(event, NeighboringRelation.REPLACE_ONE)
    total = rough_epsilon(doubled, min(max(delta, 1e-30), 0.5))
    if math.isfinite(total):  # Else no noise at all: the accountant knows.
      widest = 2 * total
  except (dp_accounting.UnsupportedEventError, ValueError, ZeroDivisionError):
    pass
  for release in _unsampled(event):
    # About how far the loss of a single Gaussian step ranges.
    if sigma := float(getattr(release, 'noise_multiplier', 0.0)):
      widest = max(widest, 2 / sigma / sigma + 20 / sigma)
  return widest / _MAX_GRID


def to_json(event: dp_event.DpEvent) -> str:
  """Returns one line that names the event and every number in it."""
  return json.dumps(event, default=_plain, sort_keys=True)


def _plain(value: dp_event.DpEvent | np.generic | np.ndarray) -> object:
  """Returns what JSON does not know in types that it knows."""
  if isinstance(value, dp_event.DpEvent):
    # The first two name the module and the class.
    names = value.to_named_tuple()._fields[2:]
    fields = {name: getattr(value, name) for name in names}
    # As dp-accounting calls it: some have an event among their fields.
    return {'class_name': type(value).__name__, **fields}
  return value.tolist()  # NumPy's numbers; an integer stays one.
