"""The options of ``train``: their defaults, and what is refused."""

import argparse
import pathlib
import time
from typing import Any

from . import command_line, files
from .command_line import NOT_PRIVATE, SMOLLM2, TARGETS, TASKS

# Learning rates at the start of the cosine, found by hand on the evaluation
# set. Digits, means of four runs (standard errors to .009) at 1e-2, 2e-2, 4e-2,
# 8e-2: prism .827, .859, .880, .848. Means of three at 1e-2, 2e-2, 3e-2, 6e-2:
# dp-adamw .832, .859, .852, .762. At 3e-3, 1e-2, 3e-2: dp-muon .484, .817, .841
# (and .538 at 1e-1); adamw .900, .938, .935.
LEARNING_RATES = {
  task: dict(zip(command_line.METHODS, rates, strict=True))
  for task, rates in {
    # prism, dp-muon, dp-adamw, adamw
    'digits': (4e-2, 3e-2, 2e-2, 1e-2),
    'classify': (1e-2, 1e-2, 5e-3, 2e-3),
    'instruct': (5e-3, 5e-3, 1e-3, 1e-3),
  }.items()
}
TABLE = command_line.options(command_line.COMMANDS['train'])
Options = argparse.Namespace


def _defaults(task: str) -> dict[str, Any]:
  """All options of a task."""
  found = {name: x.defaults.get(task) for name, x in TABLE.items()}
  return found | {'task': task, 'lora_targets': [*TARGETS], 'plan': None}


def _said(name: str, value: Any) -> str:
  return f'--{name.replace("_", "-")} {value}'


def resolve(given: argparse.Namespace) -> Options:
  """Completes and checks the options.

  Args:
    given: What the command line says, None for what it does not.

  Returns:
    The options with defaults filled in, or, with ``--resume``, the ones that
    the run began with.

  Raises:
    ValueError: If options contradict each other or the stored ones, what is
      stored are no options, or the output folder is taken.
  """
  values = {name: vars(given)[name] for name in TABLE}
  # A flag that is not given is False; 0 is a value.
  said = {k: v for k, v in values.items() if v is not None and v is not False}
  if said.pop('resume', False):
    return _resumed(said)
  task = said.get('task') or ('classify' if 'data' in said else 'digits')
  for name, value in said.items():
    tasks = TABLE[name].tasks
    if task not in tasks:
      needed = f'is for --task {" or ".join(tasks)}, not {task}.'
      needed = needed if 'data' in said else 'needs --data.'
      raise ValueError(f'{_said(name, value)} {needed}')
  defaults = _defaults(task)
  defaults['output'] = time.strftime(f'runs/{task}-%Y%m%d-%H%M%S')
  if given.noise_multiplier is not None:
    defaults['target_epsilon'] = None
  # The default micro-batch fits any mesh; one that was asked for has to.
  devices = said.get('mesh', 1)
  defaults['microbatch_size'] += -defaults['microbatch_size'] % devices
  options = Options(**defaults | said)
  if task == 'classify' and options.head is None:
    known = options.target_epsilon is not None
    options.head = 'released' if known else 'random'
  if task == 'instruct' and options.loss_divisor is None:
    options.loss_divisor = options.max_length
  _check(options)
  go_on = ', or go on with the run in it by --resume'
  files.require_new(pathlib.Path(options.output), go_on)
  return options


def _resumed(said: dict[str, Any]) -> Options:
  if 'output' not in said:
    raise ValueError('--resume needs --output, the folder to go on with.')
  folder = pathlib.Path(said['output'])
  path = folder / 'options.json'
  if not path.exists():
    raise ValueError(f'--resume: there is no run in {folder} (no {path}).')
  stored = read(path)
  for name, value in absolute(said).items():
    if name != 'output' and value != vars(stored)[name]:
      raise ValueError(
        f'--resume: {_said(name, value)} contradicts the run in {folder}, '
        f'which has {vars(stored)[name]}.'
      )
  stored.output = str(folder)
  files.require_writable(folder)
  return stored


def read(path: pathlib.Path) -> Options:
  """The options that a run wrote down.

  An option that the run does not know yet has its default: a new option's
  default must be what was done before it. If it is not, a run does not go on
  all the same: what decides the release is in the fingerprint of its state,
  which is compared.

  Args:
    path: Its ``options.json``.

  Raises:
    ValueError: If they are no options, or a later version's.
  """
  stored = files.read_json(path)
  task = stored.get('task')
  if task not in list(TASKS):
    raise ValueError(f'{path}: expected a task of {list(TASKS)}, got {task}.')
  defaults = _defaults(task) | {'base': None}
  unknown = sorted(stored.keys() - defaults.keys())
  if unknown:
    raise ValueError(
      f'{path}: the run has the options {unknown}, which are unknown here: a '
      'later version began it.'
    )
  return Options(**defaults | stored)


def absolute(given: dict[str, Any]) -> dict[str, Any]:
  """Makes paths independent of the folder that the program is run in."""
  return given | {
    name: str(pathlib.Path(given[name]).absolute())
    for name in ('data', 'eval', 'model')
    if given.get(name) not in (None, SMOLLM2)
  }


def _check(options: Options) -> None:
  """Refuses what is wrong whatever the data; see :func:`resolve`."""
  if options.microbatch_size % options.mesh:
    raise ValueError(
      f'Expected --microbatch-size to be a multiple of the {options.mesh} '
      f'devices of --mesh, got {options.microbatch_size}.'
    )
  if options.task == 'digits':
    return
  if options.data is None:
    raise ValueError(f'--task {options.task} needs --data, the private file.')
  if options.eval == options.data:
    raise ValueError(f'--eval {options.eval} is --data, but has to be public.')
  if options.eval is None:
    raise ValueError('--data needs --eval, a public file of the same form.')
  if options.head == 'released' and options.target_epsilon is None:
    raise ValueError(
      '--head released has a share of the budget, but --target-epsilon is not '
      'given.'
    )
  if options.optimizer == NOT_PRIVATE:
    for name in ('target_epsilon', 'noise_multiplier', 'delta'):
      value = getattr(options, name)
      if value is not None:
        said = _said(name, value)
        raise ValueError(f'{said}: --optimizer adamw is not private.')
    return
  if (options.target_epsilon is None) == (options.noise_multiplier is None):
    raise ValueError(
      'Expected one of --target-epsilon and --noise-multiplier, got '
      f'{options.target_epsilon} and {options.noise_multiplier}.'
    )
  if options.delta is None:
    raise ValueError('--delta is needed, well below 1 / dataset size.')
