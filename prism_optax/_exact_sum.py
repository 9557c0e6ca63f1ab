"""The sum over examples, exact: integers on the lattice of their noise.

An addition of floats rounds, so a sum of them depends on its order. Here each
contribution is brought to a lattice first, towards zero, and integers are
added. The distance of lattice points is a share of the standard deviation of
the noise (:mod:`prism_optax._lattice`), which adds its own integers to the sum.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax._types import ArrayTree, DTypeLike, Scalar

# Of the lattice in one standard deviation of the noise: 224 cells of 2^12.
STEPS = 224 << 12

# Sums are kept as two integers of 32 bits, of which the lower one takes 14 bits
# of each term. It must hold the noise, too, which is below 2^24.
LIMB_BITS = 14
LIMB = 1 << LIMB_BITS
MOST_TERMS = 2**17 - 2**11


class LatticeSum(NamedTuple):
  """The numbers ``(2^14 high + low) unit``.

  Attributes:
    high: int32, or whole numbers as floats.
    low: int32, from 0 to 2^14 in one term of a sum.
    unit: Distance of lattice points, a scalar of the type of the numbers.
  """

  high: jax.Array
  low: jax.Array
  unit: jax.Array


def parts(x: jax.Array | LatticeSum) -> tuple[jax.Array, ...]:
  """The arrays of a leaf that come from records."""
  return (x.high, x.low) if isinstance(x, LatticeSum) else (x,)


def with_parts(
  x: jax.Array | LatticeSum, arrays: Sequence[jax.Array]
) -> jax.Array | LatticeSum:
  """The leaf with other arrays in the place of its :func:`parts`."""
  if isinstance(x, LatticeSum):
    high, low = arrays
    return LatticeSum(high, low, x.unit)
  return arrays[0]


def is_sum(x: object) -> bool:
  """Whether a node of a tree is a leaf: numbers on a lattice."""
  return isinstance(x, LatticeSum)


def integers_of(x: LatticeSum) -> np.ndarray:
  """What the numbers are in their unit, in 64 bits."""
  high, low = (np.asarray(y, np.int64) for y in (x.high, x.low))
  return high * LIMB + low


def unit_of(stddev: Scalar, largest: Scalar, dtype: DTypeLike) -> jax.Array:
  """The distance of lattice points for noise of a stddev.

  Args:
    stddev: Of the noise; where it is zero, the lattice is fine.
    largest: The size of what is to lie on the lattice.
    dtype: Type of the numbers.
  """
  stddev, largest = (jnp.asarray(x, dtype) for x in (stddev, largest))
  # Without a quotient, as in towards_zero.
  return jnp.where(stddev > 0, stddev * (1 / STEPS), largest * 2.0**-28)


# Traced once for each shape: a model has many leaves of few shapes.
@functools.partial(jax.jit, inline=True)
def towards_zero(x: jax.Array, unit: jax.Array) -> LatticeSum:
  """The next lattice points on the side of zero, so no array gets longer.

  ``high`` has the type of ``x``, and is NaN where ``x`` is not finite.
  """
  # Not x / unit: XLA rounds quotients of one program otherwise than of another.
  # What overflows would leave no remainder to speak of.
  steps = jnp.clip(jnp.trunc(x * (1 / unit)), -(2.0**100), 2.0**100)
  high = jnp.floor(steps / LIMB)
  return LatticeSum(high, (steps - high * LIMB).astype(jnp.int32), unit)


def term(x: jax.Array, unit: jax.Array, terms: int) -> LatticeSum:
  """:func:`towards_zero` of finite entries, as one of ``terms`` terms.

  Entries above ``2^45 / terms`` units are cut to this size, so that the sum
  does not overflow.

  Raises:
    ValueError: For too many terms.
  """
  if terms > MOST_TERMS:
    raise ValueError(
      f'Expected at most {MOST_TERMS} examples in one sum, got {terms}: add up'
      ' micro-batches.'
    )
  high, low, unit = towards_zero(x, unit)
  most = (2**31 - 2**18) // max(terms, 1)
  return LatticeSum(jnp.clip(high, -most, most).astype(jnp.int32), low, unit)


def from_integers(total: np.ndarray, unit: jax.typing.ArrayLike) -> LatticeSum:
  """Sums of integers of 64 bits, cut to 45, which hold any sum of terms."""
  total = np.clip(total, -(2**44), 2**44)
  high, low = total >> LIMB_BITS, total & (LIMB - 1)
  return LatticeSum(
    jnp.asarray(high, jnp.int32), jnp.asarray(low, jnp.int32), jnp.asarray(unit)
  )


class LazyGradients(NamedTuple):
  """Per-example gradients that a clip computes itself, part by part.

  A clip takes it in place of a tree of gradients.

  Attributes:
    examples: Tree of arrays (B, ...).
    gradients: From examples (b, ...) to their gradients, leaves (b, *shape).
    microbatch_size: b, a divisor of B; None for all at once.
    skip_padding: Whether parts of padding alone are passed over. How long it
      takes then tells how many examples there are.
    seal: Whether these, and padding that is given with them, are as a training
      has made them; None if no training has.
  """

  examples: ArrayTree
  gradients: Callable[[ArrayTree], ArrayTree]
  microbatch_size: int | None = None
  skip_padding: bool = False
  seal: Callable[['LazyGradients', jax.Array | None], bool] | None = None

  @property
  def shapes(self) -> ArrayTree:
    """The shapes of all gradients, (B, *shape)."""
    return jax.eval_shape(self.gradients, self.examples)


_TwoParts: TypeAlias = tuple[jax.Array, jax.Array]


def _add_float(total: _TwoParts, more: _TwoParts) -> _TwoParts:
  """Adds sums, and what rounding has lost of each and now (Knuth 1969)."""
  (old, lost), (x, lost_of_x) = total, more
  new = old + x
  part = new - old
  return new, lost + lost_of_x + ((old - (new - part)) + (x - part))


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
  examples, gradients, microbatch_size, skip_padding, _ = examples
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
      else tuple(term(x, unit, batch)[:2])
      for x, unit in zip(leaves, unit_of, strict=True)
    ]

  zeros = [
    (jnp.zeros(x.shape, x.dtype if unit is None else jnp.int32),) * 2
    for x, unit in zip(jax.tree.leaves(shapes), unit_of, strict=True)
  ]

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
    high + low if unit is None else LatticeSum(high, low, unit)
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
