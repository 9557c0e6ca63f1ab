"""Time of the proof that no record meets another, on a decoder of 30 layers.

    python -m benchmarks.speed.proof_time [--again]

A decoder of SmolLM2-135M's shapes, adapters of rank 8 on its dense layers, 32
records of 512 tokens. All arrays are abstract. Proved are the gradients of each
record, from vmap and from one backward pass, as a clip gets them. ``written
out`` has its layers one after the other, the most equations that a decoder can
have. Seconds are medians of five runs; tracing, which the first step does as
well, and the analysis are timed apart.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.common import runner
from prism_optax import diagnostics, lora

LAYERS, WIDTH, INNER, WORDS, LENGTH, RANK = 30, 576, 1536, 49152, 512, 8
SIZES = dict.fromkeys('qkvo', (WIDTH, WIDTH)) | {
  'up': (WIDTH, INNER),
  'gate': (WIDTH, INNER),
  'down': (INNER, WIDTH),
}
TOKENS = jax.ShapeDtypeStruct((32, LENGTH), jnp.int32)
AXES = None, None, 0


def trees(*stack: int) -> tuple[Any, Any]:
  """Adapters and weights of one layer, with leading axes, as shapes."""

  def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*stack, *shape), jnp.float32)

  pairs = {
    name: {'lora_a': array(m, RANK), 'lora_b': array(RANK, n)}
    for name, (m, n) in SIZES.items()
  }
  return pairs, {name: array(*size) for name, size in SIZES.items()}


def layer(x: jax.Array, pairs: Any, weights: Any) -> jax.Array:
  def dense(name: str, x: jax.Array) -> jax.Array:
    return x @ weights[name] + lora.per_example_product(x, **pairs[name])

  def norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)

  mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
  z = norm(x)
  q, k, v = (dense(name, z) for name in 'qkv')
  x += dense('o', jax.nn.softmax(jnp.where(mask, q @ k.mT, -1e9)) @ v)
  z = norm(x)
  return x + dense('down', jax.nn.silu(dense('gate', z)) * dense('up', z))


def decoder(
  layers: str, depth: int
) -> tuple[Callable[..., jax.Array], Any, Any]:
  """Losses of records, adapters and frozen weights."""
  table = jax.ShapeDtypeStruct((WORDS, WIDTH), jnp.float32)
  if layers == 'written out':
    params, weights = zip(*(trees() for _ in range(depth)), strict=True)
  else:
    params, weights = trees(depth)

  def through(x: jax.Array, params: Any, weights: Any) -> jax.Array:
    if layers == 'written out':
      for pairs, one in zip(params, weights, strict=True):
        x = layer(x, pairs, one)
      return x
    if params['q']['lora_a'].ndim == 4:  # Copies; a scan wants layers first.
      params = jax.tree.map(lambda x: x.swapaxes(0, 1), params)
    return jax.lax.scan(
      lambda x, both: (layer(x, *both), None), x, (params, weights)
    )[0]

  def losses(params: Any, frozen: Any, tokens: jax.Array) -> jax.Array:
    x = through(frozen['table'][tokens], params, frozen['layers'])
    each = optax.softmax_cross_entropy_with_integer_labels(
      x[:, :-1] @ frozen['table'].T, tokens[:, 1:]
    )
    return jnp.sum(each, 1)

  return losses, params, {'table': table, 'layers': weights}


def measure(
  layers: str, gradients: str, depth: int = LAYERS, runs: int = 5
) -> dict[str, Any]:
  losses, *args = decoder(layers, depth)

  def by_vmap(*args: Any) -> Any:
    def one(params: Any, frozen: Any, row: jax.Array) -> jax.Array:
      return losses(params, frozen, row[None])[0]

    return jax.vmap(jax.grad(one), AXES)(*args)

  def at_once(params: Any, frozen: Any, rows: jax.Array) -> Any:
    return lora.per_example_gradients(
      lambda copies, rows: losses(copies, frozen, rows)
    )(params, rows)

  function = by_vmap if gradients == 'vmap' else at_once
  traces, wholes = [], []
  for _ in range(runs):
    jax.clear_caches()  # JAX remembers what it has traced.
    start = time.perf_counter()
    jax.make_jaxpr(lambda *x: function(*x))(*args, TOKENS)
    traces.append(time.perf_counter() - start)
    jax.clear_caches()
    start = time.perf_counter()
    proof = diagnostics.prove_independent(
      lambda *x: function(*x), *args, TOKENS, in_axes=AXES
    )
    wholes.append(time.perf_counter() - start)
    if not proof:
      raise RuntimeError(str(proof))
  trace, whole = map(statistics.median, (traces, wholes))
  return {'trace': trace, 'analysis': whole - trace, 'longest': max(wholes)}


if __name__ == '__main__':
  runner.main(
    __doc__,
    'proof_time',
    [
      {'layers': layers, 'gradients': gradients}
      for layers in ('a loop', 'written out')
      for gradients in ('vmap', 'one backward pass')
    ],
    measure,
    smoke={'depth': 2, 'runs': 1},
  )
