"""Time of a whole private training step of a decoder, by micro-batches.

    python benchmarks/decoder_step_time.py [--model gemma] [--rank 16]

Random weights in one of two shapes, adapters on q, k, v, up and down.
``gemma``: those of Gemma-3-4B (34 layers of width 2560 over a vocabulary of
262,144), bfloat16, 64 sequences of 256 in micro-batches of 4, for a GPU.
``small``: six layers of width 384, 32 sequences of 64 in micro-batches of 8.
Non-private AdamW, DP-AdamW, PRISM and DP-Muon in turn; the private ones with
jax-privacy's clip. Ratios within a round, and the compiled memory. Results go
to ``benchmarks/results/decoder_step_time_<platform>.json``.
"""

import argparse
import dataclasses
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import jax_privacy
import optax

ROOT = str(pathlib.Path(__file__).parents[1])
if ROOT not in sys.path:
  sys.path.insert(0, ROOT)

import prism_optax  # noqa: E402
from benchmarks import timing  # noqa: E402
from prism_optax import lora  # noqa: E402

METHODS = ('adamw, not private', 'dp-adamw', 'prism', 'dp-muon')
# One stack of all layers for each kind of weight: the layers are scanned.
LAYOUT = lora.Layout(a_stack_axes=(0,), b_stack_axes=(0,))


@dataclasses.dataclass(frozen=True)
class Shape:
  """Sizes of a decoder and of its batches."""

  layers: int
  width: int
  heads: int
  key_heads: int
  head: int
  inner: int
  vocabulary: int
  length: int
  batch: int
  microbatch: int
  dtype: Any = jnp.float32

  @property
  def dense(self) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the weights of a layer."""
    queries, keys = self.heads * self.head, self.key_heads * self.head
    return {
      'q': (self.width, queries),
      'k': (self.width, keys),
      'v': (self.width, keys),
      'output': (queries, self.width),
      'gate': (self.width, self.inner),
      'up': (self.width, self.inner),
      'down': (self.inner, self.width),
    }


ADAPTED = ('q', 'k', 'v', 'up', 'down')
SHAPES = {
  'gemma': Shape(
    34, 2560, 8, 4, 256, 10240, 262_144, 256, 64, 4, dtype=jnp.bfloat16
  ),
  'small': Shape(6, 384, 6, 6, 64, 1536, 1000, 64, 32, 8),
}


def weights(shape: Shape, key: jax.Array) -> dict[str, Any]:
  """Random frozen weights, each kind stacked over the layers."""
  keys = iter(jax.random.split(key, len(shape.dense) + 1))
  layers: dict[str, Any] = {
    name: (
      jax.random.normal(next(keys), (shape.layers, *size), shape.dtype)
      * size[0] ** -0.5
    )
    for name, size in shape.dense.items()
  }
  ones = jnp.ones((shape.layers, shape.width), shape.dtype)
  layers |= {'attention_norm': ones, 'mlp_norm': ones}
  words = (shape.vocabulary, shape.width)
  return {
    'layers': layers,
    'words': 0.02 * jax.random.normal(next(keys), words, shape.dtype),
  }


def adapters(shape: Shape, rank: int, key: jax.Array) -> dict[str, Any]:
  """The usual start: ``lora_a`` at random and ``lora_b`` zero."""
  return {
    name: {
      'lora_a': jax.random.normal(k, (shape.layers, shape.dense[name][0], rank))
      * shape.dense[name][0] ** -0.5,
      'lora_b': jnp.zeros((shape.layers, rank, shape.dense[name][1])),
    }
    for name, k in zip(ADAPTED, jax.random.split(key, 5), strict=True)
  }


def _normalized(scale, x):
  squares = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
  return scale * (x * jax.lax.rsqrt(squares + 1e-6)).astype(x.dtype)


def _rotated(x):
  """Rotary positions for (batch, length, heads, head)."""
  half = x.shape[-1] // 2
  angles = jnp.arange(x.shape[1])[:, None] * 1e4 ** (-jnp.arange(half) / half)
  cosine, sine = (
    f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin)
  )
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cosine - b * sine, b * cosine + a * sine], -1)


def make_loss(shape: Shape):
  """``loss(params, frozen, tokens)``: mean next-token cross-entropy.

  ``tokens`` are (batch, length + 1). Dense layers see (batch * length, width).
  """

  def layer(x, both):
    fixed, trained = both
    rows, length = x.shape[0] // shape.length, shape.length

    def dense(name, x):
      y = x @ fixed[name]
      if name in trained:
        a, b = (
          trained[name][leaf].astype(x.dtype) for leaf in ('lora_a', 'lora_b')
        )
        y = y + (x @ a) @ b
      return y

    y = _normalized(fixed['attention_norm'], x)
    q, k, v = (
      dense(name, y).reshape(rows, length, -1, shape.head)
      for name in ('q', 'k', 'v')
    )
    mixed = jax.nn.dot_product_attention(
      _rotated(q), _rotated(k), v, is_causal=True
    )
    x = x + dense('output', mixed.reshape(rows * length, -1))
    y = _normalized(fixed['mlp_norm'], x)
    return x + dense('down', jax.nn.gelu(dense('gate', y)) * dense('up', y))

  def loss(params, frozen, tokens):
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = frozen['words'][inputs].reshape(-1, shape.width)
    # Activations of one layer at a time are kept, as whoever trains it would.
    x, _ = jax.lax.scan(
      jax.checkpoint(lambda x, both: (layer(x, both), None)),
      x,
      (frozen['layers'], params),
    )
    x = _normalized(jnp.ones((), x.dtype), x)
    logits = (x @ frozen['words'].T).astype(jnp.float32)
    return jnp.mean(
      optax.softmax_cross_entropy_with_integer_labels(logits, targets.ravel())
    )

  return loss


def _plain_step(shape: Shape):
  """AdamW on the mean over micro-batches, in one backward pass each."""
  adamw, gradient = optax.adamw(1e-3), jax.grad(make_loss(shape))

  def step(carried, fixed):
    params, state = carried
    frozen, tokens = fixed
    parts = tokens.reshape(-1, shape.microbatch, tokens.shape[-1])
    total, _ = jax.lax.scan(
      lambda total, x: (optax.tree.add(total, gradient(params, frozen, x)), 0),
      optax.tree.zeros_like(params),
      parts,
    )
    mean = optax.tree.scale(1 / len(parts), total)
    updates, state = adamw.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  return adamw.init, step


def _unchanged(params: Any):
  del params
  return lambda gradients: gradients


def _private_method(name: str, shape: Shape, params: Any):
  """What one example's gradient becomes, and the chain behind the clip."""
  common = {
    'noise_multiplier': 1.0,
    'expected_batch_size': shape.batch,
    'prng_key': jax.random.key(0),
    'per_example_gradients': False,
  }
  if name == 'prism':
    tx = prism_optax.prism(1e-3, l2_clip_norm=1.0, layout=LAYOUT, **common)
    return lambda p: prism_optax.tangent_coordinates(p, layout=LAYOUT), tx
  if name == 'dp-muon':
    # Every leaf is a stack of matrices, clipped to an equal share of the norm.
    axes = {
      'weight_dimension_numbers': jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1),
        params,
      )
    }
    unit = prism_optax.per_matrix_clip(1.0, **axes)
    share = 1 / unit.sensitivity(params=params)
    tx = prism_optax.dp_muon(1e-3, l2_clip_norms=share, **axes, **common)
    clip = prism_optax.clip_each_matrix(share, **axes)
    return lambda params: clip, tx
  privatizer = jax_privacy.noise_addition.gaussian_privatizer(
    stddev=1 / shape.batch, prng_key=jax.random.key(0)
  )
  return _unchanged, optax.chain(privatizer, optax.adamw(1e-3))


