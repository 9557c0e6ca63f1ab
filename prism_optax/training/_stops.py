"""Where a run may stop, and what epsilon is reported then.

A run that stops early because of what it has released is a composition whose
length depends on the releases. Epsilon of the steps done does not hold for it:
who stops when the noise has said the most has said more than that. Two claims
do hold. Epsilon of all planned steps, because a run that stops is a run to the
end of which a part is shown. And, with some possible stops that were fixed
beforehand, epsilon of the next of them at an equal share of delta
(docs/explanation/stops.md has the proof).
"""

from prism_optax import _validate

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
