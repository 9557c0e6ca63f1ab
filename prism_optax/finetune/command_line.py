"""The commands of ``prism-optax`` and their options, and what reads them.

Nothing is imported that takes time: a wrong option and ``--help`` are answered
at once.
"""

import argparse
import difflib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

TASKS = ('digits', 'classify', 'instruct')
# What follows clip and noise; see ``methods``. Without privacy: adamw.
METHODS = ('prism', 'prism-rows', 'dp-muon', 'dp-adamw', 'adamw')
NOT_PRIVATE = 'adamw'
# What --lora-targets may name, and what --model may say instead of a folder.
TARGETS = ('attention', 'mlp')
SMOLLM2 = 'smollm2'


class Kind(NamedTuple):
  """How a value is shown in the help, and how it is read."""

  shown: str
  read: Callable[[str], Any] = str


class Option(NamedTuple):
  """One option of a command.

  Attributes:
    kind: A kind, the choices, or bool for a flag.
    help: One line of help.
    default: The value where it is not given; of ``train`` also a dictionary
      with the value of each task. A text in parentheses is only shown.
    tasks: The tasks of ``train`` for which it has a meaning.
    many: Whether it takes several values.
  """

  kind: Kind | tuple[str, ...] | type[bool]
  help: str
  default: Any = None
  tasks: tuple[str, ...] = TASKS
  many: bool = False


def _number(
  kind: type[int] | type[float], fits: Callable[[float], bool], expected: str
) -> Callable[[str], Any]:
  def read(text: str) -> int | float:
    try:
      value = kind(text)
    except ValueError:
      value = math.nan
    if not fits(value):
      raise argparse.ArgumentTypeError(f'expected {expected}, got {text}')
    return value

  return read


def _devices(text: str) -> int:
  axis, _, number = text.partition('=')
  if axis != 'data' or not number.isdecimal() or int(number) < 1:
    raise argparse.ArgumentTypeError(f'expected data=N with N >= 1, got {text}')
  return int(number)


COUNT = Kind('N', _number(int, lambda x: x >= 1, 'a number of at least 1'))
SEED = Kind('N', _number(int, lambda x: x >= 0, 'a number of at least 0'))
POSITIVE = Kind(
  'X', _number(float, lambda x: 0 < x < math.inf, 'a positive number')
)
AT_LEAST_0 = Kind(
  'X', _number(float, lambda x: 0 <= x < math.inf, 'a number of at least 0')
)
SHARE = Kind(
  'X', _number(float, lambda x: 0 < x < 1, 'a number between 0 and 1')
)
FILE, FOLDER, NAME = Kind('FILE'), Kind('FOLDER'), Kind('NAME')


def _each(*values: Any) -> dict[str, Any]:
  return dict(zip(TASKS, values, strict=True))


TEXTS, CHATS = ('classify',), ('instruct',)
FILES = TEXTS + CHATS
COLUMNS = {
  'text-column': Option(NAME, 'classify: the text', 'text', TEXTS),
  'label-column': Option(NAME, 'classify: the label', 'label', TEXTS),
  'prompt-column': Option(NAME, 'instruct: the prompt', 'prompt', CHATS),
  'response-column': Option(NAME, 'the response', 'response', CHATS),
  'messages-column': Option(NAME, 'or all messages', 'messages', CHATS),
}
LABELS = Option(
  NAME, 'classes, or a file of them', '(as in --eval)', TEXTS, True
)
ROWS = 'rows: JSON lines, .csv, .parquet, or a folder of datasets'
RUN = Option(Kind('RUN'), 'folder of a finished run')
BEFORE = Option(bool, 'the model as it was before it was adapted')
TEMPERATURE = Option(AT_LEAST_0, '0 takes the likeliest token', 0.0)

