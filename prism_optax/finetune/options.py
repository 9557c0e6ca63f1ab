"""The options of ``train``: what they are, and what is refused."""

import math
import os
import pathlib
import time
import types
from collections.abc import Iterable
from typing import Any

from . import files

# What follows clip and noise; see ``methods``. Without privacy: adamw.
METHODS = ('prism', 'prism-rows', 'dp-muon', 'dp-adamw', 'adamw')
NOT_PRIVATE = 'adamw'
# What --lora-targets may name.
TARGETS = ('attention', 'mlp')
# What --model may say instead of a folder.
SMOLLM2 = 'smollm2'
# Learning rates at the start of the cosine, found by hand on the evaluation
# set. Digits, means of four runs (standard errors to .009) at 1e-2, 2e-2, 4e-2,
# 8e-2: prism .827, .859, .880, .848. Means of three at 1e-2, 2e-2, 3e-2, 6e-2:
# dp-adamw .832, .859, .852, .762. At 3e-3, 1e-2, 3e-2: dp-muon .484, .817, .841
# (and .538 at 1e-1); adamw .900, .938, .935. prism-rows has those of prism.
LEARNING_RATES = {
  'digits': {'prism': 4e-2, 'prism-rows': 4e-2, 'dp-muon': 3e-2,
             'dp-adamw': 2e-2, 'adamw': 1e-2},
  'classify': {'prism': 1e-2, 'prism-rows': 1e-2, 'dp-muon': 1e-2,
               'dp-adamw': 5e-3, 'adamw': 2e-3},
  'instruct': {'prism': 5e-3, 'prism-rows': 5e-3, 'dp-muon': 5e-3,
               'dp-adamw': 1e-3, 'adamw': 1e-3},
}  # fmt: skip
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
  'classify': {
    'rank': 8,
    'steps': 300,
    'batch_size': 256,
    'microbatch_size': 32,
    'eval_every': 25,
    'optimizer': 'prism',
    'text_column': 'text',
    'label_column': 'label',
    'max_length': 48,
  },
  'instruct': {
    'rank': 8,
    'steps': 200,
    'batch_size': 64,
    'microbatch_size': 4,
    'eval_every': 25,
    'optimizer': 'prism',
    'prompt_column': 'prompt',
    'response_column': 'response',
    'messages_column': 'messages',
    'max_length': 256,
    'model': SMOLLM2,
    'weights_dtype': 'float32',
  },
}
# And for all of them.
COMMON: dict[str, Any] = {
  'l2_clip_norm': 1.0,
  'lora_targets': list(TARGETS),
  'init_seed': 0,
  'checkpoint_every': 10,
  'nonprivate_diagnostics': False,
  'skip_padding': False,
  'keep_checkpoints': False,
}
# What has no meaning for the other tasks.
ONLY = {
  'classify': (
    *('data', 'eval', 'dataset_size', 'model', 'max_length'),
    *('labels', 'text_column', 'label_column'),
  ),
  'instruct': (
    *('data', 'eval', 'dataset_size', 'model', 'max_length', 'loss_divisor'),
    *('prompt_column', 'response_column', 'messages_column', 'weights_dtype'),
  ),
}
Options = types.SimpleNamespace


def shown_default(name: str) -> str:
  """What an option is if it is not given, for the help."""
  if name == 'learning_rate':
    return 'of the method and the task'
  values = {
    task: defaults[name]
    for task, defaults in DEFAULTS.items()
    if name in defaults
  }
  if name in COMMON:
    values = {'': COMMON[name]}
  texts = {
    task: ' '.join(value) if isinstance(value, list) else f'{value}'
    for task, value in values.items()
  }
  if len(set(texts.values())) == 1 and set(texts) != {'digits'}:
    return next(iter(texts.values()))
  return ', '.join(f'{task} {text}' for task, text in texts.items())


