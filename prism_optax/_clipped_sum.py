"""The sum that a clip hands on: one value, taken by whoever needs it.

The noise asks for integers on the lattice of its own standard deviation,
everybody else asks for floats. The mark that an analysis of the program reads
(:mod:`prism_optax._proofs`) is made here, of the bounds that the clip has cut
to.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax

from prism_optax import _lattice
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


class LazyGradients(NamedTuple):
  """Per-example gradients that a clip computes itself, part by part.

  A clip takes it in place of a tree of gradients.

  Attributes:
    examples: Tree of arrays (B, ...).
    gradients: From examples (b, ...) to their gradients, leaves (b, *shape).
    microbatch_size: b, a divisor of B; None for all at once.
    skip_padding: Whether parts of padding alone are passed over. How long it
      takes then tells how many examples there are.
  """

  examples: ArrayTree
  gradients: Callable[[ArrayTree], ArrayTree]
  microbatch_size: int | None = None
  skip_padding: bool = False

  @property
  def shapes(self) -> ArrayTree:
    """The shapes of all gradients, (B, *shape)."""
    return jax.eval_shape(self.gradients, self.examples)


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
        _lattice.unit_of(s, norms[i], x.dtype)
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
      unit = _lattice.unit_of(aside.stddev, aside.bound, jnp.float32)
      return [*units(jax.tree.leaves(shapes[0])), unit]

    sums = sum_of_examples(
      self.contribution, self.examples, self.is_padding_example, all_units
    )
    if aside is not None:
      sums, number = sums
      alone = [Bound((0,), aside.bound)]
      (self._number,) = _marked([number], alone, aside.stddev)
    count = len(jax.tree.leaves(sums, is_leaf=_lattice.is_sum))
    return self.then(_marked(sums, self._groups(count), stddev))

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


def afresh(x: ArrayTree) -> ArrayTree:
  """A :class:`ClippedSum` that nobody has asked yet; all else is itself.

  What it has answered belongs to the program that was traced then, perhaps to
  the body of a loop, and may not be kept longer.
  """
  return dataclasses.replace(x) if isinstance(x, ClippedSum) else x


def _each(stddev: ArrayTree, count: int) -> Sequence[ArrayTree]:
  return stddev if isinstance(stddev, Sequence) else [stddev] * count


def _marked(
  sums: ArrayTree,
  groups: Sequence[Bound],
  stddev: Scalar | Sequence[Scalar] | None,
) -> ArrayTree:
  """Marks a sum as one of a clip, for an analysis of the program.

  It reads there what one record can add, and compares it with the noise. The
  mark is compiled to nothing.
  """
  leaves, treedef = jax.tree.flatten(sums, is_leaf=_lattice.is_sum)
  known = [_marks.Group(tuple(i), _marks.known(c), k) for i, c, k in groups]
  lattice = [
    None if s is None else _marks.known(s) for s in _each(stddev, len(leaves))
  ]
  parts = [_lattice.parts(x) for x in leaves]
  what = _marks.Clip(tuple(known), tuple(lattice))
  marked = _marks.clipped(parts, what)
  return jax.tree.unflatten(treedef, map(_lattice.with_parts, leaves, marked))


@dataclasses.dataclass(frozen=True)
class Pending:
  """A part of a new state that is known when the sum has been taken."""

  settle: Callable[[], ArrayTree]


def settled(state: optax.OptState) -> ArrayTree:
  """The state without :class:`Pending`, of sums that have been taken."""
  return jax.tree.map(
    lambda x: x.settle() if isinstance(x, Pending) else x, state
  )


_TwoParts: TypeAlias = tuple[jax.Array, jax.Array]


def _add_float(total: _TwoParts, more: _TwoParts) -> _TwoParts:
  """Adds to a sum and to what rounding has lost of it (Knuth 1969)."""
  (old, lost), (x, _) = total, more
  new = old + x
  part = new - old
  return new, lost + ((old - (new - part)) + (x - part))


def _add_integers(total: _TwoParts, more: _TwoParts) -> _TwoParts:
  return total[0] + more[0], total[1] + more[1]


def sum_of_examples(
  contribution: Callable[[ArrayTree], ArrayTree],
  examples: ArrayTree | LazyGradients,
  is_padding_example: jax.Array | None,
  units: Callable[[ArrayTree], Sequence[jax.Array | None]] | None = None,
) -> ArrayTree:
  """The sum over examples of what each of them contributes.

  With a unit each contribution is brought to a lattice first, towards zero, and
  integers are added: the sum does not depend on the order of the examples, and
  no contribution gets longer. Without, floats are added, on a CPU with
  compensation, so that the sum is rounded once.

  Under ``jit`` on one CPU the contributions are computed one after the other:
  what one of them is cannot depend on the others, and no array holds what is
  computed of all of them. Elsewhere they are computed side by side.

  Args:
    contribution: From one example to a tree of finite arrays.
    examples: Tree of arrays (B, *shape); or gradients that are computed here.
    is_padding_example: (B,), True for examples that are not there; or None.
    units: From the shapes of a contribution to the units of the lattice: for
      each of its arrays, in their order, a scalar of its type, or None. None
      for floats alone.

  Returns:
    A tree like a contribution, of arrays or of ``LatticeSum``.

  Raises:
    ValueError: If ``is_padding_example`` has another shape, or the size of the
      micro-batches does not divide that of the batch.
  """
  if not isinstance(examples, LazyGradients):
    examples = LazyGradients(examples, lambda gradients: gradients)
  examples, gradients, microbatch_size, skip_padding = examples
  batch = len(jax.tree.leaves(examples)[0])
  if is_padding_example is not None:
    is_padding_example = jnp.asarray(is_padding_example, bool)
    if is_padding_example.shape != (batch,):
      raise ValueError(
        'Expected is_padding_example to have one entry per example,'
        f' {(batch,)}, got {is_padding_example.shape}.'
      )
  inputs = examples, is_padding_example
  all_of_them = jax.eval_shape(gradients, examples), inputs[1]
  one = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), all_of_them
  )
  shapes: ArrayTree = jax.eval_shape(contribution, one[0])
  treedef: jax.tree_util.PyTreeDef = jax.tree.structure(shapes)
  unit_of = [None] * treedef.num_leaves if units is None else units(shapes)

  def add(totals, more):
    return [
      (_add_float if unit is None else _add_integers)(x, y)
      for x, y, unit in zip(totals, more, unit_of, strict=True)
    ]

  def terms(inputs):
    example, is_padding = inputs
    leaves: list[jax.Array] = jax.tree.leaves(contribution(example))
    if is_padding is not None:
      leaves = [jnp.where(is_padding, 0, x) for x in leaves]
    return [
      (x, jnp.zeros_like(x))
      if unit is None
      else tuple(_lattice.term(x, unit, batch)[:2])
      for x, unit in zip(leaves, unit_of, strict=True)
    ]

  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(terms, one)
  )

  def in_turn(inputs):
    def add_one(totals, inputs):
      return add(totals, terms(inputs)), None

    return jax.lax.scan(add_one, zeros, inputs)[0]

  def at_once(inputs):
    return jax.tree.map(
      lambda x: jnp.sum(x, 0, dtype=x.dtype), jax.vmap(terms)(inputs)
    )

  # Where several devices may share the batch, XLA decides how to sum. Outside
  # of jit a loop would be compiled at every call, and no loop goes along an
  # explicit axis of a mesh.
  leaves: list[ArrayTree] = jax.tree.leaves(inputs)
  traced = any(isinstance(x, jax.core.Tracer) for x in leaves)
  explicit = any(any(jax.typeof(x).sharding.spec[:1]) for x in leaves)
  alone = jax.device_count() == 1 and not explicit

  def sums_of(inputs):
    examples, is_padding = inputs
    inputs = gradients(examples), is_padding
    if not traced:
      return at_once(inputs)
    one_by_one = in_turn if alone else at_once
    return jax.lax.platform_dependent(inputs, cpu=one_by_one, default=at_once)

  def add_part(totals, part):
    def added():
      return add(totals, sums_of(part))

    if not skip_padding or part[1] is None:
      return added(), None
    return jax.lax.cond(jnp.all(part[1]), lambda: totals, added), None

  if microbatch_size is None or microbatch_size >= batch:
    sums = sums_of(inputs)
  else:
    sums = jax.lax.scan(add_part, zeros, _parts(inputs, microbatch_size))[0]
  out = [
    high + low if unit is None else _lattice.LatticeSum(high, low, unit)
    for (high, low), unit in zip(sums, unit_of, strict=True)
  ]
  return jax.tree.unflatten(treedef, out)


def _parts(inputs: ArrayTree, size: int) -> ArrayTree:
  """Leaves (B, ...) as (B / size, size, ...), part k every so-many-th row.

  So each device of a sharded batch has its share of every part.
  """

  def split(x: jax.Array) -> jax.Array:
    if len(x) % size:
      raise ValueError(
        'Expected microbatch_size to divide the size of the padded batch,'
        f' {len(x)}, got microbatch_size={size}.'
      )
    return jnp.moveaxis(x.reshape(size, -1, *x.shape[1:]), 0, 1)

  return jax.tree.map(split, inputs)