THREE = (
  'Of three defaults the first is that of digits, then classify, instruct.'
)
# Groups of options by their titles.
Options = dict[str, dict[str, Option]]
TRAIN: Options = {
  'what is learned': {
    'task': Option(TASKS, 'a demo, labels of texts, or responses to prompts'),
    'data': Option(FILE, f'PRIVATE {ROWS}', None, FILES),
    'eval': Option(FILE, 'PUBLIC rows of the same form', None, FILES),
    **COLUMNS,
    'labels': LABELS,
    'max-length': Option(
      COUNT, 'tokens of a row; the rest is cut', _each(None, 48, 256), FILES
    ),
    'loss-divisor': Option(
      COUNT, 'of a sum over tokens; constant', '(--max-length)', CHATS
    ),
  },
  'what is guaranteed for one row of --data': {
    'target-epsilon': Option(
      POSITIVE, 'with the least noise that meets it', _each(8.0, None, None)
    ),
    'noise-multiplier': Option(AT_LEAST_0, 'instead of --target-epsilon'),
    'delta': Option(
      SHARE, 'well below 1 / dataset size', _each(1e-4, None, None)
    ),
    'dataset-size': Option(
      COUNT, 'DECLARED PUBLIC, at least all rows', '(all rows)', FILES
    ),
    'batch-size': Option(COUNT, 'EXPECTED rows; constant', _each(128, 256, 64)),
    'l2-clip-norm': Option(POSITIVE, "of one row's gradient", 1.0),
    'seed': Option(SEED, 'for tests: VOIDS the guarantee'),
    'skip-padding': Option(bool, "faster; a step's time tells its rows"),
    'nonprivate-diagnostics': Option(
      bool, 'measure private batches, NOT covered'
    ),
  },
  'how it is learned': {
    'optimizer': Option(
      METHODS, 'adamw is NOT private', _each(None, 'prism', 'prism')
    ),
    'learning-rate': Option(
      POSITIVE, 'at the start of a cosine', '(by optimizer and task)'
    ),
    'steps': Option(COUNT, 'updates', _each(150, 300, 200)),
    'rank': Option(COUNT, 'of the adapters', _each(4, 8, 8)),
    'lora-targets': Option(TARGETS, 'what is adapted', [*TARGETS], TASKS, True),
    'lora-layers': Option(COUNT, 'adapt the top layers only', '(all)'),
    'model': Option(
      FOLDER,
      'a MiniLM; a Llama, Mistral, Qwen 2 or 3',
      _each(None, None, SMOLLM2),
      FILES,
    ),
    'weights-dtype': Option(
      ('float32', 'bfloat16', 'int8'), 'frozen weights', 'float32', CHATS
    ),
    'microbatch-size': Option(
      COUNT, 'rows in memory at once', _each(52, 32, 4)
    ),
    'mesh': Option(Kind('data=N', _devices), 'split batches over N devices', 1),
  },
  'what is written': {
    'output': Option(FOLDER, 'of the results', '(runs/TASK-TIME)'),
    'resume': Option(bool, 'go on with the run in --output'),
    'eval-every': Option(COUNT, 'steps', 25),
    'checkpoint-every': Option(COUNT, 'steps', 10),
    'keep-checkpoints': Option(bool, 'keep the secret state at the end'),
  },
}
COMMANDS: dict[str, tuple[str, Options]] = {
  'train': ('adapt a model to private rows, or go on with a run', TRAIN),
  'predict': (
    'label or answer the rows of a file, one JSON object a row',
    {
      '': {
        'run': RUN,
        'data': Option(FILE, ROWS),
        'output': Option(FILE, 'JSON lines', '(printed)'),
        'max-new-tokens': Option(COUNT, 'of a response', 128),
        'temperature': TEMPERATURE,
        'seed': Option(SEED, 'of what is drawn', 0),
        'batch-size': Option(COUNT, 'rows at once', 8),
        'before': BEFORE,
      }
    },
  ),
  'chat': (
    'talk with a language model, adapted or as it was',
    {
      '': {
        'run': RUN,
        'system': Option(Kind('TEXT'), 'the system message'),
        'max-new-tokens': Option(COUNT, 'of a response', 256),
        'temperature': TEMPERATURE,
        'seed': Option(SEED, 'of what is drawn', 0),
        'before': BEFORE,
      }
    },
  ),
  'export': (
    'write the result for other programs, with a model card',
    {
      '': {
        'run': RUN,
        'output': Option(FOLDER, 'to write'),
        'format': Option(('peft', 'merged'), 'adapter or whole model', 'peft'),
        'base': Option(bool, 'also write the frozen weights, to OUTPUT/base'),
        'max-shard-size': Option(
          Kind('SIZE'), 'of a file of weights, such as 5GB', '(one file)'
        ),
      }
    },
  ),
  'report': (
    'write one HTML page about runs, made of public figures',
    {
      '': {
        'runs': Option(Kind('RUN'), 'folders of runs', None, TASKS, True),
        'output': Option(FILE, 'the page', 'report.html'),
        'rows': Option(
          SEED, 'also answer so many public rows, or count by class', 0
        ),
      }
    },
  ),
  'check-data': (
    'count what of a private file can be used; NOT private',
    {
      '': {
        'data': Option(FILE, f'private {ROWS}'),
        'eval': Option(FILE, 'public rows, for their labels'),
        'task': Option(FILES, 'what the rows are for', 'classify'),
        **COLUMNS,
        'labels': LABELS,
        'max-length': Option(COUNT, 'instruct: tokens of a row', 256),
        'model': Option(FOLDER, 'instruct: whose tokens count', SMOLLM2),
      }
    },
  ),
}
POSITIONAL = ('run', 'runs')
REQUIRED = {'predict': ['data'], 'export': ['output'], 'check-data': ['data']}


