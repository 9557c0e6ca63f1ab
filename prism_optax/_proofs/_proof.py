"""What an analysis of a program has found."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Proof:
  """A proof about a program, or the first offence against it.

  It is true if the proof holds. ``print`` shows all of it.

  Attributes:
    claim: What was to be proved, a sentence.
    offence: None, or the first equation for which the claim fails or is not
      known to hold: the primitive, its line in the source, and what to write
      instead.
    trace: What was looked at, a line each: how many equations of which
      primitives, and what enters and leaves.
    assumptions: What the proof rests on besides the program, a sentence each.
  """

  claim: str
  offence: str | None
  trace: tuple[str, ...] = ()
  assumptions: tuple[str, ...] = ()

  def __bool__(self) -> bool:
    return self.offence is None

  def __str__(self) -> str:
    verdict = 'proved' if self else 'not proved'
    lines = [f'{verdict}: {self.claim}']
    if self.offence is not None:
      lines.append(f'offence: {self.offence}')
    lines += [f'assumed: {x}' for x in self.assumptions]
    return '\n'.join([*lines, *self.trace])
