"""The commands of ``prism-optax``: their help, which is read as their options.

A line ``--name N  ci: what it is [1 2 3]`` is an option with a whole number,
for the tasks classify and instruct only, and with these defaults for the three
tasks; ``[1]`` is one for all, ``-`` none. Nothing is imported that takes time:
a wrong option and ``--help`` are answered at once.
"""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

TASKS = ('digits', 'classify', 'instruct')
# What follows clip and noise; see ``methods``. Without privacy: adamw.
METHODS = ('prism', 'prism-rows', 'dp-muon', 'dp-adamw', 'adamw')
NOT_PRIVATE = 'adamw'
# What --lora-targets may name, and what --model may say instead of a folder.
TARGETS = ('attention', 'mlp')
SMOLLM2 = 'smollm2'

TRAIN = """\
usage: prism-optax train [options]

Adapts a model to private rows, or goes on with a run. c: and i: mark options
of the tasks classify and instruct. Defaults: [one], [digits classify instruct].

What is learned:
  --task digits|classify|instruct  a demo, labels of texts, answers to prompts
  --data FILE            ci: PRIVATE rows: JSON lines, .csv, .parquet, or a
                         folder that the library datasets saved
  --eval FILE            ci: PUBLIC rows of the same form, other ones
  --eval-rows N          ci: most of them that are measured [- 1000 200]
  --text-column NAME     c: the text [text]
  --label-column NAME    c: the label [label]
  --labels NAME...       c: classes, or a file of them (those of --eval)
  --prompt-column NAME   i: the prompt [prompt]
  --response-column NAME i: the response [response]
  --messages-column NAME i: all messages, used where a row has them [messages]
  --max-length N         ci: tokens of a row; the rest is cut off [- 48 256]
  --loss-divisor N       i: constant under the sum over a row's tokens
                         (--max-length)

What is guaranteed for one row of --data:
  --target-epsilon X     by the least noise that meets it [8 - -]
  --noise-multiplier Y   instead of --target-epsilon
  --delta P              well below 1 / dataset size [1e-4 - -]
  --dataset-size N       ci: DECLARED PUBLIC, at least all rows (their number)
  --batch-size N         EXPECTED number of rows; constant [128 256 64]
  --l2-clip-norm X       of the gradient of one row [1]
  --seed K               for tests: NOT private against anyone who knows K
  --skip-padding         faster; the time of a step then tells its rows
  --nonprivate-diagnostics  measure private batches too: NOT covered

How it is learned:
  --optimizer prism|prism-rows|dp-muon|dp-adamw|adamw  adamw is NOT private
                         [- prism prism]
  --learning-rate X      at the start of a cosine decay (by optimizer,
                         task and steps)
  --steps N              updates [150 300 200]
  --rank N               of the adapters [4 8 8]
  --lora-targets attention|mlp...  what is adapted (both)
  --lora-layers N        adapt only so many top layers (all)
  --model FOLDER         ci: a MiniLM; or a Llama, Mistral, Qwen 2 or 3 in the
                         layout of the hub, or smollm2 [- - smollm2]
  --weights-dtype float32|bfloat16|int8  i: frozen weights [float32]
  --microbatch-size N    rows in memory at once [52 32 4]
  --mesh data=N          split batches over N devices [data=1]

What is written:
  --output FOLDER        results (runs/TASK-TIME)
  --resume               go on with the run in --output
  --eval-every N         steps [25]
  --checkpoint-every N   steps [10]
"""
PLAN = """\
usage: prism-optax plan --dataset-size N --target-epsilon X --delta P [options]

Chooses steps, batch and noise from public numbers alone.

  --dataset-size N       records, or users; declared
  --target-epsilon X     of the training
  --delta P              well below 1 / dataset size
  --example-gradients X  so many are affordable (any number)
  --hours X              affordable hours, instead of --example-gradients
  --gradients-per-second X  with --hours
  --examples-per-user N  for privacy of users: the most that one has in a batch
  --picture FILE         PNG of the alternatives
"""
PREDICT = """\
usage: prism-optax predict RUN --data FILE [options]

Labels with probabilities, or responses: one JSON object for each row.

  --data FILE            JSON lines, .csv, .parquet or a folder of datasets; a
                         label or response is not needed
  --text-column NAME     the text, if not as in training
  --prompt-column NAME   the prompt, if not as in training
  --output FILE          JSON lines (printed)
  --max-new-tokens N     of a response [128]
  --temperature Y        0 takes the likeliest token [0]
  --seed K               of what is drawn [0]
  --batch-size N         rows at once [8]
  --before               as the language model was before it was adapted
"""
CHAT = """\
usage: prism-optax chat RUN [options]

Talks with a language model. An empty line begins anew; Ctrl-D ends.

  --system TEXT          the system message
  --max-new-tokens N     of a response [256]
  --temperature Y        0 takes the likeliest token [0]
  --seed K               of what is drawn [0]
  --before               as the model was before it was adapted
"""
EXPORT = """\
usage: prism-optax export RUN --output FOLDER [options]

Writes the result for other programs, with a model card.

  --output FOLDER        a new one
  --format peft|merged   the adapter, or the whole model [peft]
  --check                read it back, and compare the logits
  --base                 peft: also the frozen weights, to OUTPUT/base
  --max-shard-size SIZE  of a language model's files, such as 5GB (one file)
"""
REPORT = """\
usage: prism-optax report RUN... [options]

Writes one HTML page about runs, made of public figures.

  --output FILE          the page [report.html]
  --rows K               also run the models: accuracy of each class, or K
                         prompts with the answers before and after [0]
"""
CHECK_DATA = """\
usage: prism-optax check-data --data FILE [options]

Counts what of a private file can be used. NOT private: keep it to yourself.

  --data FILE            private rows
  --eval FILE            public rows: their labels, without --labels, and how
                         many rows are in both files
  --task classify|instruct  what the rows are for [classify]
  --text-column NAME     c: the text [text]
  --label-column NAME    c: the label [label]
  --labels NAME...       c: classes, or a file of them
  --prompt-column NAME   i: the prompt [prompt]
  --response-column NAME i: the response [response]
  --messages-column NAME i: all messages [messages]
  --max-length N         i: tokens of a row [256]
  --model FOLDER         i: the model whose tokens are counted [smollm2]
"""
AUDIT = """\
usage: prism-optax audit RUN [options]

Trains as a run did, on its PUBLIC rows and planted records, and says what they
prove: more than the claimed epsilon means that the claim is wrong.

  --canaries N           planted records, of the declared size [1000]
  --noise Y              again with this share of the noise, to see a mistake
"""
COMMANDS = {
  'train': TRAIN,
  'plan': PLAN,
  'predict': PREDICT,
  'chat': CHAT,
  'export': EXPORT,
  'report': REPORT,
  'check-data': CHECK_DATA,
  'audit': AUDIT,
}


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


