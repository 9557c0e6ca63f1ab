"""Where a run starts: adapters, their gauge, the head."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accuracy import plain_layers, problems
from benchmarks.accuracy.run_settings import Run
from benchmarks.common import methods
from prism_optax import lora


def start(run: Run, given: problems.Problem) -> tuple[Any, Any]:
  """``(params, frozen)`` before training, from the seed."""
  method = methods.METHODS[run.method]
  layers = given.frozen['layers']
  keys = jax.random.split(jax.random.key(run.seed), 3)
  layout = lora.Layout(scale=run.scale)
  kernels = [
    {name: {'kernel': layer[name]['kernel']} for name in plain_layers.MODULES}
    for layer in layers
  ]
  adapters: list[dict] = [{} for _ in layers]
  if method.parameters == 'matrices':
    adapters = kernels
  elif method.parameters == 'lora':
    for layer, modules in enumerate(kernels):
      for i, (name, x) in enumerate(sorted(modules.items())):
        rows, columns = x['kernel'].shape
        key = jax.random.fold_in(keys[1], 100 * layer + i)
        a = jax.random.normal(key, (rows, run.rank)) * rows**-0.5
        adapters[layer][name] = {
          'lora_a': a, 'lora_b': jnp.zeros((run.rank, columns))
        }  # fmt: skip
    if run.initialization == 'spectral':
      adapters, kernels = lora.spectral_residual(
        adapters, kernels, keys[2], layout=layout
      )
      layers = [
        {name: {**x, **modules.get(name, {})} for name, x in layer.items()}
        for layer, modules in zip(layers, kernels, strict=True)
      ]
    elif run.initialization == 'balanced':
      adapters = lora.initialize(
        adapters, keys[2], method='balanced', size=0.1, layout=layout
      )
    adapters = in_gauge(adapters, run.gauge, keys[2])
  params, frozen = {'layers': adapters}, {**given.frozen, 'layers': layers}
  if given.classes:
    hidden = layers[0]['query']['kernel'].shape[0]
    orthogonal = jax.nn.initializers.orthogonal()
    frozen['head'] = {
      'kernel': orthogonal(keys[0], (hidden, given.classes)),
      'bias': jnp.zeros(given.classes),
    }
    if run.head == 'trained' or method.parameters == 'head':
      params['head'] = frozen['head']
  return method.prepare(params, layout), frozen


def in_gauge(
  adapters: list[dict], condition: float, key: jax.Array
) -> list[dict]:
  """The same Z from factors A K, K^-1 B, with K of this condition number."""
  if condition == 1:
    return adapters
  out = []
  for layer in adapters:
    turned = {}
    for i, (name, pair) in enumerate(sorted(layer.items())):
      rank = pair['lora_a'].shape[1]
      basis = jax.random.normal(jax.random.fold_in(key, i), (rank, rank))
      basis = np.linalg.qr(basis)[0]
      size = np.geomspace(condition**-0.5, condition**0.5, rank)
      turned[name] = {
        'lora_a': pair['lora_a'] @ (basis * size) @ basis.T,
        'lora_b': (basis / size) @ basis.T @ pair['lora_b'],
      }
    out.append(turned)
  return out
