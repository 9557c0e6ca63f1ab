"""Texts behind the frozen layers of MiniLM, and the layers above as a function.

Where LoRA sits in the top layers only, what the layers below them compute
never changes: it is computed once, cached on disk, and a training step costs
the top layers alone. The model is a pure function of plain trees, see
``plain_layers.py``.
"""

import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.accuracy import plain_layers
from prism_optax.finetune.models import classifier, layers, minilm, pretrained

ALL_MINILM_L6_V2 = minilm.Config(
  vocab_size=30522,
  hidden_size=384,
  num_hidden_layers=6,
  num_attention_heads=12,
  intermediate_size=1536,
  max_position_embeddings=512,
  layer_norm_eps=1e-12,
)


class Texts(NamedTuple):
  """Encoded rows of a labelled set.

  Attributes:
    tokens: ``(rows, length, 384)`` float16, the input of the top layers.
    lengths: ``(rows,)``, how many of the tokens are there.
    labels: ``(rows,)`` integers.
  """

  tokens: np.ndarray
  lengths: np.ndarray
  labels: np.ndarray


def read(
  path: pathlib.Path, label: str, unwanted: str | None = None
) -> tuple[list[str], np.ndarray, list[str]]:
  """Texts, label numbers and label names of a file of JSON lines."""
  rows = [json.loads(line) for line in path.open(encoding='utf-8')]
  rows = [row for row in rows if str(row[label]) != unwanted]
  names = sorted({str(row[label]) for row in rows})
  number = {name: i for i, name in enumerate(names)}
  labels = np.asarray([number[str(row[label])] for row in rows], np.int32)
  return [row['text'] for row in rows], labels, names


def encode(
  texts: list[str],
  labels: np.ndarray,
  *,
  length: int,
  top_layers: int,
  cache: pathlib.Path,
) -> Texts:
  """Runs everything below the top layers, or reads what an earlier run kept.

  Args:
    texts: The rows.
    labels: Their labels.
    length: Tokens of a row, the two special ones included; longer ones are
      cut.
    top_layers: How many layers are left to be trained.
    cache: Folder of the cached arrays, 15 kB a row at length 20.

  Returns:
    The rows, in order; ``tokens`` stays on disk.
  """
  source = pretrained.find(None)
  ids = minilm.tokenize(source.where, texts, length)
  digest = hashlib.sha256(ids.tobytes() + bytes([top_layers])).hexdigest()[:16]
  path = cache / f'{digest}.npy'
  if not path.exists():
    cache.mkdir(parents=True, exist_ok=True)
    encoder = minilm.load(source)

    @nnx.jit  # The weights are an argument: as constants they take seconds.
    def below(encoder, ids):
      mask = ids != 0
      tokens = encoder.words(ids) + encoder.positions(jnp.arange(length))
      tokens = encoder.norm(tokens.reshape(-1, encoder.hidden_size))
      for layer in list(encoder.layers)[: len(encoder.layers) - top_layers]:
        tokens = layer(tokens, mask)
      return tokens.reshape(*ids.shape, -1).astype(jnp.float16)

    chunk = min(256, len(ids))
    padded = np.pad(ids, ((0, -len(ids) % chunk), (0, 0)))
    # Under another name until it is whole, because a run may be interrupted; of
    # its own, because another process may encode the same texts.
    partial = path.with_suffix(f'.{os.getpid()}.npy')
    out = np.lib.format.open_memmap(
      partial, 'w+', np.float16, (len(ids), length, encoder.hidden_size)
    )
    for start in range(0, len(ids), chunk):
      rows = np.asarray(below(encoder, padded[start : start + chunk]))
      out[start : start + chunk] = rows[: len(ids) - start]
      print(f'  encoded {start} of {len(ids)}', end='\r', file=sys.stderr)
    out.flush()
    partial.replace(path)
  tokens = np.load(path, mmap_mode='r')
  return Texts(tokens, (ids != 0).sum(1).astype(np.int32), labels)


def frozen_layers(top_layers: int) -> list[plain_layers.Weights]:
  """The weights of the pretrained top layers."""
  encoder = minilm.load(pretrained.find(None))
  found = list(encoder.layers)[-top_layers:]
  return [plain_layers.weights_of(layer) for layer in found]


def make_layer(rank: int) -> minilm.Layer:
  """A layer of MiniLM with adapters of this rank on all dense layers."""
  return minilm.Layer(ALL_MINILM_L6_V2, minilm.LoraConfig(rank), 0, nnx.Rngs(0))


def features(
  adapters: list[plain_layers.Weights],
  frozen: list[plain_layers.Weights],
  tokens: jax.Array,
  lengths: jax.Array,
  scale: float = 1.0,
) -> jax.Array:
  """Sentence vectors: the means of the tokens.

  Args:
    adapters: For each layer, see :func:`plain_layers.layer`.
    frozen: From :func:`frozen_layers`.
    tokens: ``(rows, length, hidden)``.
    lengths: ``(rows,)``.
    scale: alpha / r of the model.

  Returns:
    ``(rows, hidden)``.
  """
  _, length, hidden = tokens.shape
  mask = jnp.arange(length) < lengths[:, None]
  x = tokens.astype(jnp.float32).reshape(-1, hidden)
  for fixed, trained in zip(frozen, adapters, strict=True):
    x = plain_layers.layer(make_layer, fixed, trained, scale)(x, mask)
  return layers.masked_mean(x, mask)


def row_losses(
  params: dict[str, Any],
  frozen: dict[str, Any],
  tokens: jax.Array,
  lengths: jax.Array,
  labels: jax.Array,
  scale: float,
  temperature: float,
  features: Callable[..., jax.Array] = features,
) -> tuple[jax.Array, jax.Array]:
  """Cross-entropy of each row and whether it is right, ``(rows,)`` both.

  The head is that of ``params`` or else the frozen one. ``tokens`` may be
  ``features`` of them, ``(rows, hidden)``: a linear probe.
  """
  vectors = tokens
  if tokens.ndim == 3:
    vectors = features(
      params['layers'], frozen['layers'], tokens, lengths, scale
    )
  head = params['head'] if 'head' in params else frozen['head']
  logits = classifier.logits_of(
    vectors, head['kernel'], head['bias'], temperature
  )
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses, (jnp.argmax(logits, -1) == labels).astype(losses.dtype)