def _one_of(*choices: str) -> Callable[[str], str]:
  def read(text: str) -> str:
    if text not in choices:
      expected = f'expected one of {", ".join(choices)}, got {text}'
      raise argparse.ArgumentTypeError(expected)
    return text

  return read


KINDS = {
  'N': _number(int, lambda x: x >= 1, 'a whole number of at least 1'),
  'K': _number(int, lambda x: x >= 0, 'a whole number of at least 0'),
  'X': _number(float, lambda x: 0 < x < math.inf, 'a positive number'),
  'Y': _number(float, lambda x: 0 <= x < math.inf, 'a number of at least 0'),
  'P': _number(float, lambda x: 0 < x < 1, 'a number between 0 and 1'),
  'data=N': _devices,
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
    read = KINDS.get(kind, _one_of(*kind.split('|')) if '|' in kind else str)
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


def parse(argv: Sequence[str], description: str = '') -> argparse.Namespace:
  """The command that is asked for, and its options.

  Options of ``train`` that are not given are None: a run that goes on has the
  values that it began with.

  Args:
    argv: The words of the command line.
    description: The help without a command.

  Raises:
    ValueError: For what cannot be read.
    SystemExit: After ``--help``.
  """
  name = argv[0] if argv else '--help'
  parser = _Parser(allow_abbrev=False)
  parser.help = text = COMMANDS.get(name, description)
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
