"""What is fine-tuned on what: a model, a private file and a public one."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import data, digits, instructions, language, pretraining, training
from .models import (
  chat,
  classifier,
  llama_files,
  minilm,
  pretrained,
  vit,
  weights,
)

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
  params: nnx.State
  frozen: nnx.State
  train: data.Examples
  evaluation: data.Examples
  labels: tuple[str, ...]
  base: dict[str, Any]
  make_loss: Callable = training.make_loss
  make_evaluate: Callable = training.make_evaluate


def text_classification(
  train_path: str,
  evaluation_path: str,
  *,
  labels: Sequence[str] | None,
  text_column: str,
  label_column: str,
  max_length: int,
  model: str | None,
  lora: minilm.LoraConfig,
  init_seed: int,
) -> Task:
  """all-MiniLM-L6-v2 with adapters and a linear head on two text files.

  Args:
    train_path: Private rows, see ``files.read``.
    evaluation_path: Public rows.
    labels: See ``data.label_set``.
    text_column: Key of the text in both files.
    label_column: Key of the label in both files.
    max_length: Tokens of a text; the rest is cut off.
    model: See ``weights.find``.
    lora: Where adapters go.
    init_seed: Seed of the initial adapters and head, which are public.

  Raises:
    ValueError: For what is wrong with a file, the labels or an option.
  """
  # Files before weights: a wrong path should not cost the time to load them.
  public = data.read_public(evaluation_path, text_column, label_column)
  names = data.label_set(labels, public.labels)
  private = data.read_private(train_path, text_column, label_column)
  folder = weights.find(model)
  config = minilm.Config.read(folder)
  if not 3 <= max_length <= config.max_position_embeddings:
    raise ValueError(
      f'Expected 3 <= --max-length <= {config.max_position_embeddings}, got '
      f'{max_length}.'
    )
  network = text_classifier(folder, len(names), lora, init_seed)
  graphdef, params, frozen = classifier.split(network)

  def encode(file: data.TextFile) -> data.Examples:
    return data.Examples(
      minilm.tokenize(folder, file.texts, max_length),
      data.encode_labels(file.labels, names),
    )

  return Task(
    name=pathlib.Path(train_path).resolve().parent.name,
    graphdef=graphdef,
    params=params,
    frozen=frozen,
    train=encode(private),
    evaluation=encode(public),
    labels=names,
    base={
      'model': weights.HUB_NAME if model is None else pathlib.Path(model).name,
      'sha256': weights.sha256(folder / 'model.safetensors'),
    },
  )


def text_classifier(
  folder: pathlib.Path, classes: int, lora: minilm.LoraConfig, init_seed: int
) -> classifier.Classifier:
  """The encoder in a folder with adapters and a head, before training."""
  encoder = minilm.load(folder, lora, nnx.Rngs(init_seed))
  return classifier.Classifier(
    encoder,
    encoder.hidden_size,
    classes,
    temperature=TEXT_TEMPERATURE,
    rngs=nnx.Rngs(init_seed + 1),
  )


def language_model(
  train_path: str,
  evaluation_path: str,
  *,
  columns: instructions.Columns,
  max_length: int,
  loss_divisor: int,
  model: str,
  weights_dtype: str,
  lora: minilm.LoraConfig,
  microbatch_size: int,
  init_seed: int,
) -> Task:
  """A causal language model with adapters on two files of conversations.

  Args:
    train_path: Private rows.
    evaluation_path: Public rows.
    columns: Where a row has its conversation.
    max_length: Tokens of a record; the rest is cut off.
    loss_divisor: See ``language.make_loss``.
    model: See ``pretrained.find``.
    weights_dtype: Type of the frozen weights.
    lora: Where adapters go.
    microbatch_size: Rows at once in the evaluation.
    init_seed: Seed of the initial adapters, which are public.

  Raises:
    ValueError: For what is wrong with a file, the model or an option.
  """
  public = instructions.read_public(evaluation_path, columns)
  private = instructions.read_private(train_path, columns)
  source = pretrained.find(model)
  talk = chat.Chat(source)
  evaluation = instructions.encode(public, talk, max_length)
  if not (evaluation.labels != data.BLANK).any():
    raise ValueError(
      f'--max-length {max_length}: the prompts of --eval leave no room for a '
      'response.'
    )
  network = llama_files.load(
    source, lora, dtype=jnp.dtype(weights_dtype), seed=init_seed
  )
  if max_length > network.config.max_length:
    raise ValueError(
      f'Expected --max-length <= {network.config.max_length}, got {max_length}.'
    )
  graphdef, params, frozen = classifier.split(network)
  return Task(
    name=pathlib.Path(train_path).resolve().parent.name,
    graphdef=graphdef,
    params=params,
    frozen=frozen,
    train=instructions.encode(private, talk, max_length),
    evaluation=evaluation,
    labels=(),
    base=source.base
    | {'loss_divisor': loss_divisor, 'weights_dtype': weights_dtype},
    make_loss=functools.partial(language.make_loss, divisor=loss_divisor),
    make_evaluate=functools.partial(
      language.make_evaluate, chunk=microbatch_size
    ),
  )


def mirrored_digits(
  folder: pathlib.Path, *, rank: int, targets: Sequence[str], init_seed: int
) -> Task:
  """A vision transformer pretrained on upright digits, to be adapted.

  Args:
    folder: The pretrained weights are kept here, and read if they are.
    rank: Rank of the adapters.
    targets: Keys of ``options.TARGETS``.
    init_seed: Seed of the initial adapters, which are public.
  """
  public, private, evaluation = digits.load()
  network = classifier.Classifier(
    vit.VisionTransformer(
      vit.Config(), rank=rank, targets=targets, rngs=nnx.Rngs(init_seed)
    ),
    vit.Config().hidden,
    len(digits.LABELS),
    temperature=pretraining.TEMPERATURE,
    rngs=nnx.Rngs(init_seed + 1),
  )
  digest = pretraining.pretrain_or_load(
    network, public, folder / 'pretrained.safetensors'
  )
  graphdef, params, frozen = classifier.split(network)
  return Task(
    name='digits',
    graphdef=graphdef,
    params=params,
    frozen=jax.device_put(frozen),
    train=private,
    evaluation=evaluation,
    labels=digits.LABELS,
    base={'model': 'vit-digits', 'sha256': digest},
  )
