"""The options of ``finetune.py``: what they are, and what is refused."""

import argparse
import json
import math
import pathlib
import time
from typing import Any

from . import methods
from .models import layers

# Learning rates at the start of the cosine, found by hand on the evaluation
# set, prism without decay and with bias correction. Since then one run each at
# 2e-2, 3e-2, 6e-2, 1e-1 gave .842, .862, .865, .825, spread over runs .02.
# Digits, mean of three runs, at 1e-2, 2e-2, 3e-2, 6e-2: prism .820, .868,
# .866, .836; dp-adamw .832, .859, .852, .762. At 3e-3, 1e-2, 3e-2: dp-muon
# .484, .817, .841 (and .538 at 1e-1); adamw .900, .938, .935.
LEARNING_RATES = {
  'digits': {'prism': 2e-2, 'dp-muon': 3e-2, 'dp-adamw': 2e-2, 'adamw': 1e-2},
  'text': {'prism': 1e-2, 'dp-muon': 1e-2, 'dp-adamw': 5e-3, 'adamw': 2e-3},
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
  },
  'text': {
    'rank': 8,
    'steps': 300,
    'batch_size': 256,
    'microbatch_size': 32,
    'eval_every': 25,
    'optimizer': 'prism',
  },
}


def make_parser(description: str | None) -> argparse.ArgumentParser:
  """All options; None stands for "not given"."""
  parser = argparse.ArgumentParser(
    description=description,
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
  add(
    '--mesh',
    help='data=N: every batch split over N devices, with the result of one to '
    'rounding; the micro-batch must be a multiple of N',
  )
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
  """Completes and checks the options.

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
    if given['output'] is None:
      raise ValueError('--resume needs --output, the folder to go on with.')
    folder = pathlib.Path(given['output'])
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
    'output': time.strftime(f'runs/{kind}-%Y%m%d-%H%M%S'),
  }
  if given['noise_multiplier'] is not None:
    defaults.pop('target_epsilon', None)
  options = argparse.Namespace(**given, plan=None)
  devices = mesh_devices(options.mesh)
  # The default micro-batch fits any mesh; one that was asked for has to.
  defaults['microbatch_size'] = (
    -(-defaults['microbatch_size'] // devices) * devices
  )
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


def mesh_devices(mesh: str | None) -> int:
  """The N of ``data=N``, 1 for None.

  Raises:
    ValueError: For anything else.
  """
  if mesh is None:
    return 1
  axis, _, number = mesh.partition('=')
  if axis != 'data' or not number.isdecimal() or int(number) < 1:
    raise ValueError(f'Expected --mesh data=N with N >= 1, got {mesh!r}.')
  return int(number)


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
  devices = mesh_devices(options.mesh)
  if options.microbatch_size % devices:
    raise ValueError(
      f'Expected --microbatch-size to be a multiple of the {devices} devices '
      f'of --mesh, got {options.microbatch_size}.'
    )
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
