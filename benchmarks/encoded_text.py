"""Texts behind the frozen layers of MiniLM, and the layers above as a function.

Where LoRA sits in the top layers only, what the layers below them compute
never changes: it is computed once, cached on disk, and a training step costs
the top layers alone. The model is a pure function of plain trees, so that
methods which change the parametrisation (full matrices, a frozen factor,
another gauge) are one line each.
"""

import hashlib
import json
import pathlib
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROOT = pathlib.Path(__file__).parents[1]
for folder in (str(ROOT), str(ROOT / 'examples')):
  if folder not in sys.path:
    sys.path.insert(0, folder)

from finetuning.models import minilm, weights  # noqa: E402

MODULES = ('query', 'key', 'value', 'output', 'up', 'down')
HEADS = 12


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

  def take(self, rows: np.ndarray) -> 'Texts':
    return Texts(*(x[rows] for x in self))


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
  folder = weights.find(None)
  ids = minilm.tokenize(folder, texts, length)
  digest = hashlib.sha256(ids.tobytes() + bytes([top_layers])).hexdigest()[:16]
  path = cache / f'{digest}.npy'
  if not path.exists():
    cache.mkdir(parents=True, exist_ok=True)
    encoder = minilm.load(folder)

    @jax.jit
    def below(ids):
      mask = ids != 0
      tokens = encoder.words(ids) + encoder.positions(jnp.arange(length))
      tokens = encoder.norm(tokens.reshape(-1, encoder.hidden_size))
      for layer in list(encoder.layers)[: len(encoder.layers) - top_layers]:
        tokens = layer(tokens, mask)
      return tokens.reshape(*ids.shape, -1).astype(jnp.float16)

    chunk = 256
    padded = np.pad(ids, ((0, -len(ids) % chunk), (0, 0)))
    # Under another name until it is whole: an interrupted run leaves none.
    partial = path.with_suffix('.partial.npy')
    out = np.lib.format.open_memmap(
      partial, 'w+', np.float16, (len(ids), length, encoder.hidden_size)
    )
    for start in range(0, len(ids), chunk):
      rows = np.asarray(below(padded[start : start + chunk]))
      out[start : start + chunk] = rows[: len(ids) - start]
      print(f'  encoded {start} of {len(ids)}', end='\r', file=sys.stderr)
    out.flush()
    partial.rename(path)
  tokens = np.load(path, mmap_mode='r')
  return Texts(tokens, (ids != 0).sum(1).astype(np.int32), labels)


def frozen_layers(top_layers: int) -> list[dict[str, Any]]:
  """The pretrained top layers: kernels (in, out), biases, layer norms."""
  encoder = minilm.load(weights.find(None), rngs=nnx.Rngs(0))
  out = []
  for layer in list(encoder.layers)[-top_layers:]:
    dense = {
      **{name: getattr(layer.attention, name) for name in MODULES[:4]},
      **{name: getattr(layer.mlp, name) for name in MODULES[4:]},
    }
    entry: dict[str, Any] = {
      name: {'kernel': each.kernel[...], 'bias': each.bias[...]}
      for name, each in dense.items()
    }
    for name in ('attention_norm', 'mlp_norm'):
      norm = getattr(layer, name)
      entry[name] = {'scale': norm.scale[...], 'bias': norm.bias[...]}
    out.append(entry)
  return out


def layer_norm(weights, x):
  """Of the last axis, with ``scale`` and ``bias``."""
  mean = jnp.mean(x, -1, keepdims=True)
  variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
  normal = (x - mean) * jax.lax.rsqrt(variance + 1e-12)
  return normal * weights['scale'] + weights['bias']


def attend(query, key, value, mask, rows, heads):
  """Multi-head attention of ``(rows * length, hidden)`` arrays.

  ``mask`` is ``(rows or 1, length or 1, length)``, True where to look.
  """
  split = (rows, -1, heads, query.shape[-1] // heads)
  query, key, value = (x.reshape(split) for x in (query, key, value))
  scores = jnp.einsum('bqhd,bkhd->bhqk', query, key) * query.shape[-1] ** -0.5
  scores = jnp.where(mask[:, None], scores, jnp.finfo(scores.dtype).min)
  mixed = jnp.einsum('bhqk,bkhd->bqhd', jax.nn.softmax(scores), value)
  return mixed.reshape(mixed.shape[0] * mixed.shape[1], -1)


def adapted(weights_of, adapters_of, scale):
  """``dense(name, x)`` of one layer: kernel, bias and adapter."""

  def dense(name, x):
    adapter = adapters_of.get(name, {})
    kernel = adapter.get('kernel', weights_of[name]['kernel'])
    y = x @ kernel + weights_of[name]['bias']
    if 'lora_a' in adapter:
      y = y + scale * (x @ adapter['lora_a']) @ adapter['lora_b']
    return y

  return dense


def features(adapters, frozen, tokens, lengths, scale=1.0):
  """Sentence vectors of norm one.

  Args:
    adapters: For each layer a dict from ``MODULES`` to a pair ``lora_a (in,
      r)``, ``lora_b (r, out)``, or to a full ``kernel (in, out)``; modules may
      be absent.
    frozen: From :func:`frozen_layers`.
    tokens: ``(rows, length, hidden)``.
    lengths: ``(rows,)``.
    scale: alpha / r of the model.

  Returns:
    ``(rows, hidden)``.
  """
  rows, length, hidden = tokens.shape
  mask = jnp.arange(length) < lengths[:, None]
  x = tokens.astype(jnp.float32).reshape(-1, hidden)
  for weights_of, adapters_of in zip(frozen, adapters, strict=True):
    dense = adapted(weights_of, adapters_of, scale)
    parts = [dense(name, x) for name in MODULES[:3]]
    mixed = attend(*parts, mask[:, None], rows, HEADS)
    x = layer_norm(weights_of['attention_norm'], x + dense('output', mixed))
    inner = jax.nn.gelu(dense('up', x), approximate=False)
    x = layer_norm(weights_of['mlp_norm'], x + dense('down', inner))
  weight = mask.astype(x.dtype)
  total = jnp.einsum('bl,blh->bh', weight, x.reshape(rows, length, hidden))
  mean = total / jnp.maximum(weight.sum(1, keepdims=True), 1)
  # The floor keeps the gradient finite where a row has no token.
  return mean * jax.lax.rsqrt(
    jnp.maximum(jnp.sum(mean**2, -1, keepdims=True), 1e-12)
  )


def row_losses(params, frozen, tokens, lengths, labels, scale, temperature):
  """Cross-entropy of each row and whether it is right, ``(rows,)`` both.

  The head of ``params`` or else the frozen one; sentence vectors have norm one,
  ``temperature`` multiplies the logits. ``tokens`` may be :func:`features`,
  ``(rows, hidden)``: a linear probe.
  """
  vectors = tokens
  if tokens.ndim == 3:
    vectors = features(
      params['layers'], frozen['layers'], tokens, lengths, scale
    )
  head = params.get('head', frozen['head'])
  logits = temperature * (vectors @ head['kernel'] + head['bias'])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
  return losses, (jnp.argmax(logits, -1) == labels).astype(losses.dtype)
