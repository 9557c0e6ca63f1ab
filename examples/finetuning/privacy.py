"""What is spent: the mechanism that is really run, and its epsilon."""

import dataclasses
import math

import dp_accounting

from prism_optax import accounting

RELATION = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


@dataclasses.dataclass(frozen=True)
class Plan:
  """The public constants of a private run.

  Attributes:
    dataset_size: Declared number of places in the data set. Places beyond the
      real records are drawn too and are empty, so that the sampling does not
      depend on the real number.
    expected_batch_size: Records that a batch has on average, and the divisor
      of the sum.
    padded_size: A batch is cut to so many.
    steps: Number of steps planned.
    noise_multiplier: Standard deviation of the noise on the mean over
      ``l2_clip_norm / expected_batch_size``.
    delta: The delta of the guarantee.
    entries: Numbers that are trained, each of which gets noise in every step.
      With 0 all figures are those of ideal noise.
  """

  dataset_size: int
  expected_batch_size: int
  padded_size: int
  steps: int
  noise_multiplier: float
  delta: float
  entries: int = 0

  @property
  def sampling_probability(self) -> float:
    return self.expected_batch_size / self.dataset_size

  @property
  def truncation(self) -> dict[str, int]:
    """How batches are cut; nothing where no batch can be too large."""
    if self.padded_size >= self.dataset_size:
      return {}
    return {
      'truncated_batch_size': self.padded_size,
      'dataset_size': self.dataset_size,
    }

  def event(self, steps: int) -> dp_accounting.DpEvent:
    """The event of the first ``steps`` steps.

    A batch that is cut makes records depend on each other, which plain
    Poisson accounting does not cover (arXiv:2508.15089).
    """
    return accounting.dpsgd_event(
      self.noise_multiplier,
      self.sampling_probability,
      steps,
      **self.truncation,
    )

  def epsilon(self, steps: int) -> float:
    """Spent by the first ``steps`` steps, at ``delta``, by PLD.

    Raises:
      ValueError: If ``delta`` is too small for the noise as it is drawn.
    """
    return accounting.epsilon(
      self.event(steps),
      self.delta,
      neighboring_relation=RELATION,
      entries=self._entries(steps),
    )

  def _entries(self, steps: int) -> int | None:
    """Entries that got noise; None for ideal noise."""
    return self.entries * steps if self.entries else None

  def statement(self, steps: int) -> str:
    """The library's sentence, as ``training.make_private`` states it."""
    text = accounting.privacy_statement(
      self.event(steps),
      self.delta,
      dataset_size=self.dataset_size,
      entries=self._entries(steps),
    )
    return f'{text}, unit: one record, {steps} of {self.steps} steps'


def round_up(epsilon: float, digits: int = 3) -> float:
  """Rounds to what is printed; never to less privacy loss than spent."""
  if not math.isfinite(epsilon):
    return epsilon
  return math.ceil(epsilon * 10**digits) / 10**digits


def calibrate(plan: Plan, target_epsilon: float) -> Plan:
  """Returns the plan with the least noise that meets ``target_epsilon``.

  With the noise as it is drawn.

  Args:
    plan: Its ``noise_multiplier`` is ignored.
    target_epsilon: Upper bound of ``epsilon(plan.steps)``.

  Raises:
    ValueError: If the target cannot be met.
  """
  return dataclasses.replace(
    plan,
    noise_multiplier=accounting.calibrate_noise_multiplier(
      target_epsilon,
      plan.delta,
      plan.sampling_probability,
      plan.steps,
      neighboring_relation=RELATION,
      entries=plan._entries(plan.steps),
      **plan.truncation,
    ),
  )
