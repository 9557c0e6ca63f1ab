"""Time of the proof that no record meets another, on a decoder of 30 layers.

    python benchmarks/speed/proof_time.py [--runs 5]

SmolLM2-135M of the examples in its own shapes, adapters of rank 8 on all dense
layers, 32 records of 512 tokens. All arrays are abstract: no weights needed.
What is proved is what a clip gets: the gradients of each record, by vmap and
from one backward pass. Tracing, which the first step does as well, and the
analysis are timed apart. Then the same of 30 layers that are written out one
after the other, the most equations that a decoder can have. Results go to
``benchmarks/results/proof_time_<platform>.json``.
"""

import argparse
import functools
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from finetuning.models import llama, llama_config, minilm  # noqa: E402

from benchmarks.common import results  # noqa: E402
from prism_optax import diagnostics, lora  # noqa: E402

# The entries of `config.json` that decide on shapes.
SMOLLM2 = {
  'model_type': 'llama', 'vocab_size': 49152, 'hidden_size': 576,
  'intermediate_size': 1536, 'num_hidden_layers': 30,
  'num_attention_heads': 9, 'num_key_value_heads': 3, 'rms_norm_eps': 1e-5,
  'max_position_embeddings': 8192, 'rope_theta': 1e5, 'hidden_act': 'silu',
  'tie_word_embeddings': True,
}  # fmt: skip
ROWS, LENGTH, RANK = 32, 512, 8
AXES = None, None, 0


def shapes(config: llama_config.Config, rank: int):
  """``(graphdef, params, frozen)`` of shapes."""

  def build():
    return llama.Decoder(config, minilm.LoraConfig(rank), rngs=nnx.Rngs(0))

  return nnx.split(nnx.eval_shape(build), nnx.LoRAParam, ...)


def losses(graphdef: Any) -> Callable[..., jax.Array]:
  """``losses(params, frozen, tokens)``, one for each record; copies or not."""

  def of_records(params, frozen, tokens):
    if jax.tree.leaves(params)[0].ndim == 4:
      # Copies stand before the layers, and the scan wants the layers in front.
      params = jax.tree.map(lambda x: x.swapaxes(0, 1), params)
    logits = nnx.merge(graphdef, params, frozen)(tokens)[:, :-1]
    each = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )
    return jnp.sum(each, 1)

  return of_records


def written_out(layers: int):
  """Losses, parameters and frozen weights of layers that are no loop."""
  width, inner, words = 576, 1536, 49152
  sizes = dict.fromkeys('qkvo', (width, width))
  sizes |= {
    'up': (width, inner),
    'gate': (width, inner),
    'down': (inner, width),
  }

  def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  frozen = {
    'table': array(words, width),
    'layers': [
      {name: array(*size) for name, size in sizes.items()}
      for _ in range(layers)
    ],
  }
  params = [
    {
      name: {'lora_a': array(m, RANK), 'lora_b': array(RANK, n)}
      for name, (m, n) in sizes.items()
    }
    for _ in range(layers)
  ]

  def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)

  def of_records(params, frozen, tokens):
    x, length = frozen['table'][tokens], tokens.shape[1]
    mask = jnp.tril(jnp.ones((length, length), bool))
    for pairs, layer in zip(params, frozen['layers'], strict=True):

      def dense(name, x, pairs=pairs, layer=layer):
        return x @ layer[name] + lora.per_example_product(x, **pairs[name])

      z = norm(x)
      q, k, v = (dense(name, z) for name in 'qkv')
      scores = jnp.where(mask, q @ k.mT, -1e9)
      x = x + dense('o', jax.nn.softmax(scores) @ v)
      z = norm(x)
      gated = jax.nn.silu(dense('gate', z)) * dense('up', z)
      x = x + dense('down', gated)
    logits = x[:, :-1] @ frozen['table'].T
    each = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )
    return jnp.sum(each, 1)

  return of_records, params, frozen


def gradients(of_records: Callable[..., jax.Array]) -> dict[str, Callable]:
  """What a clip gets, both ways."""

  def one(params, frozen, row):
    return of_records(params, frozen, row[None])[0]

  def one_backward_pass(params, frozen, rows):
    return lora.per_example_gradients(
      lambda copies, rows: of_records(copies, frozen, rows)
    )(params, rows)

  return {
    'vmap': jax.vmap(jax.grad(one), AXES),
    'one backward pass': one_backward_pass,
  }


def measure(
  function: Callable[..., Any], args: tuple[Any, ...], runs: int
) -> dict[str, Any]:
  """Medians of seconds, and the number of equations.

  Raises:
    RuntimeError: If it is not proved.
  """
  traces, analyses = [], []
  for _ in range(runs):
    # A new function each time: JAX remembers what it has traced.
    jax.clear_caches()
    start = time.perf_counter()
    jax.make_jaxpr(functools.partial(function))(*args)
    traces.append(time.perf_counter() - start)
    jax.clear_caches()
    start = time.perf_counter()
    proof = diagnostics.prove_independent(
      functools.partial(function), *args, in_axes=AXES
    )
    analyses.append(time.perf_counter() - start - traces[-1])
    if not proof:
      raise RuntimeError(str(proof))
  equations = next(x for x in proof.trace if x.startswith('equations'))
  return {
    'equations': int(equations.split()[1]),
    'trace': statistics.median(traces),
    'analysis': statistics.median(analyses),
    'longest of both': max(map(sum, zip(traces, analyses, strict=True))),
  }


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--runs', type=int, default=5)
  args = parser.parse_args()
  config = llama_config.Config.from_dict(SMOLLM2, 'proof_time.py')
  graphdef, params, frozen = shapes(config, RANK)
  tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
  found = {'environment': results.environment(), 'runs': args.runs}
  for name, (of_records, *trees) in {
    'SmolLM2, its layers a loop': (losses(graphdef), params, frozen),
    'the same layers written out': written_out(30),
  }.items():
    found[name] = {}
    for way, function in gradients(of_records).items():
      row = measure(function, (*trees, tokens), args.runs)
      found[name][way] = row
      print(name, way, row, flush=True)
  print(f'Written to {results.save("proof_time", found)}')


if __name__ == '__main__':
  main()