def default(option: Option, task: str = '') -> Any:
  """The value of an option that is not given."""
  value = option.default
  if isinstance(value, dict):
    return value.get(task)
  return None if isinstance(value, str) and value[:1] == '(' else value


def parse(
  argv: Sequence[str], description: str | None = None
) -> argparse.Namespace:
  """The command that is asked for, and its options.

  Options of ``train`` that are not given are None: a run that goes on has the
  values that it began with.

  Raises:
    ValueError: For what cannot be read.
    SystemExit: After ``--help``.
  """
  parser = _Parser(
    prog='prism-optax',
    description=description,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  commands = parser.add_subparsers(
    dest='command', metavar='COMMAND', required=True
  )
  for name, (summary, groups) in COMMANDS.items():
    command = commands.add_parser(
      name,
      help=summary,
      description=f'{summary[0].upper()}{summary[1:]}.',
      epilog=THREE if name == 'train' else None,
      usage=f'prism-optax {name} {_positional(groups)}[options]',
      formatter_class=_Formatter,
      allow_abbrev=False,
    )
    for title, options in groups.items():
      group = command.add_argument_group(title) if title else command
      for key, option in options.items():
        _add(group, name, key, option)
  used, unknown = parser.parse_known_args(argv)
  if unknown:
    known = [
      f'--{key}' for x in COMMANDS[used.command][1].values() for key in x
    ]
    near = difflib.get_close_matches(unknown[0], known, 1)
    hint = f'; did you mean {near[0]}?' if near else ''
    parser.error(f'unknown: {" ".join(unknown)}{hint}')
  return used


class _Parser(argparse.ArgumentParser):
  """Refuses as everything else is refused here."""

  def error(self, message: str) -> NoReturn:
    raise ValueError(f'{message.removeprefix("argument ")} (see --help).')


class _Formatter(argparse.HelpFormatter):
  """One line for each option, where it fits."""

  def __init__(self, prog: str):
    super().__init__(prog, max_help_position=28)


def _add(
  group: argparse._ActionsContainer, command: str, key: str, option: Option
) -> None:
  how: dict[str, Any] = {'help': option.help}
  if option.kind is bool:
    how['action'] = 'store_true'
  else:
    kind = option.kind if isinstance(option.kind, Kind) else None
    how |= {'type': kind.read} if kind else {'choices': option.kind}
    how['metavar'] = kind.shown if kind else '|'.join(option.kind)
    how |= {'nargs': '+'} if option.many else {}
    if command != 'train':
      how['default'] = default(option)
    shown = _shown(option)
    how['help'] += f' ({shown})' if shown else ''
  if key in POSITIONAL:
    group.add_argument(key, **how)
  else:
    how['required'] = key in REQUIRED.get(command, ())
    group.add_argument(f'--{key}', **how)


def _positional(groups: Options) -> str:
  keys = [key for group in groups.values() for key in group]
  return 'RUN ' if 'run' in keys else 'RUN ... ' if 'runs' in keys else ''


def _shown(option: Option) -> str:
  """The default, for the help."""
  value = option.default
  if isinstance(value, dict):
    values = {task: f'{x}' for task, x in value.items() if x is not None}
    if len(values) == len(TASKS):
      return ', '.join(values.values())
    return ', '.join(f'{task} {x}' for task, x in values.items())
  value = ' '.join(value) if isinstance(value, list) else value
  return '' if value is None else f'{value}'.strip('()')
