"""LoRA adapters for a Flax NNX model that has none."""

import difflib
import functools
import math
import re
from types import ModuleType
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from prism_optax import _validate
from prism_optax._types import DTypeLike
from prism_optax.lora._initialization import orthonormal

Model = TypeVar('Model')  # An nnx.Module: flax is not always installed.


def add_adapters(
  model: Model, pattern: str, rank: int, *, rngs: Any
) -> tuple[Model, type]:
  """Puts LoRA adapters on linear layers of a Flax NNX model.

  This corresponds to ``peft.get_peft_model`` with ``target_modules`` in
  PyTorch. The model is changed in place: kernels, biases, paths and all
  references to a layer stay as they are, and each chosen layer gets an
  ``nnx.LoRA`` under the name ``lora``. Needs the package ``flax``. ::

    model, adapters = lora.add_adapters(model, 'query|value', 8, rngs=rngs)
    graph, params, frozen = nnx.split(model, adapters, ...)

  The columns of ``lora_a`` are orthonormal and ``lora_b`` is zero, as with
  :func:`initialize`, so that the model computes the same function as before.
  Factors are float32 and are multiplied in the type of the layer. There is no
  alpha: the scale is 1. No data is read.

  ================================  ==========================================
  ``nnx.Linear``                    becomes an ``nnx.LoRALinear``
  ``nnx.LinearGeneral``             (attention) gets an adapter if it works on
                                    the last axes: features are flattened
  under ``nnx.vmap``, ``nnx.scan``  one adapter for each of the stacked layers
  other layers with a kernel        ValueError if the pattern chooses one, as
                                    for a subclass or a layer with adapters
  layers without a kernel           pass, whether or not they are chosen
  nothing chosen                    ValueError that shows the nearest paths
  no linear layer at all            ValueError
  ================================  ==========================================

  Args:
    model: An ``nnx.Module``.
    pattern: Regular expression of the paths of the layers, '/' between names:
      it matches a whole path or the end of one, from a whole name on. A layer
      that is shared has the first of its paths, as in ``nnx.state``.
      ``'query|value'`` is every layer of these names,
      ``'layers/[0-3]/.*'`` all in the first four layers.
    rank: Rank of the adapters, at most the inputs and outputs of each layer.
    rngs: An ``nnx.Rngs``, whose key need not be secret and must not be the key
      of any noise.

  Returns:
    The model, and the filter of its trainable variables, ``nnx.LoRAParam``, for
    ``nnx.split`` and ``nnx.Optimizer(wrt=...)``. With a head to be trained as
    well it is ``nnx.Any(adapters, nnx.PathContains('head'))``.

  Raises:
    ValueError: As in the table; for a model that is no ``nnx.Module``, a
      pattern that is no regular expression, or a rank that is too large. The
      model is as it was then.
    ImportError: Without ``flax``.

  Example:
    >>> from flax import nnx
    >>> from prism_optax import lora
    >>> model = nnx.MultiHeadAttention(2, 6, decode=False, rngs=nnx.Rngs(0))
    >>> model, adapters = lora.add_adapters(
    ...   model, 'query|out', 2, rngs=nnx.Rngs(1))
    >>> print(lora.describe_pairs(nnx.state(model, adapters)))
    module      right (n, r)  left (m, r)  stack  scale
    out/lora    6 x 2         6 x 2        ()     1
    query/lora  6 x 2         6 x 2        ()     1
    other trainable leaves: none
  """
  nnx = _nnx()
  _validate.integer('rank', rank, 1)
  if not isinstance(model, nnx.Module):
    raise ValueError(
      f'Expected model to be an nnx.Module, got {type(model).__name__}. For'
      ' Flax linen use qwix.apply_lora_to_model.'
    )
  if not isinstance(rngs, nnx.Rngs):
    raise ValueError(
      'Expected rngs to be an nnx.Rngs, such as nnx.Rngs(0), got'
      f' {type(rngs).__name__}.'
    )
  if not isinstance(pattern, str):
    raise ValueError(
      "Expected pattern to be a string, such as 'query|value', got"
      f' {pattern!r}.'
    )
  try:
    expression = re.compile(rf'(.*/)?({pattern})')
  except re.error as error:
    raise ValueError(
      f'Expected pattern to be a regular expression, got {pattern!r}: {error}.'
    ) from error
  layers = {
    '/'.join(map(str, path)): layer
    for path, layer in nnx.iter_modules(model)
    if hasattr(layer, 'kernel')
  }
  chosen = {k: v for k, v in layers.items() if expression.fullmatch(k)}
  if not chosen:
    paths = [k for k, v in layers.items() if type(v) in _adapted()]
    if not paths:
      raise ValueError(
        f'{type(model).__name__} has no nnx.Linear and no nnx.LinearGeneral'
        ' without adapters. For other layers use qwix.apply_lora_to_model.'
      )
    near = difflib.get_close_matches(pattern, paths, 8, 0)
    raise ValueError(
      f'pattern={pattern!r} matches the path of no linear layer; the nearest of'
      f' {len(paths)} are {near}.'
    )
  sizes = {path: _sizes(layer, path) for path, layer in chosen.items()}
  for path, (_, n, m) in sizes.items():
    if rank > min(n, m):
      raise ValueError(
        f'Expected rank <= min(in, out), got {rank=}, in={n}, out={m} for'
        f' {path!r}.'
      )
  for path, layer in chosen.items():
    adapter = _adapter(layer, sizes[path], rank, rngs)
    # In place, since the same layer may stand in several places of a model; and
    # past flax, which would keep the class as an attribute.
    object.__setattr__(layer, '__class__', _adapted()[type(layer)])
    layer.lora = adapter
  return model, nnx.LoRAParam


