"""Marks in a program: here a sum was clipped, here it gets its noise.

They are identities. They are compiled to nothing, and only an analysis of the
program sees them (:mod:`prism_optax._proofs._release`). Each is one equation
for all arrays of one call, so that one call is told from another.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.extend import core
from jax.interpreters import ad, batching, mlir

from prism_optax._types import Scalar


class Group(NamedTuple):
  """Leaves that are clipped together.

  Attributes:
    leaves: Their positions in the tree.
    bound: The largest norm that one record has in these leaves together, in
      the unit of the sum; None where it is not known.
    matrices: How many parts of a leaf have this bound, each of them.
  """

  leaves: tuple[int, ...]
  bound: float | None
  matrices: int


class Clip(NamedTuple):
  """What is known of a clip.

  Attributes:
    groups: What is clipped together; each leaf is in one group.
    lattice: For each leaf the standard deviation of the noise whose lattice
      the sum is on; None for floats, or where it is not known.
    declared: Whether the clip is another library's, and only declared.
    with_padding: Whether it is told which rows are padding.
    as_made: Whether it gets the gradients and the padding that a training has
      made, as they are. What changes gradients before the clip may mix records;
      a row of padding that it does not know of counts as a record.
  """

  groups: tuple[Group, ...]
  lattice: tuple[float | None, ...]
  declared: bool = False
  with_padding: bool = False
  as_made: bool = False


class Noise(NamedTuple):
  """What is known of noise.

  Attributes:
    stddevs: For each leaf the standard deviation of the noise of an entry;
      None where it is not known.
    declared: Whether the noise is another library's, and only declared.
    with_digest: Whether its key depends on a digest of what is released.
  """

  stddevs: tuple[float | None, ...]
  declared: bool = False
  with_digest: bool = False


# The arrays of a leaf: one, or the halves of exact noise.
Leaf: TypeAlias = tuple[jax.Array, ...]


def known(x: Scalar) -> float | None:
  """A number as a float, or None if it is traced."""
  return None if isinstance(x, jax.core.Tracer) else float(np.asarray(x))


def _identity(name: str) -> core.Primitive:
  """A primitive of many arrays that are handed on as they are."""
  mark = core.Primitive(name)
  mark.multiple_results = True
  mark.def_impl(lambda *arrays, **_: list(arrays))
  mark.def_abstract_eval(lambda *avals, **_: list(avals))
  mlir.register_lowering(mark, lambda context, *arrays, **_: list(arrays))

  def batched(
    arrays: Leaf,
    axes: tuple[int | None, ...],
    *,
    what: Clip | Noise,
    leaves: tuple[int, ...],
  ) -> tuple[list[jax.Array], tuple[int | None, ...]]:
    # How many copies there are, and whether one record is in all of them, is
    # not known here.
    return mark.bind(*arrays, what=_unknown(what), leaves=leaves), axes

  def differentiated(
    arrays: Leaf, tangents: Leaf, **what: object
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    # A derivative is as private as it was without the mark.
    return mark.bind(*arrays, **what), list(tangents)

  batching.primitive_batchers[mark] = batched
  ad.primitive_jvps[mark] = differentiated
  return mark


def _unknown(what: Clip | Noise) -> Clip | Noise:
  """The same without any number."""
  if isinstance(what, Noise):
    return what._replace(stddevs=(None,) * len(what.stddevs))
  return what._replace(
    groups=tuple(x._replace(bound=None) for x in what.groups),
    lattice=(None,) * len(what.lattice),
  )


clipped_p = _identity('clipped')
noise_enters_p = _identity('noise_enters')
released_p = _identity('released')


def _bound(
  mark: core.Primitive, leaves: Sequence[Leaf], what: Clip | Noise
) -> list[Leaf]:
  """Binds a mark to the arrays of some leaves."""
  places = tuple(i for i, leaf in enumerate(leaves) for _ in leaf)
  arrays = iter(
    mark.bind(*(x for leaf in leaves for x in leaf), what=what, leaves=places)
  )
  return [tuple(next(arrays) for _ in leaf) for leaf in leaves]


def clipped(leaves: Sequence[Leaf], what: Clip) -> list[Leaf]:
  """Marks the sum that a clip returns."""
  return _bound(clipped_p, leaves, what)


def noise_enters(leaves: Sequence[Leaf], what: Noise) -> list[Leaf]:
  """Marks what gets noise."""
  return _bound(noise_enters_p, leaves, what)


def released(leaves: Sequence[Leaf], what: Noise) -> list[Leaf]:
  """Marks what has got its noise."""
  return _bound(released_p, leaves, what)
