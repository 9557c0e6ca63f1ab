"""What may be claimed of a training: event, epsilon, the sentence to report.

A run that stops early because of what it has released is a composition whose
length depends on the releases. Epsilon of the steps done does not hold for it:
who stops when the noise has said the most has said more than that. Two claims
do hold. Epsilon of all planned steps, because a run that stops is a run to the
end of which a part is shown. And, with some possible stops that were fixed
beforehand, epsilon of the next of them at an equal share of delta
(docs/explanation/stops.md has the proof).
"""

from typing import NamedTuple

import dp_accounting

from prism_optax import _validate, accounting
from prism_optax._proofs._proof import Proof
from prism_optax.accounting import _events
from prism_optax.training import _seen
from prism_optax.training._journal import Count
from prism_optax.training._settings import Settings

STOPS = ('planned', 'adaptive')
# Half as many steps each time, down to a sixteenth.
_HALVINGS = 4


def possible_stops(stop: str, steps: int) -> tuple[int, ...]:
  """Numbers of steps of which epsilon may be reported, in order.

  Each gets the same share of delta, so few are better than many.

  Args:
    stop: ``'planned'``: the last one alone; ``'adaptive'``: some more.
    steps: All of them.

  Raises:
    ValueError: For another word.
  """
  _validate.one_of('stop', stop, STOPS)
  if stop == 'planned':
    return (steps,)
  return tuple(sorted({-(-steps // 2**i) for i in range(_HALVINGS + 1)}))


def next_stop(stops: tuple[int, ...], done: int) -> int:
  """The first possible stop that is not before ``done`` steps.

  Raises:
    ValueError: For more steps than there are.
  """
  if done > stops[-1]:
    raise ValueError(f'Expected at most {stops[-1]} steps, got {done}.')
  return next(t for t in stops if t >= done)


class Claim(NamedTuple):
  """What may be claimed of a training with these settings.

  Attributes:
    settings: What the guarantee depends on.
    released: What the journal has: steps that were done again count again.
  """

  settings: Settings
  released: Count

  def event(self, steps: int) -> dp_accounting.DpEvent:
    """The event of some steps, and of prior releases."""
    settings = self.settings
    cut = settings.sampling.truncated_batch_size
    training = accounting.dpsgd_event(
      settings.noise_multiplier,
      settings.sampling.probability,
      steps + self.released.again,
      truncated_batch_size=cut,
      dataset_size=None if cut is None else settings.sampling.dataset_size,
    )
    return _events.composed([training, *settings.prior_releases.events])

  def entries(self, steps: int) -> int:
    """Number of entries that got noise."""
    prior = self.settings.prior_releases.entries
    return (steps + self.released.again) * self.settings.entries + prior

  def epsilon(self, steps: int) -> float:
    """Epsilon of some steps, or of the next possible stop."""
    settings = self.settings
    if len(settings.stops) > 1:
      steps = next_stop(settings.stops, steps)
    return accounting.epsilon(
      self.event(steps),
      settings.delta / len(settings.stops),
      entries=self.entries(steps),
    )

  def statement(
    self, done: int, stop_was_fixed: bool, proofs: tuple[Proof, ...]
  ) -> str:
    """The sentence to report.

    Args:
      done: Number of steps that were released.
      stop_was_fixed: Whether nothing that was released made them stop.
      proofs: Of the program of a step.
    """
    settings, stops = self.settings, self.settings.stops
    reported = done if stop_was_fixed else next_stop(stops, done)
    most = settings.sampling.examples_per_user
    unit = 'unit: one record'
    if most is not None:
      unit = f'unit: one user with all records, at most {most} in a batch'
    text = accounting.privacy_statement(
      self.event(reported),
      settings.delta,
      entries=self.entries(reported),
      possible_stops=len(stops),
    )
    void = (
      '; no guarantee against anyone who knows prng_key'
      if settings.seeded
      else ''
    )
    steps = _in_words(
      done, reported, settings.steps, len(stops), self.released.again
    )
    prior = settings.prior_releases.words
    return f'{text}, {unit}, {steps}{prior}{void}{_proved(proofs)}'


def _in_words(
  done: int, reported: int, steps: int, stops: int, again: int
) -> str:
  """How many steps were done, and of how many epsilon is."""
  words = f'{done} of {steps} steps'
  if stops > 1:
    words += f' (epsilon is for {reported}, one of {stops} possible stops)'
  elif reported != done:
    words += f' (epsilon is for all {reported})'
  elif done < steps:
    words += ' (declared: the stop was fixed beforehand)'
  if again:
    words += f' and {again} of them done again elsewhere'
  return words


def _proved(proofs: tuple[Proof, ...]) -> str:
  """The end of a statement."""
  words = [
    'nothing bypasses the noise'
    if x.claim == _seen.CLAIM
    else 'no record acts on another'
    for x in proofs
    if x
  ]
  return f'; proved: {", and ".join(words)}' if words else ''
