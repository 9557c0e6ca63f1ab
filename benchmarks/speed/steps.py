"""The steps that are timed, and the models that they train."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
from flax import nnx
from jax_privacy import noise_addition

import prism_optax
from benchmarks.accuracy import digits_network, encoded_text
from benchmarks.common import methods
from prism_optax import lora
from prism_optax.finetune.models import classifier, minilm, pretrained

RATE = 1e-3


class Problem(NamedTuple):
  """A model and its data.

  Attributes:
    loss: ``loss(params, frozen, x, y)`` of one example.
    losses: The same of a batch, with or without copies of the parameters.
    params: The adapters.
    frozen: All other weights.
    data: ``(x, y)``, with one row an example.
    rows: Of a batch.
  """

  loss: Callable[..., jax.Array]
  losses: Callable[..., jax.Array]
  params: Any
  frozen: Any
  data: tuple[np.ndarray, ...]
  rows: int

  def mean(self, params: Any, frozen: Any, batch: Any) -> jax.Array:
    """Of the losses of a batch."""
    return jnp.mean(self.losses(params, frozen, *batch))

  def gradients(self, batched: bool) -> Callable[..., Any]:
    """``f(params, frozen, batch)`` of all examples at once.

    Args:
      batched: From one backward pass of the batch, or by vmap.
    """
    if not batched:
      of_each = jax.vmap(jax.grad(self.loss), (None, None, 0, 0))
      return lambda params, frozen, batch: of_each(params, frozen, *batch)
    return lambda params, frozen, batch: lora.per_example_gradients(
      lambda copies, rows: self.losses(copies, frozen, *rows)
    )(params, batch)


def digits(rows: int = 128) -> Problem:
  """Two layers of 64 and 10 outputs with adapters of rank 4."""
  keys = jax.random.split(jax.random.key(0), 4)
  frozen = {
    'first': jax.random.normal(keys[0], (64, digits_network.HIDDEN)) / 8,
    'last': jax.random.normal(keys[1], (digits_network.HIDDEN, 10)) / 8,
  }
  params = {
    name: {
      'lora_a': jax.random.normal(keys[2], (w.shape[0], 4)) / 8,
      'lora_b': jnp.zeros((4, w.shape[1])),
    }
    for name, w in frozen.items()
  }
  _, private, _ = digits_network.pictures()

  def losses(params, frozen, x, y):
    def dense(name, x):
      pair = params[name]
      inner = jnp.einsum('bi,bir->br', x, pair['lora_a'])
      return x @ frozen[name] + jnp.einsum('br,bro->bo', inner, pair['lora_b'])

    logits = dense('last', jax.nn.relu(dense('first', x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)

  return Problem(
    digits_network.loss, losses, params, frozen, tuple(private), rows
  )


def sentences(
  rank: int = 8, rows: int = 32, length: int = 48, layers: int = 6
) -> Problem:
  """MiniLM, six layers of width 384 or fewer, adapters on all dense ones.

  With the weights of all-MiniLM-L6-v2 where its package is installed, otherwise
  random ones in the same shapes.
  """
  config, rngs = minilm.LoraConfig(rank=rank), nnx.Rngs(0)
  try:
    encoder = minilm.load(pretrained.find(None), config)
  except (ImportError, OSError, ValueError):
    encoder = minilm.Encoder(encoded_text.ALL_MINILM_L6_V2, config, rngs=rngs)
  encoder.layers = nnx.List(list(encoder.layers)[:layers])
  network = classifier.Classifier(
    encoder, encoder.hidden_size, 2, temperature=1.0, rngs=rngs
  )
  graph, params, frozen = classifier.split(network)

  def losses(params, frozen, x, y):
    logits = nnx.merge(graph, params, frozen)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)

  def loss(params, frozen, x, y):
    return losses(params, frozen, x[None], y[None])[0]

  rng = np.random.default_rng(0)
  data = rng.integers(1000, 30000, (1000, length)), rng.integers(0, 2, 1000)
  return Problem(loss, losses, lora.canonicalize(params), frozen, data, rows)


Step = tuple[Any, Callable[[Any, Any], Any]]


def plain(loss: Callable[..., jax.Array], params: Any, parts: int = 1) -> Step:
  """AdamW on the mean over micro-batches, in one backward pass each.

  Args:
    loss: ``loss(params, frozen, batch)``.
    params: The parameters, arrays or shapes.
    parts: Number of micro-batches.

  Returns:
    What a step carries, and ``step(carried, (frozen, batch))``.
  """
  adamw, gradient = optax.adamw(RATE), jax.grad(loss)

  def step(carried, fixed):
    params, state = carried
    frozen, batch = fixed
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)

    def add(total, part):
      return optax.tree.add(total, gradient(params, frozen, part)), None

    total, _ = jax.lax.scan(add, optax.tree.zeros_like(params), split)
    mean = optax.tree.scale(1 / parts, total)
    updates, state = adamw.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  return (params, adamw.init(params)), step


def chained(
  tx: optax.GradientTransformation, gradients: Callable[..., Any], params: Any
) -> Step:
  """A chain with a clip, which is given the gradients of all examples at once.

  Args:
    tx: The chain.
    gradients: ``gradients(params, frozen, batch)``.
    params: The parameters.

  Returns:
    What a step carries, and ``step(carried, (frozen, batch))`` or, with
    padding, ``(frozen, batch, is_padding)``.
  """

  def step(carried, fixed):
    params, state = carried
    frozen, batch, *padding = fixed
    extra = dict(zip(['is_padding_example'], padding, strict=False))
    updates, state = tx.update(
      gradients(params, frozen, batch), state, params, **extra
    )
    return optax.apply_updates(params, updates), state

  return (params, tx.init(params)), step


def clipped(
  method: str,
  loss: Callable[..., jax.Array],
  params: Any,
  *,
  batch: int,
  microbatch: int,
  layout: lora.Layout | None = None,
) -> Step:
  """A step behind jax-privacy's clip, of norm and noise multiplier one.

  Args:
    method: ``'dp-adamw'``, whose noise is jax-privacy's, ``'prism'`` or
      ``'dp-muon'``.
    loss: ``loss(params, frozen, batch)``.
    params: The trainable parameters.
    batch: Rows of a batch.
    microbatch: Rows at once.
    layout: How the pairs are found.

  Returns:
    What a step carries, and ``step(carried, (frozen, batch))``.
  """
  groups = {'weight_dimension_numbers': methods.matrices}
  mechanism = {
    'noise_multiplier': 1.0,
    'expected_batch_size': batch,
    'per_example_gradients': False,
    'prng_key': jax.random.key(0),
  }
  share = 1.0 / methods.sensitivity_of_groups(params)
  coordinates: Callable[[Any], Callable[[Any], Any]]
  if method == 'prism':
    params = lora.canonicalize(params, layout=layout)
    tx = prism_optax.prism(RATE, l2_clip_norm=1.0, layout=layout, **mechanism)

    def coordinates(params):
      return prism_optax.tangent_coordinates(params, layout=layout)

  elif method == 'dp-muon':
    tx = prism_optax.dp_muon(
      RATE, l2_clip_norms=share, consistent_rms=0.2, **mechanism, **groups
    )

    def coordinates(params):
      clip = prism_optax.per_matrix_clip(share, **groups)
      return clip.pre_clipping_transform

  else:
    tx = optax.chain(
      noise_addition.gaussian_privatizer(
        stddev=1.0 / batch, prng_key=jax.random.key(0)
      ),
      optax.adamw(RATE),
    )

    def coordinates(params):
      return lambda gradient: gradient

  def step(carried, fixed):
    params, state = carried
    mean = jax_privacy.clipped_grad(
      loss,
      # A norm in float32 may be off by a few roundings: stay inside.
      l2_clip_norm=1.0 - 1e-6,
      normalize_by=batch,
      batch_argnums=2,
      pre_clipping_transform=coordinates(params),
      microbatch_size=microbatch,
      dtype=jnp.float32,
    )(params, *fixed)
    updates, state = tx.update(mean, state, params)
    return optax.apply_updates(params, updates), state

  return (params, tx.init(params)), step
