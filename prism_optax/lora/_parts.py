"""Transformations of stacked blocks, and chains of them on trees.

What the public transformations share: find the pairs, stack them, compute
their frames, unstack. A chain of parts does that once, however many they are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from prism_optax import _validate
from prism_optax.fixed_rank import Frame
from prism_optax.lora._adapters import Adapters
from prism_optax.lora._blocks import Blocks


class Point(NamedTuple):
  """Where an update happens: the parameters and what follows from them.

  Attributes:
    adapters: Their modules.
    params: Tree of trainable arrays.
    frames: One stacked frame for each group of modules.
  """

  adapters: Adapters
  params: Any
  frames: tuple[Frame, ...]


def _read_coordinates(adapters: Adapters, updates: Any, params: Any) -> Blocks:
  del params
  return adapters.coordinates(updates)


def _write_coordinates(adapters: Adapters, blocks: Blocks, params: Any) -> Any:
  del params
  return adapters.tree(blocks)


class Part(NamedTuple):
  """One transformation of blocks.

  Attributes:
    name: For error messages.
    init: ``init(adapters, params) -> state``.
    update: ``update(blocks, state, point, **extra_args) -> (blocks, state)``.
    read: How a tree of updates becomes blocks where the part comes first.
    write: How blocks become a tree of updates where the part comes last.
  """

  name: str
  init: Callable[[Adapters, Any], Any]
  update: Callable[..., tuple[Blocks, Any]]
  read: Callable[[Adapters, Any, Any], Blocks] = _read_coordinates
  write: Callable[[Adapters, Blocks, Any], Any] = _write_coordinates


def stateless(adapters: Adapters, params: Any) -> optax.EmptyState:
  """The ``init`` of a part without state.

  Args:
    adapters: Not used.
    params: Not used.

  Returns:
    ``optax.EmptyState()``

  Example:
    >>> from prism_optax import lora
    >>> lora.stateless(None, None)
    EmptyState()
  """
  del adapters, params
  return optax.EmptyState()


def part_from_optax(name: str, tx: optax.GradientTransformation) -> Part:
  """A transformation that needs no parameters, such as a scaling, on blocks.

  Args:
    name: For error messages.
    tx: Of optax. It must commute with rotations of the rank index and keep no
      memory of coordinates: see :func:`prism_optax.retract`.

  Returns:
    The part.

  Example:
    >>> import optax
    >>> from prism_optax import lora
    >>> lora.part_from_optax('scale', optax.scale(2.0)).name
    'scale'
  """

  def init(adapters, params):
    return tx.init(adapters.coordinates(params))

  def update(blocks, state, point, **extra_args):
    del point, extra_args
    return tx.update(blocks, state)

  return Part(name, init, update)


def chain_parts(
  *parts: Part, layout: Any = None
) -> optax.GradientTransformationExtraArgs:
  """One transformation on trees in the shapes of the parameters.

  Args:
    *parts: At least one; blocks go through them in this order.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    Its state is that of the part, or a tuple of those of several parts.

  Raises:
    ValueError: In ``init``, if no pair is found or both factors of a module are
      zero; in ``update``, without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from prism_optax import lora
    >>> params = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> tx = lora.chain_parts(lora.part_from_optax('scale', optax.scale(2.0)))
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> updates['lora_b'].tolist()
    [[2.0, 2.0]]
  """

  def init_fn(params):
    adapters = Adapters(params, layout)
    adapters.check_observable(params)
    states = tuple(part.init(adapters, params) for part in parts)
    return states if len(parts) > 1 else states[0]

  def update_fn(updates, state, params=None, **extra_args):
    _validate.params_given(parts[0].name, params)
    adapters = Adapters(params, layout)
    point = Point(adapters, params, adapters.frames(params))
    blocks = parts[0].read(adapters, updates, params)
    states = []
    for part, old in zip(
      parts, state if len(parts) > 1 else (state,), strict=True
    ):
      blocks, new = part.update(blocks, old, point, **extra_args)
      states.append(new)
    updates = parts[-1].write(adapters, blocks, params)
    return updates, tuple(states) if len(parts) > 1 else states[0]

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
