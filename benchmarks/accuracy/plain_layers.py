"""The layers of the examples as functions of plain trees.

Methods that change the parametrisation (full matrices, a frozen factor, another
gauge) work on plain trees: for each layer a dict from the names in ``MODULES``
to arrays. Here the arrays are put into the modules of ``prism_optax.finetune``.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

MODULES = ('query', 'key', 'value', 'output', 'up', 'down')
# Where each name is in a layer of the examples.
PATHS = {
  **{name: ('attention', name) for name in MODULES[:4]},
  **{name: ('mlp', name) for name in MODULES[4:]},
  'attention_norm': ('attention_norm',),
  'mlp_norm': ('mlp_norm',),
}
Weights = dict[str, dict[str, jax.Array]]


def weights_of(layer: nnx.Module) -> Weights:
  """Kernels (in, out), biases and scales of a layer without adapters."""
  out = {}
  for name, path in PATHS.items():
    module = functools.reduce(getattr, path, layer)
    leaves = ('scale', 'bias') if name.endswith('norm') else ('kernel', 'bias')
    out[name] = {leaf: getattr(module, leaf)[...] for leaf in leaves}
  return out


@functools.cache
def _structure(make: Callable[..., nnx.Module], *arguments: Any):
  """The graph of a module and its state, of shapes only."""
  return nnx.split(nnx.eval_shape(lambda: make(*arguments)))


def filled(
  values: dict[str, Any], make: Callable[..., nnx.Module], *arguments: Any
) -> nnx.Module:
  """The module ``make(*arguments)`` with these values in all its places.

  Args:
    values: Nested dicts, named as the module's attributes. The rank of an
      adapter need not be that of ``make``.
    make: A function that is the same object at every call; it is traced once.
    *arguments: Hashable.
  """
  graph, state = _structure(make, *arguments)
  flat = [
    (path, variable.replace(functools.reduce(dict.__getitem__, path, values)))
    for path, variable in nnx.to_flat_state(state)
  ]
  return nnx.merge(graph, nnx.from_flat_state(flat))


def layer(
  make: Callable[[int], nnx.Module],
  weights: Weights,
  adapters: Weights,
  scale: float = 1.0,
) -> nnx.Module:
  """A layer with frozen weights and adapters.

  Args:
    make: From a rank to a layer, a function defined once.
    weights: From :func:`weights_of`.
    adapters: From ``MODULES`` to a pair ``lora_a (in, r)``, ``lora_b (r,
      out)``; or to full ``kernel (in, out)``, which take the place of the
      frozen ones; or empty.
    scale: alpha / r of the model.
  """
  values: dict[str, Any] = {}
  for name, path in PATHS.items():
    entry: dict[str, Any] = dict(weights[name])
    adapter = adapters.get(name, {})
    if 'kernel' in adapter:
      entry['kernel'] = adapter['kernel']
    if 'lora_a' in adapter:
      # The layers of the examples have no scale: it goes with one factor.
      pair = {'lora_a': adapter['lora_a'], 'lora_b': scale * adapter['lora_b']}
      entry['lora'] = pair
    inner = values
    for key in path[:-1]:
      inner = inner.setdefault(key, {})
    inner[path[-1]] = entry
  has_pairs = any('lora_a' in adapter for adapter in adapters.values())
  return filled(values, make, int(has_pairs))
