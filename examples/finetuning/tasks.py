"""What is fine-tuned on what: a model, a private file and a public one."""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from . import data, digits, pretraining
from .models import classifier, minilm, vit, weights

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
    labels: Names of the classes.
    base: Public facts about the frozen weights, to recognise them again.
  """

  name: str
  graphdef: Any
  params: nnx.State
  frozen: nnx.State
  train: data.Examples
  evaluation: data.Examples
  labels: tuple[str, ...]
  base: dict[str, Any]


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
    train_path: Private JSON lines.
    evaluation_path: Public JSON lines.
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
  encoder = minilm.load(folder, lora, nnx.Rngs(init_seed))
  network = classifier.Classifier(
    encoder,
    config.hidden_size,
    len(names),
    temperature=TEXT_TEMPERATURE,
    rngs=nnx.Rngs(init_seed + 1),
  )
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


def mirrored_digits(
  folder: pathlib.Path, *, rank: int, targets: Sequence[str], init_seed: int
) -> Task:
  """A vision transformer pretrained on upright digits, to be adapted.

  Args:
    folder: The pretrained weights are kept here, and read if they are.
    rank: Rank of the adapters.
    targets: Keys of ``layers.TARGETS``.
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
