"""A small decoder of word problems: pretrained on the spot on public text.

Two layers of width 128 over a vocabulary of 1,000 byte pairs. The public text
is short sentences of other kinds (reviews, commands, questions to a bank), so
what private training has to learn is the language of arithmetic. Its layers
are the blocks of the examples' vision transformer, behind a causal mask.
"""

import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from flax import nnx

from benchmarks.accuracy import plain_layers
from prism_optax.finetune.models import vit

WIDTH, LAYERS, HEADS, INNER, VOCABULARY = 128, 2, 4, 512, 1000
PUBLIC = ('sst2/train', 'clinc150/train', 'banking77/train')
PUBLIC_ROWS, PUBLIC_STEPS, PUBLIC_BATCH = 12_000, 400, 64


def _rows(folder: pathlib.Path, name: str) -> list[dict]:
  path = folder / f'{name}.jsonl'
  return [json.loads(line) for line in path.open(encoding='utf-8')]


def private_texts(folder: pathlib.Path) -> list[str]:
  """Questions with their worked answers, of gsm8k and of mawps."""
  return [
    *(
      f'{x["question"]} {x["rationale"]}' for x in _rows(folder, 'gsm8k/train')
    ),
    *(
      f'{x["question"]} {x["equation"]} {x["answer"]}'
      for x in _rows(folder, 'mawps/train')
    ),
  ]


def public_texts(folder: pathlib.Path) -> list[str]:
  """A fixed sample of each public file."""
  rng = np.random.default_rng(1)
  out = []
  for name in PUBLIC:
    texts = [row['text'] for row in _rows(folder, name)]
    rows = rng.permutation(len(texts))[:PUBLIC_ROWS]
    out += [texts[i] for i in rows]
  return out


def tokenizer(folder: pathlib.Path, cache: pathlib.Path):
  """Byte pairs of the public text; 0 is padding."""
  path = cache / 'byte_pairs.json'
  if path.exists():
    return tokenizers.Tokenizer.from_file(str(path))
  out = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token='?'))
  out.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
  out.train_from_iterator(
    public_texts(folder),
    tokenizers.trainers.BpeTrainer(
      vocab_size=VOCABULARY,
      special_tokens=['<pad>', '?', '<start>'],
      initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    ),
  )
  cache.mkdir(parents=True, exist_ok=True)
  out.save(str(path))
  return out


def encode(pairs, texts: list[str], length: int) -> np.ndarray:
  """``(rows, length + 1)``: a start, then byte pairs, cut or padded."""
  out = np.zeros((len(texts), length + 1), np.int32)
  out[:, 0] = pairs.token_to_id('<start>')
  for row, encoded in zip(out, pairs.encode_batch(texts), strict=True):
    ids = encoded.ids[:length]
    row[1 : len(ids) + 1] = ids
  return out


def initial(key: jax.Array) -> dict[str, Any]:
  """Random weights."""
  keys = iter(jax.random.split(key, 6 * LAYERS + 2))

  def dense(rows, columns):
    kernel = jax.random.normal(next(keys), (rows, columns)) * rows**-0.5
    return {'kernel': kernel, 'bias': jnp.zeros(columns)}

  def norm():
    return {'scale': jnp.ones(WIDTH), 'bias': jnp.zeros(WIDTH)}

  layers = []
  for _ in range(LAYERS):
    layer = {name: dense(WIDTH, WIDTH) for name in plain_layers.MODULES[:4]}
    layer |= {'up': dense(WIDTH, INNER), 'down': dense(INNER, WIDTH)}
    layers.append(layer | {'attention_norm': norm(), 'mlp_norm': norm()})
  return {
    'words': 0.02 * jax.random.normal(next(keys), (VOCABULARY, WIDTH)),
    'positions': 0.02 * jax.random.normal(next(keys), (1024, WIDTH)),
    'norm': norm(),
    'layers': layers,
  }


def make_block(rank: int) -> vit.Block:
  """A block with adapters of this rank on all dense layers."""
  config = vit.Config(hidden=WIDTH, heads=HEADS, inner=INNER)
  return vit.Block(config, rank, ('attention', 'mlp'), nnx.Rngs(0))


def make_norm() -> nnx.LayerNorm:
  """The norm behind the last layer."""
  return nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))


def row_losses(
  params: dict[str, Any],
  frozen: dict[str, Any],
  ids: jax.Array,
  scale: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  """Mean next-token cross-entropy and accuracy of each row, ``(rows,)``."""
  inputs, targets = ids[:, :-1], ids[:, 1:]
  rows, length = inputs.shape
  x = frozen['words'][inputs] + frozen['positions'][:length]
  x = x.reshape(rows * length, WIDTH)
  causal = jnp.tril(jnp.ones((1, length, length), bool))
  for fixed, trained in zip(frozen['layers'], params['layers'], strict=True):
    x = plain_layers.layer(make_block, fixed, trained, scale)(x, causal)
  x = plain_layers.filled(frozen['norm'], make_norm)(x)
  logits = (x @ frozen['words'].T).reshape(rows, length, VOCABULARY)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
  there = (targets != 0).astype(losses.dtype)
  count = jnp.maximum(there.sum(1), 1)
  right = (jnp.argmax(logits, -1) == targets) * there
  return (losses * there).sum(1) / count, right.sum(1) / count


def pretrained(
  folder: pathlib.Path, cache: pathlib.Path, length: int
) -> dict[str, Any]:
  """Weights after training on public text, or those an earlier run kept."""
  path = cache / f'decoder_{length}.npz'
  weights = initial(jax.random.key(0))
  leaves, treedef = jax.tree.flatten(weights)
  if path.exists():
    with np.load(path) as stored:
      leaves = [jnp.asarray(stored[str(i)]) for i in range(len(leaves))]
    return jax.tree.unflatten(treedef, leaves)
  ids = encode(tokenizer(folder, cache), public_texts(folder), length)
  schedule = optax.warmup_cosine_decay_schedule(0, 2e-3, 40, PUBLIC_STEPS)
  adamw = optax.adamw(schedule)
  nothing = {'layers': [{} for _ in range(LAYERS)]}

  @jax.jit
  def step(weights, state, ids):
    loss, grads = jax.value_and_grad(
      lambda w: jnp.mean(row_losses(nothing, w, ids)[0])
    )(weights)
    updates, state = adamw.update(grads, state, weights)
    return optax.apply_updates(weights, updates), state, loss

  state, rng = adamw.init(weights), np.random.default_rng(0)
  for t in range(PUBLIC_STEPS):
    rows = rng.integers(0, len(ids), PUBLIC_BATCH)
    weights, state, loss = step(weights, state, ids[rows])
    if t % 20 == 0:
      print(f'  public step {t}: {loss:.3f}', end='\r', file=sys.stderr)
  arrays = {
    str(i): np.asarray(x) for i, x in enumerate(jax.tree.leaves(weights))
  }
  np.savez(path, **arrays)
  return weights
