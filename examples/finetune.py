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
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import logging
from finetuning import digits, methods, privacy, reporting, run, sampling, tasks
from finetuning.models import layers, minilm

# Learning rates found by hand, for the default options of each task: the best
# of three or four on the evaluation set, one or two seeds each. All methods
# were given the same number of tries.
LEARNING_RATES = {
  'digits': {'prism': 1e-2, 'dp-adamw': 1e-2, 'adamw': 1e-2},
  'text': {'prism': 1e-2, 'dp-adamw': 5e-3, 'adamw': 2e-3},
}
# What an option is where it is not given.
DEFAULTS: dict[str, dict[str, Any]] = {
  'digits': {
    'rank': 4,
    'steps': 150,
    'batch_size': 128,
    'microbatch_size': 52,
    'eval_every': 25,
    'delta': 1e-4,
    'target_epsilon': 8.0,
    'output': 'runs/digits',
  },
  'text': {
    'rank': 8,
    'steps': 300,
    'batch_size': 256,
    'microbatch_size': 32,
    'eval_every': 25,
    'optimizer': 'prism',
    'output': 'runs/text',
  },
}


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit status."""
  argv = sys.argv[1:] if argv is None else list(argv)
  # The libraries' warnings; what concerns the user is printed.
  logging.set_verbosity(logging.ERROR)
  parser = make_parser()
  given = vars(parser.parse_args(argv))
  try:
    options = resolve(given)
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
  except (ValueError, FileNotFoundError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0


def make_parser() -> argparse.ArgumentParser:
  """All options; None stands for "not given"."""
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  add = parser.add_argument_group('data').add_argument
  add('--data', help='private JSON lines; without it, the digits')
  add('--eval', help='public JSON lines')
  add('--text-column', help="default 'text'")
  add('--label-column', help="default 'label'")
  add(
    '--labels',
    nargs='+',
    help='names of the classes, or a file with one a line; default: the '
    'labels of --eval. Private rows with another label count as records '
    'with a zero gradient.',
  )
  add('--max-length', type=int, help='tokens of a text, default 48')

  add = parser.add_argument_group('privacy').add_argument
  add('--target-epsilon', type=float, help='least noise that meets it')
  add('--noise-multiplier', type=float, help='instead of --target-epsilon')
  add('--delta', type=float, help='must be well below 1 / dataset size')
  add(
    '--dataset-size',
    type=int,
    help='declared constant, at least the number of rows; default: counted, '
    'and declared public by that',
  )
  add(
    '--batch-size',
    type=int,
    help='EXPECTED number of rows in a batch: declared constant, divisor of '
    'the sum; every row is drawn with probability batch size / dataset size',
  )
  add('--l2-clip-norm', type=float, help='of one example, default 1')
  add(
    '--seed',
    type=int,
    help='reproducible batches and noise: for tests; voids the guarantee. '
    "Default: the operating system's entropy.",
  )
  add(
    '--nonprivate-diagnostics',
    action='store_true',
    default=None,
    help='also write loss, accuracy and gradient norm on the private '
    'batches; they are not covered by the guarantee',
  )
  add(
    '--skip-padding',
    action='store_true',
    default=None,
    help='faster; the duration of a step then tells how many rows it had',
  )

  add = parser.add_argument_group('training').add_argument
  add(
    '--optimizer',
    choices=methods.METHODS,
    help="default prism; without --data all of them. 'adamw' is NOT private",
  )
  add('--learning-rate', type=float, help='at the start of a cosine decay')
  add('--steps', type=int)
  add('--rank', type=int, help='of the adapters')
  add('--lora-targets', nargs='+', choices=tuple(layers.TARGETS))
  add('--lora-layers', type=int, help='only the top layers; default all')
  add('--model', help='folder of a MiniLM; default: the PyPI package, the hub')
  add('--microbatch-size', type=int, help='examples in memory at once')
  add('--init-seed', type=int, help='of adapters and head, public, default 0')

  add = parser.add_argument_group('output').add_argument
  add('--output', help='folder of the results')
  add('--resume', action='store_true', help='go on with the run in --output')
  add('--eval-every', type=int, help='steps')
  add('--checkpoint-every', type=int, help='steps, default 10')
  add(
    '--keep-checkpoints',
    action='store_true',
    default=None,
    help='do not delete checkpoints_secret at the end',
  )
  return parser


def resolve(given: dict[str, Any]) -> argparse.Namespace:
  """Completes and checks the options, and writes them beside the results.

  Args:
    given: What the command line says, None for what it does not.

  Returns:
    The options with defaults filled in, or, with ``--resume``, the ones that
    the run began with.

  Raises:
    ValueError: If an option is out of range, options contradict each other or
      the stored ones, or the output folder is taken.
  """
  given = dict(given)
  resume = given.pop('resume')
  kind = 'digits' if given['data'] is None else 'text'
  if resume:
    if given['output'] is None and kind == 'text':
      raise ValueError('--resume needs --output, the folder to go on with.')
    folder = pathlib.Path(given['output'] or DEFAULTS['digits']['output'])
    path = folder / 'options.json'
    if not path.exists():
      raise ValueError(f'--resume: there is no run in {folder} (no {path}).')
    stored = json.loads(path.read_text('utf-8'))
    for name, value in absolute(given).items():
      if value is not None and name != 'output' and value != stored[name]:
        raise ValueError(
          f'--resume: --{name.replace("_", "-")} {value} contradicts the run '
          f'in {folder}, which has {stored[name]}.'
        )
    return argparse.Namespace(**stored | {'output': str(folder)})
  defaults = DEFAULTS[kind] | {
    'text_column': 'text',
    'label_column': 'label',
    'max_length': 48,
    'l2_clip_norm': 1.0,
    'lora_targets': list(layers.TARGETS),
    'init_seed': 0,
    'checkpoint_every': 10,
    'nonprivate_diagnostics': False,
    'skip_padding': False,
    'keep_checkpoints': False,
  }
  if given['noise_multiplier'] is not None:
    defaults.pop('target_epsilon', None)
  options = argparse.Namespace(**given)
  for name, value in defaults.items():
    if getattr(options, name) is None:
      setattr(options, name, value)
  check(options)
  folder = pathlib.Path(options.output)
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(
      f'--output {folder} is not empty. Go on with the run in it by '
      f'--resume, or choose another folder.'
    )
  return options


def absolute(given: dict[str, Any]) -> dict[str, Any]:
  """Makes paths independent of the folder that the program is run in."""
  return given | {
    name: str(pathlib.Path(given[name]).absolute())
    for name in ('data', 'eval', 'model')
    if given[name] is not None
  }


def check(options: argparse.Namespace) -> None:
  """Refuses what is wrong whatever the data; see :func:`resolve`."""

  def require(condition: bool, name: str, expected: str):
    if not condition:
      value = getattr(options, name)
      option = '--' + name.replace('_', '-')
      raise ValueError(f'Expected {option} {expected}, got {value}.')

  for name in (
    'steps',
    'rank',
    'batch_size',
    'microbatch_size',
    'eval_every',
    'checkpoint_every',
    'dataset_size',
    'lora_layers',
  ):
    value = getattr(options, name)
    require(value is None or value >= 1, name, 'to be at least 1')
  for name in ('l2_clip_norm', 'learning_rate', 'target_epsilon'):
    value = getattr(options, name)
    valid = value is None or (value > 0 and math.isfinite(value))
    require(valid, name, 'to be positive and finite')
  value = options.noise_multiplier
  valid = value is None or (value >= 0 and math.isfinite(value))
  require(valid, 'noise_multiplier', 'to be finite and not negative')
  valid = options.delta is None or 0 < options.delta < 1
  require(valid, 'delta', 'to be between 0 and 1')
  if options.data is None:
    for name in ('eval', 'labels', 'dataset_size', 'model'):
      value = getattr(options, name)
      if value is not None:
        raise ValueError(f'--{name.replace("_", "-")} {value} needs --data.')
    return
  if options.eval is None:
    raise ValueError('--data needs --eval, a public file of the same form.')
  if options.optimizer == 'adamw':
    for name in ('target_epsilon', 'noise_multiplier', 'delta'):
      value = getattr(options, name)
      if value is not None:
        raise ValueError(
          f'--{name.replace("_", "-")} {value}: --optimizer adamw is not '
          f'private.'
        )
    return
  if (options.target_epsilon is None) == (options.noise_multiplier is None):
    raise ValueError(
      'Expected one of --target-epsilon and --noise-multiplier, got '
      f'{options.target_epsilon} and {options.noise_multiplier}.'
    )
  if options.delta is None:
    raise ValueError('--delta is needed, well below 1 / dataset size.')


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
    learning_rate=LEARNING_RATES[kind][optimizer] if rate is None else rate,
    l2_clip_norm=options.l2_clip_norm,
    microbatch_size=options.microbatch_size,
    eval_every=options.eval_every,
    checkpoint_every=options.checkpoint_every,
    seed=options.seed,
    skip_padding=options.skip_padding,
    nonprivate_diagnostics=options.nonprivate_diagnostics,
    keep_checkpoints=options.keep_checkpoints,
  )


def save_options(
  options: argparse.Namespace, task: tasks.Task, output: pathlib.Path
) -> None:
  """Writes what ``--resume`` needs, or checks that it is still so.

  A seed is among it: one that was asked for is no secret.

  Raises:
    ValueError: If the run in ``output`` began with other frozen weights.
  """
  output.mkdir(parents=True, exist_ok=True)
  path = output / 'options.json'
  if not path.exists():
    stored = absolute(vars(options)) | {'base': task.base}
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
  save_options(options, task, output)
  settings = settings_of(options, options.optimizer, 'text')
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
  save_options(options, task, output)
  chosen = [options.optimizer] if options.optimizer else list(methods.METHODS)
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
