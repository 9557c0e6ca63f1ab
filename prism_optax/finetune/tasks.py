"""What is fine-tuned on what: a model, a private file and a public one."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from prism_optax.contrib import heads

from . import data, digits, instructions, training
from .models import chat, classifier, llama_files, minilm, pretrained, vit
from .models.layers import LoraConfig
from .options import Options

# Sharpness of the softmax over normalised features: logits of a unit vector
# reach this, and the gradient of the head is at most so long.
TEMPERATURE = 8.0


@dataclasses.dataclass(frozen=True)
class Task:
  """Everything the training loop needs to know about model and data.

  Attributes:
    name: For reports.
    graphdef: Static part of the model, for ``nnx.merge``.
    params: Trainable leaves: adapters and head.
    frozen: All other leaves.
    train: Private rows.
    evaluation: Public rows.
    labels: Names of the classes; none for a language model.
    base: Public facts about the frozen weights, to recognise them again.
    loss: What is minimised, see ``training.make_loss``.
    evaluate: What measures, see ``training.make_evaluate``.
    head: What was released of the private rows before the training, if
      something was; it is the head in ``params``.
  """

  name: str
  graphdef: Any
  params: Any
  frozen: Any
  train: data.Examples
  evaluation: data.Examples
  labels: tuple[str, ...]
  base: dict[str, Any]
  loss: Callable[..., Any]
  evaluate: Callable[..., Any]
  head: heads.LinearHead | None = None

  @property
  def chance(self) -> float | None:
    """Share of the commonest class of the public rows, if there are classes."""
    if not self.labels:
      return None
    shares = np.bincount(self.evaluation.labels) / len(self.evaluation.labels)
    return shares.max()


def make(name, model, train, public, labels, base, divisor=1, chunk=64) -> Task:
  """The task of a model.

  Args:
    name: See :class:`Task`.
    model: Adapters and head at their start.
    train: Private rows.
    public: Those of the evaluation.
    labels: See :class:`Task`.
    base: See :class:`Task`.
    divisor: Of the loss, see ``training.make_loss``.
    chunk: Public rows at once, see ``training.make_evaluate``.
  """
  parts = classifier.split(model)
  loss = training.make_loss(parts[0], divisor)
  evaluate = training.make_evaluate(parts[0], public, chunk)
  rows = train, public
  return Task(name, *parts, *rows, tuple(labels), base, loss, evaluate)


def read(options: Options, output: pathlib.Path) -> Task:
  """The task of a run.

  Args:
    options: Of the run.
    output: Its folder; the demo keeps its pretrained weights there.

  Raises:
    ValueError: For what is wrong with a file, the model or an option.
  """
  if options.task == 'digits':
    return mirrored_digits(options, output)
  if options.task == 'classify':
    return text_classification(options)
  return language_model(options)


def network(options: Options, source: pretrained.Pretrained) -> Any:
  """The model of a run before training: adapters, and a head on an encoder."""
  targets = tuple(options.lora_targets)
  where = LoraConfig(options.rank, targets, options.lora_layers)
  if options.task == 'instruct':
    dtype = jnp.dtype(options.weights_dtype)
    return llama_files.load(source, where, dtype=dtype)
  encoder = minilm.load(source, where)
  sizes = encoder.hidden_size, len(options.labels)
  return classifier.Classifier(encoder, *sizes, TEMPERATURE, nnx.Rngs(1))


def text_classification(options: Options) -> Task:
  """all-MiniLM-L6-v2 with adapters and a linear head on two text files."""
  # Files before weights: a wrong path should not cost the time to load them.
  public = data.read_public(options)
  # From here on a constant of the run, whatever becomes of the file.
  options.labels = data.label_set(options.labels, public.labels)
  private = data.read_private(options)
  pairs = [[*zip(*file, strict=True)] for file in (private, public)]
  data.require_other_rows(pairs[0], pairs[1], options)
  source = pretrained.find(options.model)
  model = network(options, source)
  _require_length(options, 3, model.encoder.positions.num_embeddings)

  def encode(file: data.TextFile) -> data.Examples:
    return data.Examples(
      minilm.tokenize(source.where, file.texts, options.max_length),
      data.encode_labels(file.labels, options.labels),
    )

  evaluation = data.chosen(encode(public), options.eval_rows)
  rows = encode(private), evaluation
  return make(_name(options), model, *rows, options.labels, source.base)


def _name(options: Options) -> str:
  return pathlib.Path(options.data).resolve().parent.name


def _require_length(options: Options, least: int, most: int) -> None:
  if not least <= options.max_length <= most:
    raise ValueError(
      f'Expected {least} <= --max-length <= {most}, got {options.max_length}.'
    )


def language_model(options: Options) -> Task:
  """A causal language model with adapters on two files of conversations."""
  public = instructions.read_public(options)
  private = instructions.read_private(options)
  data.require_other_rows(private, public, options)
  source = pretrained.find(options.model)
  talk = chat.Chat(source)
  evaluation = data.chosen(
    instructions.encode(public, talk, options.max_length), options.eval_rows
  )
  if not (evaluation.labels != data.BLANK).any():
    raise ValueError(
      f'--max-length {options.max_length}: the prompts of --eval leave no room '
      'for a response.'
    )
  model = network(options, source)
  _require_length(options, 1, model.config.max_length)
  facts = {x: getattr(options, x) for x in ('loss_divisor', 'weights_dtype')}
  rows = instructions.encode(private, talk, options.max_length), evaluation
  how = options.loss_divisor, options.microbatch_size
  return make(_name(options), model, *rows, (), source.base | facts, *how)


def mirrored_digits(options: Options, folder: pathlib.Path) -> Task:
  """A vision transformer pretrained on upright digits, to be adapted.

  Args:
    options: Of the run: ``rank`` and ``lora_targets``.
    folder: The pretrained weights are kept here, and read if they are.
  """
  public, private, evaluation = digits.load()
  encoder = vit.VisionTransformer(
    vit.Config(), options.rank, options.lora_targets, nnx.Rngs(0)
  )
  sizes, rngs = (vit.Config().hidden, len(digits.LABELS)), nnx.Rngs(1)
  model = classifier.Classifier(encoder, *sizes, digits.TEMPERATURE, rngs)
  path = folder / 'pretrained.safetensors'
  digest = digits.pretrain_or_load(model, public, path)
  base = {'model': 'vit-digits', 'sha256': digest}
  return make('digits', model, private, evaluation, digits.LABELS, base)
