"""What is fine-tuned on what: a model, a private file and a public one."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import data, digits, instructions, pretraining, training
from .models import chat, classifier, llama_files, minilm, pretrained, vit
from .models.layers import LoraConfig
from .options import Options

# Sharpness of the softmax over normalised features: logits of a unit vector
# reach this, and the gradient of the head is at most so long.
TEXT_TEMPERATURE = 8.0


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
    make_loss: From ``graphdef`` to what is minimised.
    make_evaluate: From ``graphdef`` and the public rows to what measures.
  """

  name: str
  graphdef: Any
  params: Any
  frozen: Any
  train: data.Examples
  evaluation: data.Examples
  labels: tuple[str, ...]
  base: dict[str, Any]
  make_loss: Callable[..., Any] = training.make_loss
  make_evaluate: Callable[..., Any] = training.make_evaluate

  @property
  def chance(self) -> float | None:
    """Share of the commonest class of the public rows, if there are classes."""
    if not self.labels:
      return None
    return float(np.bincount(self.evaluation.labels).max()) / len(
      self.evaluation.labels
    )


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
  where = LoraConfig(
    options.rank, tuple(options.lora_targets), options.lora_layers
  )
  if options.task == 'instruct':
    dtype = jnp.dtype(options.weights_dtype)
    return llama_files.load(source, where, dtype=dtype)
  encoder = minilm.load(source, where, nnx.Rngs(0))
  return classifier.Classifier(
    encoder,
    encoder.hidden_size,
    len(options.labels),
    temperature=TEXT_TEMPERATURE,
    rngs=nnx.Rngs(1),
  )


def text_classification(options: Options) -> Task:
  """all-MiniLM-L6-v2 with adapters and a linear head on two text files."""
  # Files before weights: a wrong path should not cost the time to load them.
  public = data.read_public(options)
  # From here on a constant of the run, whatever becomes of the file.
  options.labels = data.label_set(options.labels, public.labels)
  private = data.read_private(options)
  data.require_other_rows(
    [*zip(*private, strict=True)], [*zip(*public, strict=True)], options
  )
  source = pretrained.find(options.model)
  model = network(options, source)
  _require_length(options, 3, model.encoder.positions.num_embeddings)

  def encode(file: data.TextFile) -> data.Examples:
    return data.Examples(
      minilm.tokenize(source.where, file.texts, options.max_length),
      data.encode_labels(file.labels, options.labels),
    )

  return Task(
    pathlib.Path(options.data).resolve().parent.name,
    *classifier.split(model),
    train=encode(private),
    evaluation=data.chosen(encode(public), options.eval_rows),
    labels=tuple(options.labels),
    base=source.base,
  )


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
  return Task(
    pathlib.Path(options.data).resolve().parent.name,
    *classifier.split(model),
    train=instructions.encode(private, talk, options.max_length),
    evaluation=evaluation,
    labels=(),
    base=source.base | facts,
    make_loss=functools.partial(
      training.make_loss, divisor=options.loss_divisor
    ),
    make_evaluate=functools.partial(
      training.make_evaluate, chunk=options.microbatch_size
    ),
  )


def mirrored_digits(options: Options, folder: pathlib.Path) -> Task:
  """A vision transformer pretrained on upright digits, to be adapted.

  Args:
    options: Of the run: ``rank`` and ``lora_targets``.
    folder: The pretrained weights are kept here, and read if they are.
  """
  public, private, evaluation = digits.load()
  encoder = vit.VisionTransformer(
    vit.Config(),
    rank=options.rank,
    targets=options.lora_targets,
    rngs=nnx.Rngs(0),
  )
  network = classifier.Classifier(
    encoder,
    vit.Config().hidden,
    len(digits.LABELS),
    temperature=pretraining.TEMPERATURE,
    rngs=nnx.Rngs(1),
  )
  digest = pretraining.pretrain_or_load(
    network, public, folder / 'pretrained.safetensors'
  )
  graphdef, params, frozen = classifier.split(network)
  return Task(
    'digits',
    graphdef,
    params,
    jax.device_put(frozen),
    train=private,
    evaluation=evaluation,
    labels=digits.LABELS,
    base={'model': 'vit-digits', 'sha256': digest},
  )
