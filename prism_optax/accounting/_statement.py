"""What to report: epsilon, and everything that it depends on."""

import math

import dp_accounting
from dp_accounting import NeighboringRelation, dp_event

from prism_optax import _validate
from prism_optax.accounting import _as_drawn, _epsilon, _events
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE


def privacy_statement(
  event: dp_accounting.DpEvent,
  delta: float,
  *,
  accountant: str = 'pld',
  neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
  dataset_size: int | None = None,
  entries: float | None = None,
  possible_stops: int = 1,
) -> str:
  """Returns the sentence to report: epsilon and everything it depends on.

  Args:
    event: What was released.
    delta: Delta at which epsilon is reported, in [0, 1].
    accountant: 'pld' or 'rdp', as for :func:`epsilon`.
    neighboring_relation: Relation under which epsilon is meant.
    dataset_size: Number of records, as for :func:`epsilon`.
    entries: Number of entries to which this library adds noise, over all
      updates together. Epsilon is then that of the noise as it is drawn, at the
      same delta; else that of ideal noise.
    possible_stops: The releases were stopped on the way, at one of so many
      stops that were fixed beforehand, and ``event`` is what was released by
      the next one. Each has the same share of delta, at which epsilon is
      computed; together they have ``delta``.

  Returns:
    One line with epsilon (rounded up), delta, relation, accountant, and the
    sampling that the figure assumes.

  Raises:
    ValueError: In the cases of :func:`epsilon`; if there are so many entries
      that what is drawn takes half of ``delta``; for fewer than one stop.

  Examples:
    >>> from prism_optax import accounting
    >>> event = accounting.dpsgd_event(1.0, 64 / 9919, 300)
    >>> print(*accounting.privacy_statement(event, 1e-5).split(', '), sep='\\n')
    epsilon <= 0.674 at delta = 1e-05
    add-or-remove-one neighbours (PLD)
    Poisson sampling
  """
  delta = _events.check_delta(event, delta, dataset_size)
  _validate.integer('possible_stops', possible_stops, 1)
  spent = _as_drawn.epsilon(
    lambda delta: _epsilon.epsilon_at(
      event, delta, accountant, neighboring_relation
    ),
    delta / possible_stops,
    entries,
  )
  drawn = '' if entries is None else ', noise as drawn'
  # Rounding down would claim more privacy than was shown.
  shown = math.ceil(spent * 1000) / 1000 if math.isfinite(spent) else spent
  relation = neighboring_relation.name.lower().replace('_', '-')
  sampled = _events.kinds(event) & {
    dp_event.PoissonSampledDpEvent,
    dp_event.TruncatedSubsampledGaussianDpEvent,
  }
  sampling = ', Poisson sampling' if sampled else ''
  return (
    f'epsilon <= {shown:.3f} at delta = {delta:g},'
    f' {relation} neighbours ({accountant.upper()}){sampling}{drawn}'
  )
