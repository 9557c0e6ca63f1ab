"""What is known of a value of a step: public, clipped, private, ...

=========  ===================================================================
public     no record has touched it, or noise was added to what did
clipped    the sum of a clip, moved, added up or multiplied by what is public
entering   between a clipped sum and the end of its noise
drawn      depends on who was drawn, and on nothing that a record holds
private    anything else that a record has touched
=========  ===================================================================

An operation on private values gives a private value, whatever it is: zero
times a record counts as the record. So nothing has to be known of the
operations of a model, and what is not known is private.
"""

import dataclasses
import enum
from collections.abc import Sequence

import jax
from jax.extend import core

from prism_optax._proofs._equations import Site, named


class Kind(enum.IntEnum):
  """The labels above, public below all others and private above them."""

  PUBLIC = 0
  CLIPPED = 1
  ENTERING = 2
  DRAWN = 3
  PRIVATE = 4


@dataclasses.dataclass(frozen=True)
class Label:
  """What is known of one value.

  Attributes:
    kind: The label.
    direct: For the very output of a clip, untouched: the number of the clip and
      the position of the output.
    made: Where the equation is that made the value.
    lost: Where a clipped sum became private.
  """

  kind: Kind
  direct: tuple[int, int] | None = None
  made: 'Site | None' = dataclasses.field(default=None, compare=False)
  lost: 'Site | None' = dataclasses.field(default=None, compare=False)


PUBLIC = Label(Kind.PUBLIC)
DRAWN = Label(Kind.DRAWN)
PRIVATE = Label(Kind.PRIVATE)


# Operations that keep a sum a sum: by the positions of operands that may be
# clipped; all others must be public. None is any position.
_STRUCTURAL = frozenset({
  'add', 'add_any', 'all_gather', 'broadcast_in_dim', 'concatenate', 'copy',
  'copy_p', 'cumsum', 'expand_dims', 'imag', 'mesh_cast', 'neg', 'pad',
  'psum', 'psum_invariant', 'pvary', 'real', 'reduce_precision', 'reduce_sum',
  'reshape', 'reshard', 'rev', 'sharding_constraint', 'slice', 'split',
  'squeeze', 'stop_gradient', 'sub', 'transpose',
})  # fmt: skip
_POSITIONS = {
  'div': (0,), 'dynamic_slice': (0,), 'dynamic_update_slice': (0, 1),
  'gather': (0,), 'scatter': (0, 2), 'scatter-add': (0, 2),
}  # fmt: skip
_BILINEAR = frozenset({'conv_general_dilated', 'dot_general', 'mul'})


def join(*labels: Label) -> Label:
  """The label of a value that may be any of these."""
  top = max(labels, key=lambda x: x.kind)
  kinds = {x.kind for x in labels} - {Kind.PUBLIC}
  if len(kinds) <= 1:
    return moved(top)
  lost = next((x.lost for x in labels if x.lost is not None), None)
  made = next((x.made for x in labels if x.made is not None), None)
  return Label(Kind.PRIVATE, None, made, lost)


def moved(label: Label) -> Label:
  """The label of a part, or of several of these values."""
  return dataclasses.replace(label, direct=None)


def _may_be_clipped(equation: core.JaxprEqn, labels: Sequence[Label]) -> bool:
  """Whether an operation of clipped and public values keeps a sum a sum."""
  name = equation.primitive.name
  clipped = [i for i, x in enumerate(labels) if x.kind is Kind.CLIPPED]
  if name in _STRUCTURAL:
    return True
  if name == 'convert_element_type':
    return all(
      jax.numpy.issubdtype(getattr(x.aval, 'dtype', bool), jax.numpy.inexact)
      for x in (*equation.invars, *equation.outvars)
    )
  if name in _BILINEAR:
    return len(clipped) == 1
  if name == 'select_n':
    return 0 not in clipped
  return set(clipped) <= set(_POSITIONS.get(name, ()))


def result(site: Site, labels: Sequence[Label]) -> Label:
  """The label of what an operation makes of its operands."""
  kinds = {x.kind for x in labels} - {Kind.PUBLIC}
  if not kinds:
    return PUBLIC
  if kinds == {Kind.CLIPPED} and _may_be_clipped(site.equation, labels):
    return Label(Kind.CLIPPED, None, site)
  if kinds in ({Kind.ENTERING}, {Kind.DRAWN}):
    return Label(max(kinds), None, site)
  lost = next((x.lost for x in labels if x.lost is not None), None)
  if Kind.CLIPPED in kinds and lost is None:
    lost = site
  return Label(Kind.PRIVATE, None, site, lost)


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
    label.lost.equation.primitive.name, 'put the noise directly after the clip'
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
      ' directly after the clip, in the same step'
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
      'It is a clipped sum without noise: add the noise directly after the'
      ' clip, before anything is decided by it'
    )
  return (
    f'{named(site)}: {what} depends on records ({by(label)}), which its time'
    f' tells. {instead}'
  )