def _nnx() -> ModuleType:
  try:
    from flax import nnx
  except ImportError as error:
    raise ImportError(
      'lora.add_adapters changes Flax NNX models: pip install flax.'
    ) from error
  return nnx


@functools.cache  # One class: a jitted function knows a model by its classes.
def _adapted() -> dict[type, type]:
  """From the class of a layer to the class with an adapter."""
  nnx = _nnx()

  class LoRALinearGeneral(nnx.LinearGeneral):  # type: ignore[misc,name-defined]
    """An ``nnx.LinearGeneral`` on the last axes, with an adapter ``lora``."""

    def __call__(
      self, inputs: jax.Array, *args: object, **kwargs: object
    ) -> jax.Array:
      out: jax.Array = super().__call__(inputs, *args, **kwargs)
      lead = inputs.shape[: inputs.ndim - len(self.axis)]
      flat = inputs.reshape(*lead, math.prod(self.in_features))
      change: jax.Array = self.lora(flat).reshape(out.shape)
      return out + change

  return {nnx.Linear: nnx.LoRALinear, nnx.LinearGeneral: LoRALinearGeneral}


def _sizes(layer: Any, path: str) -> tuple[tuple[int, ...], int, int]:
  """Stack axes, inputs and outputs of a layer that can have an adapter."""
  if type(layer) not in _adapted():
    raise ValueError(
      f'pattern matches {path!r}, of type {type(layer).__name__}: adapters can'
      ' be added to nnx.Linear and nnx.LinearGeneral. Let the pattern leave it'
      ' out, or write the adapter into the model.'
    )
  axes = getattr(layer, 'axis', (-1,))
  batch_axes = dict(getattr(layer, 'batch_axis', {}))
  if tuple(axes) != tuple(range(-len(axes), 0)) or batch_axes:
    raise ValueError(
      f'Expected {path!r} to work on the last axes of its input, got'
      f' axis={axes}, batch_axis={batch_axes}.'
    )
  ins, outs = (
    x if isinstance(x, tuple) else (x,)
    for x in (layer.in_features, layer.out_features)
  )
  shape, own = layer.kernel.shape, (*ins, *outs)
  count = len(shape) - len(own)
  if count < 0 or shape[count:] != own:
    raise ValueError(
      f'Expected a kernel (*stack, *in, *out) with in, out = {ins}, {outs} at'
      f' {path!r}, got {shape}.'
    )
  return shape[:count], math.prod(ins), math.prod(outs)


def _adapter(
  layer: Any, sizes: tuple[tuple[int, ...], int, int], rank: int, rngs: Any
) -> Any:
  """An ``nnx.LoRA`` with stack axes; ``lora_a`` orthonormal, ``lora_b`` 0."""
  stack, n, m = sizes

  def columns(
    key: jax.Array, shape: tuple[int, int], dtype: DTypeLike
  ) -> jax.Array:
    drawn: jax.Array = orthonormal(key, (math.prod(stack), *shape), dtype)
    return drawn.reshape(*stack, *shape)

  def zeros(
    _: jax.Array, shape: tuple[int, int], dtype: DTypeLike
  ) -> jax.Array:
    return jnp.zeros((*stack, *shape), dtype)

  return _nnx().LoRA(
    n, rank, m, dtype=layer.dtype or layer.kernel.dtype, rngs=rngs,
    a_initializer=columns, b_initializer=zeros,
  )  # fmt: skip
