"""Memory of a private step on models of 1 to 8 billion parameters, computed.

    python benchmarks/speed/language_model_memory_table.py [--only llama-3.2-1b]

Compiles the step of ``examples/finetune.py train --task instruct`` for the
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

import argparse
import itertools
import pathlib
import sys

import jax
import jax.numpy as jnp
from flax import nnx

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from finetuning import language, methods, sampling, training  # noqa: E402
from finetuning.models import llama, llama_config, minilm  # noqa: E402

from benchmarks.common import results  # noqa: E402

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


def shapes(config: llama_config.Config, rank: int):
  """``(graphdef, params, frozen)`` of shapes; adapters are in float32."""

  def build():
    return llama.Decoder(
      config, minilm.LoraConfig(rank), dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )

  return nnx.split(nnx.eval_shape(build), nnx.LoRAParam, ...)


def compiled(config: llama_config.Config, rank: int, microbatch: int):
  """The step of a run, its loss over all tokens; and the sizes of its trees.

  A batch has ``BATCH`` rows, or twice its micro-batch: the number of
  micro-batches changes nothing but the ids, 4 kB a row.
  """
  graphdef, params, frozen = shapes(config, rank)
  method = methods.make(
    'prism', learning_rate=1e-3, l2_clip_norm=1.0, noise_multiplier=1.0,
    expected_batch_size=BATCH, prng_key=jax.random.key(0, impl='rbg'),
    params=params,
  )  # fmt: skip
  step = training.make_step(
    graphdef,
    method,
    microbatch_size=microbatch,
    loss=language.make_loss(graphdef, LENGTH),
  )
  counter = jax.ShapeDtypeStruct((), jnp.int32)
  state = training.TrainState(
    params, jax.eval_shape(method.transform.init, params), counter, counter
  )
  rows = max(BATCH, 2 * microbatch)
  ids = jax.ShapeDtypeStruct((rows, LENGTH), jnp.int32)
  program = jax.jit(step, donate_argnums=0).lower(
    state, frozen, sampling.Batch(ids, ids),
    jax.ShapeDtypeStruct((rows,), jnp.bool_),
  ).compile()  # fmt: skip
  return program, params, state, frozen


def gigabytes(tree) -> float:
  return (
    sum(
      x.size * x.dtype.itemsize
      for x in jax.tree.leaves(tree)
      if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    / 1e9
  )


def measure(name: str, rank: int, microbatch: int) -> dict:
  """One line of the table; all sizes in 10^9 bytes."""
  config = llama_config.Config.from_dict(CONFIGS[name], name)
  program, params, state, frozen = compiled(config, rank, microbatch)
  memory = program.memory_analysis()
  return {
    'model': name,
    'rank': rank,
    'micro-batch': microbatch,
    'parameters, millions': sum(x.size for x in jax.tree.leaves(frozen)) / 1e6,
    'trained, millions': sum(x.size for x in jax.tree.leaves(params)) / 1e6,
    'frozen GB': gigabytes(frozen),
    'state GB': gigabytes(state),
    'arguments GB': memory.argument_size_in_bytes / 1e9,
    'temporary GB': memory.temp_size_in_bytes / 1e9,
  }


def table(rows: list[dict]) -> str:
  """The lines as Markdown: models and ranks down, micro-batches across."""
  head = ' | '.join(f'temporary, {m}' for m in MICROBATCHES)
  lines = [
    f'| model | rank | trained | weights | state | {head} |',
    '| --- ' * (5 + len(MICROBATCHES)) + '|',
  ]
  for name in CONFIGS:
    for rank in RANKS:
      found = {
        row['micro-batch']: row
        for row in rows
        if (row['model'], row['rank']) == (name, rank)
      }
      if not found:
        continue
      one = next(iter(found.values()))
      cells = [
        name, str(rank), f'{one["trained, millions"]:.1f} M',
        f'{one["frozen GB"]:.1f}', f'{one["state GB"]:.2f}',
      ]  # fmt: skip
      cells += [
        f'{found[m]["temporary GB"]:.1f}' if m in found else ''
        for m in MICROBATCHES
      ]
      lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--only', choices=tuple(CONFIGS))
  parser.add_argument('--table', action='store_true', help='run nothing')
  args = parser.parse_args()
  path = results.FOLDER / 'language_model_memory_table.json'
  names = [args.only] if args.only else CONFIGS
  keys = itertools.product(reversed(RANKS), (4, 8, 1, 2), names)
  rows = results.add_rows(
    path,
    ('model', 'rank', 'micro-batch'),
    ((m, r, b) for r, b, m in (() if args.table else keys)),
    measure,
  )
  print(table(rows))


if __name__ == '__main__':
  main()