def resolve(given: dict[str, Any]) -> Options:
  """Completes and checks the options.

  Args:
    given: What the command line says, None for what it does not.

  Returns:
    The options with defaults filled in, or, with ``--resume``, the ones that
    the run began with.

  Raises:
    ValueError: If an option is out of range, options contradict each other or
      the stored ones, what is stored are no options, or the output folder is
      taken.
  """
  given = dict(given)
  resume = given.pop('resume')
  if resume:
    if given['output'] is None:
      raise ValueError('--resume needs --output, the folder to go on with.')
    folder = pathlib.Path(given['output'])
    path = folder / 'options.json'
    if not path.exists():
      raise ValueError(f'--resume: there is no run in {folder} (no {path}).')
    stored = read(path, given)
    for name, value in absolute(given).items():
      if value is not None and name != 'output' and value != stored.get(name):
        raise ValueError(
          f'--resume: --{name.replace("_", "-")} {value} contradicts the run '
          f'in {folder}, which has {stored.get(name)}.'
        )
    return Options(**stored | {'output': str(folder)})
  task = given['task']
  if task is None:
    task = given['task'] = 'digits' if given['data'] is None else 'classify'
  defaults = COMMON | DEFAULTS[task]
  defaults['output'] = time.strftime(f'runs/{task}-%Y%m%d-%H%M%S')
  if given['noise_multiplier'] is not None:
    defaults.pop('target_epsilon', None)
  options = Options(**given, plan=None)
  devices = mesh_devices(options.mesh)
  # The default micro-batch fits any mesh; one that was asked for has to.
  defaults['microbatch_size'] = (
    -(-defaults['microbatch_size'] // devices) * devices
  )
  for name, value in defaults.items():
    if getattr(options, name) is None:
      setattr(options, name, value)
  if task == 'instruct' and options.loss_divisor is None:
    options.loss_divisor = options.max_length
  check(options)
  folder = pathlib.Path(options.output)
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(
      f'--output {folder} is not empty. Go on with the run in it by '
      f'--resume, or choose another folder.'
    )
  # Before minutes are spent on a model. The folder is not made yet.
  there = next(x for x in (folder, *folder.absolute().parents) if x.exists())
  if not there.is_dir() or not os.access(there, os.W_OK):
    raise ValueError(
      f'--output {folder} cannot be written: {there} is no folder that you may '
      'write to.'
    )
  return options


def read(path: pathlib.Path, names: Iterable[str]) -> dict[str, Any]:
  """The options that a run wrote down.

  Args:
    path: Its ``options.json``.
    names: All options of today. One that the run does not know yet has its
      default: a new option's default must be what was done before it. If it is
      not, a run does not go on all the same: what decides the release is in
      the fingerprint of its state, which is compared.

  Raises:
    ValueError: If they are no options, or a later version's.
  """
  stored = files.read_json(path)
  task = stored.get('task')
  if task not in list(DEFAULTS):
    raise ValueError(
      f'{path}: expected a task of {list(DEFAULTS)}, got {task}.'
    )
  names = set(names) - {'resume'} | {'plan', 'base'}
  unknown = sorted(stored.keys() - names)
  if unknown:
    raise ValueError(
      f'{path}: the run has the options {unknown}, which are unknown here: a '
      'later version began it.'
    )
  return dict.fromkeys(names) | COMMON | DEFAULTS[task] | stored


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
    if given[name] is not None and given[name] != SMOLLM2
  }


def check(options: Options) -> None:
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
    'max_length',
    'loss_divisor',
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
  for name, value in vars(options).items():
    tasks = [task for task in ONLY if name in ONLY[task]]
    if tasks and options.task not in tasks and value is not None:
      option = f'--{name.replace("_", "-")} {value}'
      if options.data is None:
        raise ValueError(f'{option} needs --data.')
      raise ValueError(
        f'{option} is for --task {" or ".join(tasks)}, not {options.task}.'
      )
  if options.task == 'digits':
    return
  if options.data is None:
    raise ValueError(f'--task {options.task} needs --data, the private file.')
  if options.eval is None:
    raise ValueError('--data needs --eval, a public file of the same form.')
  if options.optimizer == NOT_PRIVATE:
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
