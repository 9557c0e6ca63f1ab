"""What is wrong with a step, in sentences that say what to do instead."""

from prism_optax._proofs._kinds import Kind, Label
from prism_optax._proofs._sites import Site, named

# Whoever may see the data may see an output of such a name.
LOCAL = 'nonprivate_'

_INSTEAD_OF = {
  'div': 'divide by the expected batch size, a public constant, in the clip',
  'select_n': (
    'choose by public values alone, or bound each record inside of the clip'
  ),
}


class OffenceError(Exception):
  """The first offence, as a sentence."""


def by(label: Label) -> str:
  """Which equation made a value private."""
  site = label.made if label.lost is None else label.lost
  return 'an argument as it is' if site is None else named(site)


def of_noise(label: Label) -> str:
  """Why something may not enter noise."""
  if label.lost is None:
    return (
      f'{by(label)}: noise is added to what no clip bounds. Put a clip of this'
      ' package directly before the noise, or, for the sum of a clip of another'
      ' library, transforms.clipped_elsewhere'
    )
  instead = _INSTEAD_OF.get(
    label.lost.equation.primitive.name, 'put the noise directly behind the clip'
  )
  return (
    f'{named(label.lost)}: between the clip and its noise stands what may move'
    f' the sum by any amount when a record changes; {instead}'
  )


def of_output(label: Label, name: str) -> str:
  """Why something may not leave."""
  where = f'output{name} ' if name else 'the output '
  if label.kind is Kind.CLIPPED:
    return (
      f'{by(label)}: {where}holds a clipped sum without noise. Add the noise'
      ' directly behind the clip, in the same step'
    )
  return (
    f'{by(label)}: {where}depends on records, and no noise is added to it.'
    ' Leave it out, add noise to a clipped sum instead, or, if those who see it'
    f' may see the data, return it in a dict under a name that begins with'
    f' {LOCAL}'
  )


def of_decision(label: Label, site: Site, what: str) -> str:
  """Why something may not decide what is computed."""
  instead = (
    'Compute both and choose by jnp.where, inside of the clip; or loop a fixed'
    ' number of times'
  )
  if label.kind is Kind.CLIPPED or label.lost is not None:
    instead = (
      'It is a clipped sum without noise: add the noise directly behind the'
      ' clip, before anything is decided by it'
    )
  return (
    f'{named(site)}: {what} depends on records ({by(label)}), which its time'
    f' tells. {instead}'
  )
