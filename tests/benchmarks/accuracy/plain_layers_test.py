"""Plain trees through the layers of the examples, against dense formulas."""

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks.accuracy import plain_layers, small_decoder
from prism_optax.finetune.models import layers, minilm, vit

HIDDEN, INNER, HEADS, ROWS, LENGTH, RANK = 12, 20, 3, 2, 5, 2
CONFIG = minilm.Config(
  vocab_size=7, hidden_size=HIDDEN, num_hidden_layers=1,
  num_attention_heads=HEADS, intermediate_size=INNER,
  max_position_embeddings=9, layer_norm_eps=1e-12,
)  # fmt: skip


def post_norm(rank):
  return minilm.Layer(CONFIG, minilm.LoraConfig(rank), 0, nnx.Rngs(0))


def pre_norm(rank):
  config = vit.Config(hidden=HIDDEN, heads=HEADS, inner=INNER)
  return vit.Block(config, rank, ('attention', 'mlp'), nnx.Rngs(0))


def random_layer(rng):
  sizes = dict.fromkeys(plain_layers.MODULES[:4], (HIDDEN, HIDDEN))
  sizes |= {'up': (HIDDEN, INNER), 'down': (INNER, HIDDEN)}
  out = {
    name: {
      'kernel': rng.normal(size=size) / 3,
      'bias': rng.normal(size=size[1]),
    }
    for name, size in sizes.items()
  }
  for name in ('attention_norm', 'mlp_norm'):
    out[name] = {
      'scale': rng.normal(size=HIDDEN), 'bias': rng.normal(size=HIDDEN)
    }  # fmt: skip
  return out


def random_pairs(rng, weights):
  return {
    name: {
      'lora_a': rng.normal(size=(weights[name]['kernel'].shape[0], RANK)),
      'lora_b': rng.normal(size=(RANK, weights[name]['kernel'].shape[1])),
    }
    for name in plain_layers.MODULES
  }


def dense_layer(weights, x, visible, pre):
  """One layer in NumPy, sequence by sequence and head by head."""

  def dense(name, x):
    return x @ weights[name]['kernel'] + weights[name]['bias']

  def norm(name, x):
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
    return normal * weights[name]['scale'] + weights[name]['bias']

  def attention(x):
    out = np.empty_like(x)
    for row, seen in zip(range(len(x)), visible, strict=True):
      q, k, v = (dense(n, x[row]) for n in ('query', 'key', 'value'))
      for part in np.split(np.arange(HIDDEN), HEADS):
        scores = q[:, part] @ k[:, part].T / np.sqrt(len(part))
        share = np.where(seen, np.exp(scores), 0)
        share /= share.sum(-1, keepdims=True)
        out[row][:, part] = share @ v[:, part]
    return dense('output', out)

  def mlp(x):
    inner = np.float64(jax.nn.gelu(dense('up', x), approximate=False))
    return dense('down', inner)

  if pre:
    x = x + attention(norm('attention_norm', x))
    return x + mlp(norm('mlp_norm', x))
  x = norm('attention_norm', x + attention(x))
  return norm('mlp_norm', x + mlp(x))


@pytest.mark.parametrize('pre', [False, True])
@pytest.mark.parametrize('kind', ['none', 'pairs', 'kernels'])
def test_layers_are_the_formulas(pre, kind):
  """Adapters add ``scale A B``; full kernels take the frozen ones' place."""
  rng = np.random.default_rng(0)
  weights, scale = random_layer(rng), 0.5
  adapters, whole = {}, dict(weights)
  if kind == 'pairs':
    adapters = random_pairs(rng, weights)
    for name, pair in adapters.items():
      kernel = weights[name]['kernel']
      kernel = kernel + scale * pair['lora_a'] @ pair['lora_b']
      whole[name] = {**weights[name], 'kernel': kernel}
  if kind == 'kernels':
    for name in plain_layers.MODULES:
      kernel = rng.normal(size=weights[name]['kernel'].shape) / 3
      adapters[name] = {'kernel': kernel}
      whole[name] = {**weights[name], 'kernel': kernel}
  x = rng.normal(size=(ROWS, LENGTH, HIDDEN))
  there = np.arange(LENGTH) < np.array([[3], [5]])
  # Where the mask is causal as well, the last axis alone is not enough.
  visible = np.broadcast_to(there[:, None], (ROWS, LENGTH, LENGTH))
  mask = there
  if pre:
    visible = np.broadcast_to(np.tri(LENGTH, dtype=bool), visible.shape)
    mask = visible[:1]
  module = plain_layers.layer(
    pre_norm if pre else post_norm,
    *jax.tree.map(np.float32, (weights, adapters)),
    scale,
  )
  forward = nnx.jit(lambda module, x, mask: module(x, mask))
  found = forward(module, np.float32(x.reshape(-1, HIDDEN)), mask)
  want = dense_layer(whole, x, visible, pre).reshape(-1, HIDDEN)
  # Entries of order ten in float32; nnx's norm of the blocks has 1e-6.
  np.testing.assert_allclose(found, want, rtol=2e-4, atol=2e-4)


def test_weights_come_out_as_they_went_in():
  rng = np.random.default_rng(0)
  weights = jax.tree.map(np.float32, random_layer(rng))
  back = plain_layers.weights_of(plain_layers.layer(post_norm, weights, {}))
  jax.tree.map(np.testing.assert_array_equal, back, weights)


def test_a_mask_of_pairs_is_a_mask_of_tokens():
  """A mask (batch, length) written out as (batch, length, length)."""
  attention = layers.Attention(HIDDEN, HEADS, rank=0, rngs=nnx.Rngs(0))
  rng = np.random.default_rng(0)
  tokens = np.float32(rng.normal(size=(ROWS * LENGTH, HIDDEN)))
  mask = np.arange(LENGTH) < np.array([[3], [5]])
  pairs = np.broadcast_to(mask[:, None], (ROWS, LENGTH, LENGTH))
  forward = nnx.jit(lambda module, x, mask: module(x, mask))
  np.testing.assert_array_equal(
    forward(attention, tokens, mask), forward(attention, tokens, pairs)
  )


@pytest.mark.slow
def test_the_decoder_sees_nothing_of_what_comes():
  """Two targets count: what stands behind their inputs does not matter."""
  frozen = jax.jit(small_decoder.initial)(jax.random.key(0))
  nothing = {'layers': [{} for _ in frozen['layers']]}
  ids = np.array([[2, 5, 9, 0, 0]])
  row_losses = jax.jit(small_decoder.row_losses)

  def loss(moved):
    positions = np.array(frozen['positions'])
    positions[moved] *= -5.0
    changed = {**frozen, 'positions': positions}
    return float(row_losses(nothing, changed, ids)[0][0])

  # No entry of a masked score is left after the softmax.
  assert loss(2) == loss(3)
  assert abs(loss(1) - loss(2)) > 1e-4
