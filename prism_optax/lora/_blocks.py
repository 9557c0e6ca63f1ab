"""Stacked arrays of all modules, and functions of them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from prism_optax import fixed_rank
from prism_optax.fixed_rank import Frame
from prism_optax.lora._layout import Unit


class Blocks(NamedTuple):
  """A tree, taken apart: pairs by shape, and the other leaves as they are.

  Attributes:
    pairs: For each distinct shape and type of module a pair of arrays
      ``(*lead, k, m, r)``, ``(*lead, k, n, r)``: ``fixed_rank.Tangent`` or
      ``fixed_rank.Factors``.
    others: The leaves that belong to no pair, ``(*lead, *shape)``.
  """

  pairs: tuple[Any, ...]
  others: tuple[jax.Array, ...]


class ModuleArrays(NamedTuple):
  """The leaves of one module, as they lie.

  Attributes:
    place: Its slice of the stack of its group.
    scale: Of its layout.
    left: (*lead, s, *features and rank), s matrices.
    right: Likewise.
    left_unit: Shape of one matrix in ``left``, and its rank axis.
    right_unit: Likewise.
  """

  place: slice
  scale: float
  left: jax.Array
  right: jax.Array
  left_unit: Unit
  right_unit: Unit


def map_pairs(fn, *blocks: Sequence[Any]) -> tuple[Any, ...]:
  """Applies a function to the pairs (frames, tangents, ...) of each group.

  Args:
    fn: Of one pair, or of one of each of ``blocks``.
    *blocks: Sequences with one entry for each group of modules.

  Returns:
    A tuple of what ``fn`` gives.

  Example:
    >>> from prism_optax import lora
    >>> lora.map_pairs(lambda x, y: x + y, (1, 2), (10, 20))
    (11, 22)
  """
  return tuple(fn(*args) for args in zip(*blocks, strict=True))


def multiply_out(frames: Sequence[Frame], blocks: Blocks) -> Blocks:
  """Blocks with every ``fixed_rank.Combination`` multiplied out.

  Args:
    frames: From :meth:`Adapters.frames`.
    blocks: Pairs of any kind; those of another kind stay as they are.

  Returns:
    The blocks.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank, lora
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> adapters = lora.Adapters(params)
    >>> frames, x = adapters.frames(params), adapters.coordinates(params)
    >>> lazy = lora.map_pairs(fixed_rank.projection, frames, x.pairs)
    >>> out = lora.multiply_out(frames, lora.Blocks(lazy, ()))
    >>> out.pairs[0].left.ravel().tolist()
    [0.0, 0.0]
  """
  pairs = map_pairs(
    lambda frame, x: (
      fixed_rank.multiply_out(frame, x)
      if isinstance(x, fixed_rank.Combination)
      else x
    ),
    frames,
    blocks.pairs,
  )
  return Blocks(pairs, blocks.others)


def to_coordinates(frames: Sequence[Frame], gradients: Blocks) -> Blocks:
  """Gradients of the factors in tangent coordinates; other leaves as they are.

  PRISM's projection (arXiv:2606.00944, Eq. 13), see
  :func:`prism_optax.fixed_rank.tangent_from_gradients`.

  Args:
    frames: From :meth:`Adapters.frames`.
    gradients: From :meth:`Adapters.gradients`; they may carry a leading batch
      axis.

  Returns:
    Pairs of ``Tangent`` in the shapes of the gradients.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'lora_a': 2 * jnp.eye(3, 1), 'lora_b': 4 * jnp.eye(1, 2)}
    >>> adapters = lora.Adapters(params)
    >>> gradients = adapters.gradients({
    ...   'lora_a': jnp.eye(3, 1), 'lora_b': jnp.array([[0.0, 6.0]])})
    >>> x = lora.to_coordinates(adapters.frames(params), gradients).pairs[0]
    >>> x.left.ravel().tolist(), x.right.ravel().tolist()
    ([0.0, 3.0], [0.25, 0.0, 0.0])
  """
  pairs = map_pairs(fixed_rank.tangent_from_gradients, frames, gradients.pairs)
  return Blocks(pairs, gradients.others)
