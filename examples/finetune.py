"""Private LoRA fine-tuning of a pretrained transformer, from the command line.

    python examples/finetune.py
        Pretrains a small vision transformer on public digits, adapts it to
        private ones, and compares PRISM, DP-AdamW and a run without privacy.

    python examples/finetune.py --data train.jsonl --eval validation.jsonl \\
        --target-epsilon 6 --delta 1e-5 --output runs/mine
        Fine-tunes all-MiniLM-L6-v2 on a text classification file: JSON lines
        with the columns `text` and `label`. The training file is private, the
        evaluation file is declared public.

    python examples/finetune.py --output runs/mine --resume
        Goes on after an interruption: the same parameters, bit for bit, as if
        there had been none.

What is private: one row of --data, under adding or removing it, with batches
drawn by Poisson sampling. What is not: the number of rows (--dataset-size is
a declared constant), the evaluation file, the options, how long a step takes
with --skip-padding, and several rows of one person together.

In --output: adapter.safetensors, metrics.jsonl, metrics.png, summary.json and
options.json may be published. checkpoints_secret/, which is there while the
run lasts and holds the noise key, and nonprivate_* may not.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

from absl import logging
from finetuning import digits, methods, privacy, reporting, run, sampling, tasks
from finetuning import options as options_lib
from finetuning.models import minilm


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit status."""
  argv = sys.argv[1:] if argv is None else list(argv)
  # The libraries' warnings; what concerns the user is printed.
  logging.set_verbosity(logging.ERROR)
  given = vars(options_lib.make_parser(__doc__).parse_args(argv))
  try:
    options = options_lib.resolve(given)
    output = pathlib.Path(options.output)
    if options.data is None:
      compare_on_digits(options, output)
    else:
      finetune_text(options, output)
  except run.Interrupted as stop:
    print(
      f'\n{stop} Go on with:\n  python {sys.argv[0]} --output '
      f'{options.output} --resume',
      file=sys.stderr,
    )
    return 130
  except KeyboardInterrupt:
    # Before the first step, or for the second time.
    print('\nStopped. Go on with --resume if a run has begun.', file=sys.stderr)
    return 130
  except (ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
      print(
        'What was saved before is still there: go on with --resume.',
        file=sys.stderr,
      )
    return 2
  return 0


def make_plan(options: argparse.Namespace, rows: int) -> privacy.Plan:
  """The public constants of a run on ``rows`` private rows.

  Raises:
    ValueError: If the declared size is below the number of rows, the expected
      batch exceeds it, or the target cannot be met.
  """
  if options.dataset_size is None:
    dataset_size = rows
    print(
      f'{rows} private rows were counted: this number is DECLARED PUBLIC. '
      f'Declare another one, at least as large, by --dataset-size.'
    )
  else:
    dataset_size = options.dataset_size
    if rows > dataset_size:
      raise ValueError(
        f'--dataset-size {dataset_size} is below the number of rows in --data.'
      )
  if options.batch_size > dataset_size:
    raise ValueError(
      f'--batch-size {options.batch_size} exceeds the dataset size '
      f'{dataset_size}.'
    )
  if options.plan is not None:  # Of a run that goes on: not calibrated anew.
    return privacy.Plan(**options.plan)
  plan = privacy.Plan(
    dataset_size=dataset_size,
    expected_batch_size=options.batch_size,
    padded_size=sampling.padded_size(
      options.batch_size, dataset_size, options.microbatch_size
    ),
    steps=options.steps,
    noise_multiplier=options.noise_multiplier or 0.0,
    delta=options.delta or 0.0,
  )
  if options.target_epsilon is not None:
    plan = privacy.calibrate(plan, options.target_epsilon)
  return plan


def settings_of(
  options: argparse.Namespace, optimizer: str, kind: str
) -> run.Settings:
  """The part of the options that the training loop takes."""
  rate = options.learning_rate
  return run.Settings(
    optimizer=optimizer,
    learning_rate=options_lib.LEARNING_RATES[kind][optimizer]
    if rate is None
    else rate,
    l2_clip_norm=options.l2_clip_norm,
    microbatch_size=options.microbatch_size,
    eval_every=options.eval_every,
    checkpoint_every=options.checkpoint_every,
    seed=options.seed,
    skip_padding=options.skip_padding,
    nonprivate_diagnostics=options.nonprivate_diagnostics,
    keep_checkpoints=options.keep_checkpoints,
    devices=options_lib.mesh_devices(options.mesh),
  )


def save_options(
  options: argparse.Namespace,
  task: tasks.Task,
  plan: privacy.Plan,
  output: pathlib.Path,
) -> None:
  """Writes what ``--resume`` needs, or checks that it is still so.

  A seed is among it: one that was asked for is no secret.

  Raises:
    ValueError: If the run in ``output`` began with other frozen weights.
  """
  output.mkdir(parents=True, exist_ok=True)
  path = output / 'options.json'
  if not path.exists():
    stored = options_lib.absolute(vars(options)) | {
      'base': task.base,
      'plan': dataclasses.asdict(plan),
    }
    temporary = path.with_suffix('.tmp')
    temporary.write_text(json.dumps(stored, indent=2) + '\n', 'utf-8')
    temporary.replace(path)
  elif options.base != task.base:
    raise ValueError(
      f'--resume: the run in {output} began with the frozen weights '
      f'{options.base}, not with {task.base}.'
    )


def finetune_text(options: argparse.Namespace, output: pathlib.Path) -> None:
  """One method on two text files."""
  task = tasks.text_classification(
    options.data,
    options.eval,
    labels=options.labels,
    text_column=options.text_column,
    label_column=options.label_column,
    max_length=options.max_length,
    model=options.model,
    lora=minilm.LoraConfig(
      options.rank, tuple(options.lora_targets), options.lora_layers
    ),
    init_seed=options.init_seed,
  )
  plan = make_plan(options, len(task.train.labels))
  # From here on these are constants of the run, whatever becomes of the files.
  options.dataset_size = plan.dataset_size
  options.labels = list(task.labels)
  save_options(options, task, plan, output)
  settings = settings_of(options, options.optimizer, 'text')
  if settings.nonprivate_diagnostics:
    print('The files nonprivate_* will NOT be covered by the guarantee.')
  print(f'{task.name}: {len(task.labels)} classes; results in {output}')
  summary = run.train(task, plan, settings, output)
  print(
    f'{summary["optimizer"]}: evaluation accuracy '
    f'{summary["start"]["eval_accuracy"]:.3f} -> '
    f'{summary["final"]["eval_accuracy"]:.3f}; {summary["statement"]}.'
  )


def compare_on_digits(
  options: argparse.Namespace, output: pathlib.Path
) -> None:
  """All methods, or the one asked for, on the default task."""
  options.dataset_size = digits.PRIVATE_SIZE
  plan = make_plan(options, digits.PRIVATE_SIZE)
  print('A small vision transformer, pretrained on public digits ...')
  task = tasks.mirrored_digits(
    output,
    rank=options.rank,
    targets=options.lora_targets,
    init_seed=options.init_seed,
  )
  save_options(options, task, plan, output)
  chosen = [options.optimizer] if options.optimizer else list(methods.COMPARED)
  rows = [('', 'evaluation accuracy', f'epsilon at delta {options.delta:g}')]
  statement = ''
  for name in chosen:
    used = plan
    if name == 'adamw':
      used = dataclasses.replace(plan, noise_multiplier=0.0)
    summary = run.train(
      task, used, settings_of(options, name, 'digits'), output / name
    )
    if not rows[1:]:
      accuracy = f'{summary["start"]["eval_accuracy"]:.3f}'
      rows.append(('before adaptation', accuracy, '0'))
    epsilon = 'not private'
    if summary['private']:
      epsilon = f'{privacy.round_up(summary["epsilon"]):.4f}'
      statement = summary['statement']
    rows.append((name, f'{summary["final"]["eval_accuracy"]:.3f}', epsilon))
  print(f'\nDigits read in a mirror, {len(task.evaluation.labels)} of them:\n')
  print(reporting.table(rows))
  if statement:
    print(f'\nSpent by each private run: {statement}.')
  print(f'Adapters, metrics and plots are in {output}.')


if __name__ == '__main__':
  sys.exit(main())
