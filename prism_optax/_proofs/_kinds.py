"""What is known of a value of a step: public, clipped, private, ...

=========  ===================================================================
public     no record has touched it, or noise was added to what did
clipped    a clip's sum, moved, added up or multiplied by what is public
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

from prism_optax._proofs._sites import Site


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
    same = all(x.direct == top.direct for x in labels)
    return top if same else dataclasses.replace(top, direct=None)
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