def _private_step(name: str, shape: Shape, params: Any):
  coordinates, tx = _private_method(name, shape, params)
  loss = make_loss(shape)

  def step(carried, fixed):
    params, state = carried
    clipped_grad = jax_privacy.clipped_grad(
      loss,
      l2_clip_norm=1 - 1e-6,
      normalize_by=shape.batch,
      batch_argnums=2,
      pre_clipping_transform=coordinates(params),
      microbatch_size=shape.microbatch,
      dtype=jnp.float32,
    )
    updates, state = tx.update(clipped_grad(params, *fixed), state, params)
    return optax.apply_updates(params, updates), state

  return tx.init, step


def compiled_steps(shape: Shape, rank: int) -> dict[str, timing.Step]:
  """One step of each method, on the same random weights and tokens."""
  keys = jax.random.split(jax.random.key(0), 3)
  start = adapters(shape, rank, keys[0])
  size = (shape.batch, shape.length + 1)
  fixed = (
    weights(shape, keys[1]),
    jax.random.randint(keys[2], size, 0, shape.vocabulary),
  )
  steps = {}
  for name in METHODS:
    params = start
    if name == 'prism':
      params = lora.canonicalize(start, layout=LAYOUT)
    init, step = (
      _plain_step(shape)
      if name == 'adamw, not private'
      else _private_step(name, shape, params)
    )
    steps[name] = timing.Step(step, (params, init(params)), fixed)
  return steps


def main():
  on_gpu = jax.default_backend() == 'gpu'
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--model', choices=SHAPES, default='gemma' if on_gpu else 'small'
  )
  parser.add_argument('--rank', type=int, nargs='+', default=[8, 16, 32, 64])
  parser.add_argument('--runs', type=int, default=10)
  args = parser.parse_args()
  shape = SHAPES[args.model]
  sizes = dataclasses.asdict(shape) | {'dtype': jnp.dtype(shape.dtype).name}
  results = {
    'environment': timing.environment(),
    'model': args.model,
    'shape': sizes,
    'ranks': {},
  }
  for rank in args.rank:
    steps = compiled_steps(shape, rank)
    times = timing.in_turn(steps, args.runs, progress=True)
    print(f'\n{args.model}, rank {rank}')
    results['ranks'][rank] = timing.table(
      steps, times, {'dp-adamw': 'dp-adamw', 'adamw': METHODS[0]}
    )
    # After each rank: what is measured is kept whatever comes next.
    path = timing.save('decoder_step_time', results)
  print(f'Written to {path}')


if __name__ == '__main__':
  main()
