"""The commands of ``prism-optax``: their help, read as their options.

A line ``--name N  ci: what it is [1 2 3]`` is an option with a whole number,
for the tasks classify and instruct only, and with these defaults for the three
tasks; ``[1]`` is one for all, ``-`` none. Nothing is imported that takes time:
a wrong option and ``--help`` are answered at once.
"""

import argparse
import contextlib
import difflib
import importlib.resources
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

TASKS = ('digits', 'classify', 'instruct')
# What follows clip and noise; see ``methods``. Without privacy: adamw.
METHODS = ('prism', 'dp-muon', 'dp-adamw', 'adamw')
NOT_PRIVATE = 'adamw'
# What --lora-targets may name, and what --model may say instead of a folder.
TARGETS = ('attention', 'mlp')
SMOLLM2 = 'smollm2'

_TEXTS = importlib.resources.files(__package__).joinpath('help.txt')
OVERVIEW, *_HELP = re.split(r'\n(?=usage: )', _TEXTS.read_text('utf-8'))
COMMANDS = {text.split()[2]: text for text in _HELP}


class Option(NamedTuple):
  """An option of a command.

  Attributes:
    read: Makes a value of a text; None for a flag.
    tasks: For which it has a meaning.
    defaults: What it is where it is not given, for each task.
    many: Whether it takes several values.
  """

  read: Callable[[str], Any] | None
  tasks: tuple[str, ...]
  defaults: dict[str, Any]
  many: bool


def _checked(
  read: Callable[[str], Any], fits: Callable[[Any], object], expected: str
) -> Callable[[str], Any]:
  def checked(text: str) -> Any:
    with contextlib.suppress(ValueError):
      value = read(text)
      if fits(value):
        return value
    raise argparse.ArgumentTypeError(f'expected {expected}, got {text}')

  return checked


def _devices(text: str) -> int:
  return int(text[5:] if text.startswith('data=') else '0')


KINDS = {
  'N': _checked(int, lambda x: x >= 1, 'a whole number of at least 1'),
  'K': _checked(int, lambda x: x >= 0, 'a whole number of at least 0'),
  'X': _checked(float, lambda x: 0 < x < math.inf, 'a positive number'),
  'Y': _checked(float, lambda x: 0 <= x < math.inf, 'a number of at least 0'),
  'P': _checked(float, lambda x: 0 < x < 1, 'a number between 0 and 1'),
  'data=N': _checked(_devices, lambda n: n >= 1, 'data=N with N >= 1'),
  'SIZE': _checked(
    str.upper, re.compile(r'[1-9]\d*[KMG]B').fullmatch, 'such as 5GB or 200MB'
  ),
}


def options(text: str) -> dict[str, Option]:
  """The options that a help describes, by their names with underscores."""
  found = {}
  # A line that begins far to the right goes on with the one before it.
  for line in re.sub(r'\n {20,}', ' ', text).splitlines():
    match = re.match(
      r'  --([\w-]+)(?: (?! )(\S+))? +(?:([ci]+): )?.*?(?:\[(.+)\])?$', line
    )
    if match is None:
      continue
    name, kind, marks, given = match.groups()
    many, kind = (kind or '')[-3:] == '...', (kind or '').removesuffix('...')
    choices = kind.split('|')
    one_of = _checked(str, choices.__contains__, f'one of {", ".join(choices)}')
    read = KINDS.get(kind, one_of if choices[1:] else str)
    tasks = tuple(x for x in TASKS if marks is None or x[0] in marks)
    values = (given or '-').split()
    values = values * len(TASKS) if len(values) == 1 else values
    defaults = {
      task: None if value == '-' else read(value)
      for task, value in zip(TASKS, values, strict=True)
      if task in tasks
    }
    found[name.replace('-', '_')] = Option(
      read if kind else None, tasks, defaults, many
    )
  return found


class _Parser(argparse.ArgumentParser):
  """Shows a given help, and refuses as everything else is refused here."""

  help: str

  def format_help(self) -> str:
    return self.help

  def error(self, message: str) -> NoReturn:
    raise ValueError(f'{message.removeprefix("argument ")} (see --help).')


def parse(argv: Sequence[str]) -> argparse.Namespace:
  """The command that is asked for, and its options.

  Options of ``train`` that are not given are None: a run that goes on has the
  values that it began with.

  Raises:
    ValueError: For what cannot be read.
    SystemExit: After ``--help``.
  """
  name = argv[0] if argv else '--help'
  parser = _Parser(allow_abbrev=False)
  parser.help = text = COMMANDS.get(name, OVERVIEW)
  if name not in COMMANDS:
    parser.parse_args([name])
  if 'RUN' in text:
    many = 'RUN...' in text
    parser.add_argument('runs' if many else 'run', nargs='+' if many else None)
  found = options(text)
  for key, option in found.items():
    flag = f'--{key.replace("_", "-")}'
    if option.read is None:
      parser.add_argument(flag, action='store_true')
      continue
    default = next(iter(option.defaults.values()))
    parser.add_argument(
      flag,
      type=option.read,
      nargs='+' if option.many else None,
      default=None if name == 'train' else default,
      required=f'{flag} ' in text.splitlines()[0],
    )
  used, unknown = parser.parse_known_args(argv[1:])
  if unknown:
    flags = [f'--{key.replace("_", "-")}' for key in found]
    near = difflib.get_close_matches(unknown[0], flags, 1)
    hint = f'; did you mean {near[0]}?' if near else ''
    parser.error(f'unknown: {" ".join(unknown)}{hint}')
  used.command = name
  return used
