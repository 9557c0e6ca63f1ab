"""A language model in two: frozen layers, run once a record, and those above.

With adapters in the top layers only, what enters them never changes. It is
computed once for each record and kept in bfloat16, so that a training step
costs the top layers and the logits of the response alone. Products with frozen
weights take two bfloat16 and sum in float32: on a CPU with matrix units that is
five times as fast, forwards and backwards.
"""

import dataclasses
import hashlib
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx

from benchmarks.accuracy import language_rows
from prism_optax.finetune import data, instructions
from prism_optax.finetune.models import (
  chat,
  classifier,
  generation,
  llama,
  llama_files,
  minilm,
  pretrained,
)

BLOCK, CHUNK = 16, 32


@jax.custom_vjp
def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
  """``x @ kernel``, both rounded to the kernel's type, summed in float32."""
  return jnp.dot(
    x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32
  )


def _backwards(kernel: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
  # A transpose that is merged into the product makes it slow.
  return product(g, jax.lax.optimization_barrier(kernel.T)), None


product.defvjp(lambda x, kernel: (product(x, kernel), kernel), _backwards)


def _dot_general(x: jax.Array, kernel: jax.Array, *_: Any, **__: Any):
  return product(x, kernel)


def _as_they_are(arrays: Any, **_: Any) -> Any:
  return arrays


def _hasten(model: nnx.Module) -> None:
  """Lets the frozen parts of all dense layers be :func:`product`."""
  for _, module in nnx.iter_modules(model):
    if isinstance(module, nnx.Linear):
      module.promote_dtype = _as_they_are
      module.dot_general = _dot_general


@dataclasses.dataclass(frozen=True)
class Model:
  """The whole decoder, and its top as a function of the adapters.

  Attributes:
    talk: Template and tokenizer.
    whole: All layers.
    graphdef: Static part of the top: the decoder without its lower layers.
    params: Adapters, as nothing at all.
    frozen: All other leaves of the top, and ``(hidden, vocabulary)`` of the
      logits.
    sha256: Of the weights.
  """

  talk: chat.Chat
  whole: llama.Decoder
  graphdef: Any
  params: nnx.State
  frozen: tuple[nnx.State, jax.Array]
  sha256: str


def load(source: pretrained.Pretrained, layers: int, rank: int) -> Model:
  """The decoder with adapters of this rank in so many of its top layers."""
  lora = minilm.LoraConfig(rank, top_layers=layers)
  whole = llama_files.load(source, lora, dtype=jnp.bfloat16)
  _hasten(whole)
  top = nnx.clone(whole)
  top.stacks = nnx.List([top.stacks[-1]])
  graphdef, params, frozen = classifier.split(top)
  table = top.embedding if top.config.tie_word_embeddings else top.head
  frozen = frozen, jnp.array(table.embedding[...].T)
  return Model(
    chat.Chat(source), whole, graphdef, params, frozen, source.sha256
  )


def start(params: nnx.State, seed: int) -> nnx.State:
  """New adapters that change nothing: ``lora_a`` as He et al., the other 0."""
  rng = np.random.default_rng(seed)

  def drawn(x):
    bound = np.sqrt(6 / x.shape[-2])
    return jnp.asarray(rng.uniform(-bound, bound, x.shape), jnp.float32)

  flat = nnx.to_flat_state(params)
  leaves = [
    drawn(x[...]) if path[-1] == 'lora_a' else jnp.zeros(x.shape)
    for path, x in flat
  ]
  return jax.tree.unflatten(jax.tree.structure(params), leaves)


def fits(
  model: Model, task: language_rows.Task, row: language_rows.Row
) -> bool:
  """Whether a row and its response are within the lengths of the task."""
  prompt, answer = map(
    model.talk.encode,
    model.talk.prompt_and_answer(language_rows.conversation(task, row)),
  )
  # Behind the mark that ends an answer there may be a line feed.
  last = min(answer.index(x) for x in model.talk.stops if x in answer)
  return last < task.response_length and len(prompt) + last < task.length


def encode(
  model: Model,
  task: language_rows.Task,
  rows: list[language_rows.Row],
  cache: pathlib.Path,
) -> data.Examples:
  """Rows as what enters the top layers, and the tokens to be learned.

  Args:
    model: The decoder.
    task: Says how long a record is.
    rows: The rows.
    cache: Folder of what was computed before, 1.2 kB a token.

  Returns:
    ``inputs`` ``(rows, length, hidden)`` bfloat16, ``labels`` ``(rows,
    length)``; at most ``response_length`` of a row are not blank, and none
    after the mark that ends an answer: it is never asked for.
  """
  conversations = [language_rows.conversation(task, row) for row in rows]
  ids, labels = instructions.encode(conversations, model.talk, task.length)
  ends = np.isin(labels, model.talk.stops)
  labels = np.where(np.cumsum(ends, 1) - ends > 0, data.BLANK, labels)
  count = np.cumsum(labels != data.BLANK, 1)
  labels = np.where(count > task.response_length, data.BLANK, labels)
  lower = model.whole.stacks[0] if len(model.whole.stacks) > 1 else None
  depth = len(lower.attention_norm.scale[...]) if lower is not None else 0
  key = ids.tobytes() + model.sha256.encode() + bytes([depth])
  path = cache / f'{hashlib.sha256(key).hexdigest()[:16]}.npy'
  if not path.exists():
    cache.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix('.partial.npy')
    np.save(partial, _below(model.whole, lower, ids).view(np.uint16))
    partial.rename(path)
  states = np.load(path).view(ml_dtypes.bfloat16)
  return data.Examples(states, labels)


def _below(whole: llama.Decoder, lower: Any, ids: np.ndarray) -> np.ndarray:
  """``(rows, length, hidden)``: rows of one length together."""
  graphdef, leaves = nnx.split((whole.embedding, lower))

  @jax.jit
  def program(leaves, ids):
    embedding, stack = nnx.merge(graphdef, leaves)
    tokens = embedding(ids).reshape(ids.size, -1)
    if stack is not None:
      tokens = scanned(*nnx.split(stack), tokens, ids.shape)
    return tokens.reshape(*ids.shape, -1).astype(jnp.bfloat16)

  width = whole.config.hidden_size
  out = np.zeros((*ids.shape, width), ml_dtypes.bfloat16)
  lengths = np.maximum((ids != 0).cumsum(1).argmax(1) + 1, 1)
  blocks = np.minimum(-(-lengths // BLOCK) * BLOCK, ids.shape[1])
  for length in np.unique(blocks):
    of_length = np.flatnonzero(blocks == length)
    for begin in range(0, len(of_length), CHUNK):
      rows = of_length[begin : begin + CHUNK]
      few = np.resize(ids[rows, :length], (CHUNK, length))
      out[rows, :length] = np.asarray(program(leaves, few))[: len(rows)]
      print(
        f'  length {length}: {begin} of {len(of_length)}',
        end='\r', file=sys.stderr, flush=True,
      )  # fmt: skip
  return out


def scanned(
  graphdef: Any, state: Any, tokens: jax.Array, shape: tuple[int, int]
) -> jax.Array:
  """Layers one after the other on ``(rows * length, hidden)`` tokens."""
  positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)

  def layer(tokens, leaves):
    return nnx.merge(graphdef, leaves)(tokens, positions, None)

  return jax.lax.scan(layer, tokens, state)[0]


def attended(
  layer: llama.Layer, tokens: jax.Array, places: jax.Array
) -> jax.Array:
  """The first half of :func:`at_places`, ``(rows * count, hidden)``."""
  rows, length, hidden = tokens.shape
  attention = layer.attention
  config, positions = attention.config, jnp.arange(length)[None]
  x = jnp.take_along_axis(tokens, places[..., None], 1).reshape(-1, hidden)
  inner = layer.attention_norm(tokens.reshape(-1, hidden))

  head = -1, config.head_dim
  query = attention.query(layer.attention_norm(x))
  query = query.reshape(*places.shape, *head)
  key, value = (
    projection(inner).reshape(rows, length, *head)
    for projection in (attention.key, attention.value)
  )
  if config.qk_norm:
    query, key = attention.query_norm(query), attention.key_norm(key)
  mixed = jax.nn.dot_product_attention(
    llama.rotate(query, places, config),
    llama.rotate(key, positions, config),
    value,
    mask=places[:, None, :, None] >= positions[:, None, None],
  )
  return x + attention.output(mixed.reshape(len(x), -1))


def at_places(
  layer: llama.Layer, tokens: jax.Array, places: jax.Array
) -> jax.Array:
  """The uppermost layer where logits are wanted; elsewhere, keys and values.

  Args:
    layer: The layer.
    tokens: ``(rows, length, hidden)``.
    places: ``(rows, count)``, which of the tokens.

  Returns:
    ``(rows, count, hidden)``.
  """
  x = attended(layer, tokens, places)
  return (x + layer.mlp(layer.mlp_norm(x))).reshape(*places.shape, -1)


def row_losses(
  graphdef: Any, response_length: int
) -> Callable[[Any, Any, data.Examples], tuple[jax.Array, ...]]:
  """Builds ``(params, frozen, batch) -> (losses, hits, weights)``.

  Of the tokens of the responses, ``(rows, response_length)`` each: nats,
  whether the token was the likeliest, and whether there is one.
  """

  def losses(params, frozen, batch):
    frozen, head = frozen
    model = nnx.merge(graphdef, params, frozen)
    shape = batch.labels.shape
    layer, leaves = nnx.split(model.stacks[0])
    lower, upper = (
      jax.tree.map(lambda x, i=i: x[i], leaves) for i in (slice(-1), -1)
    )
    tokens = batch.inputs.astype(jnp.float32).reshape(shape[0] * shape[1], -1)
    tokens = scanned(layer, lower, tokens, shape).reshape(*shape, -1)
    # The logits are as dear as eight layers: only where they are asked for.
    blank = batch.labels == data.BLANK
    places = jnp.argsort(blank, axis=1, stable=True)[:, :response_length]
    labels = jnp.take_along_axis(batch.labels, places, 1)
    tokens = at_places(nnx.merge(layer, upper), tokens, places)
    logits = product(model.norm(tokens), head)
    weights = labels != data.BLANK
    labels = jnp.where(weights, labels, 0)
    found = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    hits = jnp.argmax(logits, -1) == labels
    return found * weights, hits, weights

  return losses


def written(
  model: Model,
  params: Any,
  task: language_rows.Task,
  rows: list[language_rows.Row],
) -> list[str]:
  """Greedy answers of the whole model with these adapters."""
  whole = nnx.clone(model.whole)
  whole.stacks[-1] = nnx.merge(model.graphdef, params, model.frozen[0]).stacks[
    0
  ]
  generator = generation.Generator(whole, model.talk.stops)
  prompts = [
    model.talk.encode(
      model.talk.text(
        language_rows.conversation(task, row)[:-1], answer_next=True
      )
    )
    for row in rows
  ]
  # Prompts of about one length together: the longest decides.
  order = np.argsort([len(prompt) for prompt in prompts])
  answers = [''] * len(rows)
  for begin in range(0, len(order), CHUNK):
    part = order[begin : begin + CHUNK]
    found = generator.answers(
      # One size of batch, so that programs are shared.
      [prompts[i] for i in np.resize(part, CHUNK)], task.new_tokens
    )  # fmt: skip
    for i, ids in zip(part, found, strict=False):
      answers[i] = model.talk.decode(ids)
  return answers
