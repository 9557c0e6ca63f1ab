"""The sum that a clip hands on: one value, taken by whoever needs it.

The noise asks for integers on the lattice of its own standard deviation,
everybody else asks for floats. The mark that an analysis of the program reads
(:mod:`prism_optax._proofs`) is made here, of the bounds that the clip has cut
to.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax import _exact_sum
from prism_optax._proofs import _marks
from prism_optax._types import ArrayTree, Scalar


class Bound(NamedTuple):
  """Leaves that are cut together.

  Attributes:
    leaves: Their positions in the tree.
    norm: The largest norm of one contribution to them, in the unit of the sum.
    matrices: How many parts of a leaf have this norm, each of them.
  """

  leaves: Sequence[int]
  norm: Scalar
  matrices: int = 1


class Aside(NamedTuple):
  """A number that is added up in the same pass, for noise of a known size.

  Attributes:
    bound: The largest size of one contribution.
    stddev: Of the noise.
  """

  bound: Scalar
  stddev: float


@dataclasses.dataclass(eq=False)
class ClippedSum:
  """The sum of bounded contributions, which is taken when somebody asks.

  Each question is a pass over the examples. While tracing, XLA removes a pass
  that nothing reads.

  Attributes:
    contribution: From one example to a tree of finite arrays, cut and divided;
      with ``aside`` to a pair of this tree and a number.
    examples: Tree of arrays (B, *shape), or ``LazyGradients``.
    is_padding_example: (B,), True for examples that are not there; or None.
    bounds: Of one contribution.
    aside: What is known of the number, if there is one.
    then: What is done to the sum before it is handed on.
  """

  contribution: Callable[[ArrayTree], ArrayTree]
  examples: ArrayTree
  is_padding_example: jax.Array | None
  bounds: Scalar | Sequence[Bound]
  aside: Aside | None = None
  then: Callable[[ArrayTree], ArrayTree] = lambda sums: sums
  _floats: ArrayTree = dataclasses.field(default=None, init=False)
  _number: ArrayTree = dataclasses.field(default=None, init=False)

  def on_lattice(self, stddev: Scalar | Sequence[Scalar]) -> ArrayTree:
    """The sum on the lattice of noise: exact, and in any order the same.

    Args:
      stddev: Of the noise of every entry, or one for each leaf. Without any
        noise there is no lattice: known zeros give floats.

    Returns:
      A tree of ``LatticeSum``.
    """
    stddevs = stddev if isinstance(stddev, Sequence) else [stddev]
    if all(_marks.known(s) == 0 for s in stddevs):
      return self.to_floats()

    def units(leaves: Sequence[ArrayTree]) -> list[jax.Array]:
      groups, stddevs = self._groups(len(leaves)), _each(stddev, len(leaves))
      norms = {i: group.norm for group in groups for i in group.leaves}
      return [
        _exact_sum.unit_of(s, norms[i], x.dtype)
        for i, (s, x) in enumerate(zip(stddevs, leaves, strict=True))
      ]

    return self.in_units(units, stddev)

  def to_floats(self) -> ArrayTree:
    """The sum as a tree of arrays, on a CPU rounded once."""
    if self._floats is None:
      self._floats = self.in_units(lambda leaves: [None] * len(leaves))
    return self._floats

  def in_units(
    self,
    units: Callable[[Sequence[ArrayTree]], Sequence[jax.Array | None]],
    stddev: Scalar | Sequence[Scalar] | None = None,
  ) -> ArrayTree:
    """The sum in units, from the shapes of the leaves to one for each leaf.

    ``stddev`` is of the noise whose lattice this is, for the mark.
    """
    aside = self.aside

    def all_units(shapes: ArrayTree) -> Sequence[ArrayTree]:
      if aside is None:
        return units(jax.tree.leaves(shapes))
      unit = _exact_sum.unit_of(aside.stddev, aside.bound, jnp.float32)
      return [*units(jax.tree.leaves(shapes[0])), unit]

    sums = _exact_sum.sum_of_examples(
      self.contribution, self.examples, self.is_padding_example, all_units
    )
    if aside is not None:
      sums, number = sums
      alone = [Bound((0,), aside.bound)]
      (self._number,) = self._marked([number], alone, aside.stddev)
    count = len(jax.tree.leaves(sums, is_leaf=_exact_sum.is_sum))
    return self.then(self._marked(sums, self._groups(count), stddev))

  def number(self) -> ArrayTree:
    """The sum of the numbers aside, a ``LatticeSum``."""
    if self._number is None:
      self.to_floats()
    return self._number

  def _groups(self, count: int) -> Sequence[Bound]:
    """The bounds of ``count`` leaves; one number is of all of them together."""
    if isinstance(self.bounds, Sequence):
      return self.bounds
    return [Bound(range(count), self.bounds)]

  def _marked(
    self,
    sums: ArrayTree,
    groups: Sequence[Bound],
    stddev: Scalar | Sequence[Scalar] | None,
  ) -> ArrayTree:
    """Marks a sum as one of a clip, for an analysis of the program.

    It reads there what one record can add, and compares it with the noise. The
    mark is compiled to nothing.
    """
    leaves, treedef = jax.tree.flatten(sums, is_leaf=_exact_sum.is_sum)
    known = [_marks.Group(tuple(i), _marks.known(c), k) for i, c, k in groups]
    lattice = [
      None if s is None else _marks.known(s) for s in _each(stddev, len(leaves))
    ]
    given = self.examples
    sealed = isinstance(given, _exact_sum.LazyGradients) and given.seal
    as_made = bool(sealed and sealed(given, self.is_padding_example))
    parts = [_exact_sum.parts(x) for x in leaves]
    what = _marks.Clip(
      tuple(known), tuple(lattice),
      with_padding=self.is_padding_example is not None, as_made=as_made,
    )  # fmt: skip
    marked = _marks.clipped(parts, what)
    return jax.tree.unflatten(
      treedef, map(_exact_sum.with_parts, leaves, marked)
    )


def afresh(x: ArrayTree) -> ArrayTree:
  """A :class:`ClippedSum` that nobody has asked yet; all else is itself.

  What it has answered belongs to the program that was traced then, perhaps to
  the body of a loop, and may not be kept longer.
  """
  return dataclasses.replace(x) if isinstance(x, ClippedSum) else x


def _each(stddev: ArrayTree, count: int) -> Sequence[ArrayTree]:
  return stddev if isinstance(stddev, Sequence) else [stddev] * count


@dataclasses.dataclass(frozen=True)
class Pending:
  """A part of a new state that is known when the sum has been taken."""

  settle: Callable[[], ArrayTree]


def settled(state: optax.OptState) -> ArrayTree:
  """The state without :class:`Pending`, of sums that have been taken."""
  return jax.tree.map(
    lambda x: x.settle() if isinstance(x, Pending) else x, state
  )
