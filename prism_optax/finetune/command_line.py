"""The commands of ``prism-optax`` and their options, as types for ``tyro``.

``tyro`` makes options of types. It is developed actively, under the MIT
licence, and needs three small packages; typer needs pydantic and rich as well.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import tyro

from . import options
from .train_command import Train


@dataclasses.dataclass
class Predict:
  """Labels with probabilities, or responses, for the rows of a file."""

  run: tyro.conf.Positional[str]
  """Folder of a finished run."""
  data: str
  """Rows: JSON lines, .csv, .parquet or a folder of datasets; a label or
  response is not needed."""
  output: str | None = None
  """JSON lines, row by row; None prints them."""
  max_new_tokens: int = 128
  """Most tokens of a response."""
  temperature: float = 0.0
  """0 takes the likeliest token; above, one is drawn."""
  seed: int = 0
  """Of what is drawn."""
  batch_size: int = 8
  """Rows at once."""
  before: bool = False
  """As the model was before it was adapted (language models only)."""


@dataclasses.dataclass
class Chat:
  """Talks with a language model, adapted or as it was."""

  run: tyro.conf.Positional[str]
  """Folder of a finished run."""
  system: str | None = None
  """The system message; None leaves it to the chat template."""
  max_new_tokens: int = 256
  """Most tokens of a response."""
  temperature: float = 0.0
  """0 takes the likeliest token; above, one is drawn."""
  seed: int = 0
  """Of what is drawn."""
  before: bool = False
  """As the model was before it was adapted."""


@dataclasses.dataclass
class Export:
  """Writes the result for other programs, with a model card."""

  run: tyro.conf.Positional[str]
  """Folder of a finished run."""
  output: str
  """Folder to write."""
  format: Literal['peft', 'merged', 'safetensors'] = 'peft'
  """peft: the adapter; merged: the whole model in the layout of the hub;
  safetensors: all that was trained under the names used here."""
  base: bool = False
  """peft: also write the frozen weights, to OUTPUT/base, as they were used."""
  max_shard_size: str | None = None
  """Language models: most bytes of a file of weights, such as 5GB; None writes
  one file."""


@dataclasses.dataclass
class Report:
  """One HTML page about runs, made of public figures."""

  runs: tyro.conf.Positional[tuple[str, ...]]
  """Folders of runs, to be compared."""
  output: str = 'report.html'
  """The page."""
  rows: int = 0
  """Also run the models: accuracy of each class, or so many public prompts with
  the answers before and after."""


@dataclasses.dataclass
class CheckData:
  """Says what of a private file can be used. NOT private: keep it to
  yourself."""

  data: str
  """Private rows."""
  eval: str | None = None
  """Public rows: their labels, if --labels is not given."""
  task: Literal['classify', 'instruct'] = 'classify'
  """What the rows are for."""
  text_column: str = 'text'
  """classify: the text."""
  label_column: str = 'label'
  """classify: the label."""
  labels: tuple[str, ...] | None = None
  """classify: names of the classes."""
  prompt_column: str = 'prompt'
  """instruct: the prompt."""
  response_column: str = 'response'
  """instruct: the response."""
  messages_column: str = 'messages'
  """instruct: a list of messages."""
  max_length: int = options.DEFAULTS['instruct']['max_length']
  """instruct: tokens of a record."""
  model: str = 'smollm2'
  """instruct: whose tokens are counted."""


COMMANDS = {
  'train': Train,
  'predict': Predict,
  'chat': Chat,
  'export': Export,
  'report': Report,
  'check-data': CheckData,
}
Command = Train | Predict | Chat | Export | Report | CheckData


def parse(argv: Sequence[str], description: str | None = None) -> Command:
  """The command that is asked for; ``train`` where none is named.

  Raises:
    SystemExit: After ``--help``, and for what cannot be read.
  """
  argv = list(argv)
  if not argv or (argv[0].startswith('-') and argv[0] not in ('-h', '--help')):
    argv = ['train', *argv]
  return tyro.extras.subcommand_cli_from_dict(
    COMMANDS,
    prog='prism-optax',
    description=description,
    args=argv,
    config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
  )
