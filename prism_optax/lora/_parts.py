"""Transformations of stacked blocks, and chains of them on trees.

What the public transformations share: find the pairs, stack them, compute
their frames, unstack. A chain of parts does that once, however many they are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from prism_optax import _validate
from prism_optax.fixed_rank import Combination, Frame
from prism_optax.lora._adapters import Adapters
from prism_optax.lora._blocks import Blocks, multiply_out


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
    lazy: Whether ``update`` takes every ``fixed_rank.Combination`` as it is;
      other parts get it multiplied out. All may return some.
  """

  name: str
  init: Callable[[Adapters, Any], Any]
  update: Callable[..., tuple[Blocks, Any]]
  read: Callable[[Adapters, Any, Any], Blocks] = _read_coordinates
  write: Callable[[Adapters, Blocks, Any], Any] = _write_coordinates
  lazy: bool = False


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


def scaling_part(name: str, tx: optax.GradientTransformation) -> Part:
  """A transformation that multiplies by numbers of its own, on blocks.

  Args:
    name: For error messages.
    tx: Of optax: a learning rate or a schedule. What it multiplies by must not
      depend on what comes in, for it sees coefficients of it.

  Returns:
    The part.

  Example:
    >>> import optax
    >>> from prism_optax import lora
    >>> lora.scaling_part('scale', optax.scale(2.0)).lazy
    True
  """

  def init(adapters, params):
    return tx.init(adapters.coordinates(params))

  def update(blocks, state, point, **extra_args):
    del point, extra_args
    linear = [
      (x.weights, x.shift) if isinstance(x, Combination) else x
      for x in blocks.pairs
    ]
    scaled, state = tx.update(Blocks(tuple(linear), blocks.others), state)
    pairs = tuple(
      Combination(x.columns, x.inside, *new)
      if isinstance(x, Combination)
      else new
      for x, new in zip(blocks.pairs, scaled.pairs, strict=True)
    )
    return Blocks(pairs, scaled.others), state

  return Part(name, init, update, lazy=True)


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
    old_states = state if len(parts) > 1 else (state,)
    next_is_lazy = *(part.lazy for part in parts[1:]), False
    for part, old, lazy in zip(parts, old_states, next_is_lazy, strict=True):
      blocks, new = part.update(blocks, old, point, **extra_args)
      states.append(new)
      if not lazy:
        blocks = multiply_out(point.frames, blocks)
    updates = parts[-1].write(adapters, blocks, params)
    return updates, tuple(states) if len(parts) > 1 else states[0]

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
