"""Memory of a private step on models of 1 to 8 billion parameters, computed.

    python -m benchmarks.speed.language_model_memory_table [--only llama-3.2-1b]

Compiles the step of ``prism-optax train --task instruct`` for the
shapes of a model, and asks the compiler what it plans: arguments (frozen
weights, adapters and their moments) and temporary arrays. All arrays are
abstract: no weights are needed, and no memory. ``prism`` with adapters on all
dense layers, frozen weights in bfloat16, records of 512 tokens. On a CPU, as
here, the compiler keeps a float32 copy of all weights beside the bfloat16 ones,
since activations are float32: 4 bytes a parameter of the temporary memory. How
another device goes about that is its own affair. Half a minute for each line;
lines are added to ``benchmarks/results/language_model_memory_table.json`` as
they are finished, and not computed twice.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import prism_optax
from benchmarks.common import runner
from prism_optax import training
from prism_optax.finetune.models import llama, llama_config, minilm

SHARED = {'hidden_act': 'silu', 'rms_norm_eps': 1e-5}
LLAMA = SHARED | {'model_type': 'llama', 'vocab_size': 128256}
# The entries of `config.json` that decide on shapes.
CONFIGS = {
  'llama-3.2-1b': LLAMA | {
    'hidden_size': 2048, 'intermediate_size': 8192, 'num_hidden_layers': 16,
    'num_attention_heads': 32, 'num_key_value_heads': 8,
    'max_position_embeddings': 131072, 'rope_theta': 5e5,
    'tie_word_embeddings': True,
  },
  'qwen2.5-3b': SHARED | {
    'model_type': 'qwen2', 'vocab_size': 151936, 'hidden_size': 2048,
    'intermediate_size': 11008, 'num_hidden_layers': 36,
    'num_attention_heads': 16, 'num_key_value_heads': 2,
    'max_position_embeddings': 32768, 'rope_theta': 1e6,
    'tie_word_embeddings': True,
  },
  'llama-3.1-8b': LLAMA | {
    'hidden_size': 4096, 'intermediate_size': 14336, 'num_hidden_layers': 32,
    'num_attention_heads': 32, 'num_key_value_heads': 8,
    'max_position_embeddings': 131072, 'rope_theta': 5e5,
    'tie_word_embeddings': False,
  },
}  # fmt: skip
RANKS, MICROBATCHES = (8, 16), (1, 2, 4, 8)
LENGTH, BATCH = 512, 8
PRISM = functools.partial(prism_optax.prism, 1e-3)


def shapes(config: llama_config.Config, rank: int, dtype: Any):
  """``(graphdef, params, frozen)`` of shapes; adapters are in float32."""

  def build():
    return llama.Decoder(
      config, minilm.LoraConfig(rank), dtype=dtype, rngs=nnx.Rngs(0)
    )

  return nnx.split(nnx.eval_shape(build), nnx.LoRAParam, ...)


def losses(graphdef: Any) -> Callable[..., jax.Array]:
  """``losses(params, frozen, tokens)``: next tokens of one record, summed."""

  def loss(params, frozen, tokens):
    logits = nnx.merge(graphdef, params, frozen)(tokens[None, :-1])
    return jnp.sum(
      optax.softmax_cross_entropy_with_integer_labels(logits[0], tokens[1:])
    )

  return loss


def compiled(
  config: llama_config.Config,
  rank: int,
  microbatch: int,
  *,
  rows: int,
  length: int,
  dtype: Any,
  optimizer: Any = PRISM,
):
  """The step of `make_private`, its loss over all tokens; and its trees."""
  graphdef, params, frozen = shapes(config, rank, dtype)
  private = training.make_private(
    losses(graphdef),
    jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params),
    optimizer=optimizer,
    l2_clip_norm=1.0,
    noise_multiplier=1.0,
    expected_batch_size=rows // 2,
    dataset_size=100_000,
    steps=1000,
    delta=1e-6,
    execution=training.Execution(microbatch, rows),
    prng_key=jax.random.key(0, impl='rbg'),
  )
  state = jax.eval_shape(private.parts.transformation.init, params)
  ids = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
  program = private._step.lower(
    params, state, frozen, (ids,), jax.ShapeDtypeStruct((rows,), jnp.bool_),
    None,
  ).compile()  # fmt: skip
  return program, params, (params, state), frozen


def gigabytes(tree) -> float:
  return (
    sum(
      x.size * x.dtype.itemsize
      for x in jax.tree.leaves(tree)
      if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    / 1e9
  )


def measure(**setting: Any) -> dict[str, Any]:
  """One line of the table; all sizes in 10^9 bytes."""
  name, rank = setting['model'], setting['rank']
  microbatch = setting['micro-batch']
  config = llama_config.Config.from_dict(CONFIGS[name], name)
  # The number of micro-batches changes nothing but the ids, 4 kB a row.
  program, params, state, frozen = compiled(
    config, rank, microbatch, rows=max(BATCH, 2 * microbatch), length=LENGTH,
    dtype=jnp.bfloat16,
  )  # fmt: skip
  memory = program.memory_analysis()
  return {
    'parameters, millions': sum(x.size for x in jax.tree.leaves(frozen)) / 1e6,
    'trained, millions': sum(x.size for x in jax.tree.leaves(params)) / 1e6,
    'frozen GB': gigabytes(frozen),
    'state GB': gigabytes(state),
    'arguments GB': memory.argument_size_in_bytes / 1e9,
    'temporary GB': memory.temp_size_in_bytes / 1e9,
  }


def show(rows: list[dict]) -> str:
  """The lines as Markdown: models and ranks down, micro-batches across."""
  lines = []
  for name, rank in itertools.product(CONFIGS, RANKS):
    found = {
      row['micro-batch']: row
      for row in rows
      if (row['model'], row['rank']) == (name, rank)
    }
    if found:
      one = next(iter(found.values()))
      temporary = [
        f'{found[m]["temporary GB"]:.1f}' if m in found else ''
        for m in MICROBATCHES
      ]
      lines.append(
        [name, rank, f'{one["trained, millions"]:.1f} M',
         f'{one["frozen GB"]:.1f}', f'{one["state GB"]:.2f}', *temporary]
      )  # fmt: skip
  heads = [f'temporary, {m}' for m in MICROBATCHES]
  return runner.markdown(
    ['model', 'rank', 'trained', 'weights', 'state', *heads], lines
  )


if __name__ == '__main__':
  runner.main(
    __doc__,
    'language_model_memory_table',
    [
      {'model': model, 'rank': rank, 'micro-batch': microbatch}
      for rank in reversed(RANKS)
      for microbatch in (4, 8, 1, 2)
      for model in CONFIGS
    ],
    measure,
    show=show,
    by_device=False,
  )
