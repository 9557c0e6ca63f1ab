"""The event of noisy training steps on random batches, and its epsilon."""

import math
from collections.abc import Iterable

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event, pld, rdp

from prism_optax import _validate
from prism_optax.accounting import _events
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE

ACCOUNTANTS = ('pld', 'rdp')

# The accountant takes exp(interval). An epsilon of millions is no guarantee.
_WIDEST_INTERVAL = 100.0


def dpsgd_event(
  noise_multiplier: float,
  sampling_probability: float,
  steps: int,
  *,
  truncated_batch_size: int | None = None,
  dataset_size: int | None = None,
) -> dp_accounting.DpEvent:
  """Returns the event of ``steps`` noisy sums over Poisson-sampled batches.

  Each record enters each batch independently with ``sampling_probability``,
  is clipped to a norm C, and the sum gets Gaussian noise of standard deviation
  ``noise_multiplier * C`` on every coordinate. Fixed-size or shuffled batches
  are another mechanism, with another event. The event holds no neighbouring
  relation: :func:`epsilon` takes it.

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
      constant. 1.0 means that every step sees every record: nothing is sampled.
    steps: Number of steps. 0 is an event that costs nothing.
    truncated_batch_size: The largest batch, where batches that Poisson sampling
      makes larger are cut to a random subset of this size. Cutting them
      without saying so here gives an epsilon that does not hold.
    dataset_size: Number of records, needed with ``truncated_batch_size`` alone,
      a public constant.

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
  if truncated_batch_size is not None and dataset_size is not None:
    _validate.integer('truncated_batch_size', truncated_batch_size, 1)
    _validate.integer('dataset_size', dataset_size, 1)
    step: dp_accounting.DpEvent = dp_event.TruncatedSubsampledGaussianDpEvent(
      int(dataset_size), probability, int(truncated_batch_size), sigma
    )
  else:
    step = dp_accounting.GaussianDpEvent(sigma)
    if probability < 1:
      # Plain Gaussian steps compose in closed form, under every relation and
      # in both accountants; sampled ones do not.
      step = dp_accounting.PoissonSampledDpEvent(probability, step)
  return dp_accounting.SelfComposedDpEvent(step, int(steps))


def epsilon(
  event: dp_accounting.DpEvent,
  delta: float,
  *,
  accountant: str = 'pld',
  neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
  value_discretization_interval: float | None = None,
) -> float:
  """Returns an upper bound of epsilon at ``delta`` for what was released.

  An epsilon means nothing without its neighbouring relation. The default,
  adding or removing one record, is the one under which Poisson sampling is
  usually analysed; say it wherever the number is reported, or report
  :func:`privacy_statement`, which says it.

  ================================  ===========================================
  ``delta=0.0``, Gaussian noise     ``inf``: no such noise has a pure epsilon
  ``delta=1.0``                     0.0
  no noise                          ``inf``
  nothing released                  0.0
  epsilon in the millions           ``inf``, in place of a grid of that length
  RDP, Poisson, ``REPLACE_ONE``     ValueError: there is no such analysis
  RDP, truncated batches            ValueError, likewise
  ================================  ===========================================

  Args:
    event: What was released, in noise multipliers with respect to the clip
      norm. Sensitivities that are doubled by hand for ``REPLACE_ONE`` would be
      doubled twice: the accountant does it.
    delta: Delta at which epsilon is wanted, in [0, 1].
    accountant: 'pld' (privacy loss distributions, tight) or 'rdp' (Renyi
      divergences, looser, fast for any number of steps).
    neighboring_relation: dp-accounting's enum. Under ``REPLACE_ONE`` the two
      records' contributions both count: a Gaussian release costs as much as
      with half the noise multiplier. dp-accounting's RDP accountant does not do
      this; here Gaussian and Laplace events are rewritten before they reach it.
    value_discretization_interval: Grid of the loss distribution; only for
      'pld'. ``None`` takes 1e-4, or a wider grid where epsilon is so large
      (above a hundred) that the fine one would not fit in memory. Any grid
      gives an upper bound.

  Returns:
    Epsilon, ``inf`` where there is no guarantee (or only one of millions).

  Raises:
    ValueError: If an argument is out of its range, or the accountant has no
      analysis of the event under the relation (RDP has none of Poisson
      sampling under ``REPLACE_ONE``, nor of truncated batches).

  References:
    The accountants are dp-accounting's. PLD: Doroshenko et al., Connect the
    Dots, arXiv:2207.04380. RDP: Mironov, arXiv:1702.07476; with Poisson
    sampling, Mironov, Talwar and Zhang, arXiv:1908.10530.

  Examples:
    >>> from prism_optax import accounting
    >>> event = accounting.dpsgd_event(4.8448, 1.0, 1)
    >>> round(accounting.epsilon(event, 1e-5), 3)
    0.751
    >>> relation = accounting.NeighboringRelation.REPLACE_ONE
    >>> round(
    ...   accounting.epsilon(event, 1e-5, neighboring_relation=relation), 3
    ... )
    1.61
  """
  _events.require_event(event)
  delta = _validate.known_probability('delta', delta)
  _validate.one_of('accountant', accountant, ACCOUNTANTS)
  _validate.neighboring_relation(neighboring_relation)
  interval = value_discretization_interval
  if interval is not None:
    _validate.positive('value_discretization_interval', interval)
  if accountant == 'rdp':
    event = _events.with_relation(event, neighboring_relation)
    engine: dp_accounting.PrivacyAccountant = rdp.RdpAccountant(
      neighboring_relation=neighboring_relation
    )
  else:
    if interval is None:
      interval = _events.affordable_interval(event, delta)
    if interval > _WIDEST_INTERVAL:
      return math.inf
    engine = pld.PLDAccountant(neighboring_relation, interval)
  try:
    engine.compose(event)
  except dp_accounting.UnsupportedEventError as error:
    raise ValueError(
      f'The accountant {accountant!r} has no analysis of this event under'
      f' neighboring_relation={neighboring_relation}: {error}'
    ) from error
  return float(engine.get_epsilon(delta))


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
      zero makes the whole non-private; ``inf`` is a group that says nothing.

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


def privacy_statement(
  event: dp_accounting.DpEvent,
  delta: float,
  *,
  accountant: str = 'pld',
  neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
) -> str:
  """Returns the sentence to report: epsilon and everything it depends on.

  Args:
    event: What was released.
    delta: Delta at which epsilon is reported, in [0, 1].
    accountant: 'pld' or 'rdp', as for :func:`epsilon`.
    neighboring_relation: Relation under which epsilon is meant.

  Returns:
    One line with epsilon (rounded up), delta, relation, accountant, and the
    sampling that the figure assumes.

  Raises:
    ValueError: In the cases of :func:`epsilon`.

  Examples:
    >>> from prism_optax import accounting
    >>> event = accounting.dpsgd_event(1.0, 64 / 9919, 300)
    >>> print(*accounting.privacy_statement(event, 1e-5).split(', '), sep='\\n')
    epsilon <= 0.674 at delta = 1e-05
    add-or-remove-one neighbours (PLD)
    Poisson sampling
  """
  spent = epsilon(
    event,
    delta,
    accountant=accountant,
    neighboring_relation=neighboring_relation,
  )
  # Rounding down would claim more privacy than was shown.
  shown = math.ceil(spent * 1000) / 1000 if math.isfinite(spent) else spent
  relation = neighboring_relation.name.lower().replace('_', '-')
  sampled = _events.kinds(event) & {
    dp_event.PoissonSampledDpEvent,
    dp_event.TruncatedSubsampledGaussianDpEvent,
  }
  sampling = ', Poisson sampling' if sampled else ''
  return (
    f'epsilon <= {shown:.3f} at delta = {float(delta):g},'
    f' {relation} neighbours ({accountant.upper()}){sampling}'
  )
