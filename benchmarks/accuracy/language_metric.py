"""A private metric of what a language model's adapted layer reads."""

import jax
import jax.numpy as jnp
import numpy as np
from finetuning import data
from flax import nnx

from benchmarks.accuracy import language_layers, language_rows
from prism_optax import contrib

NOISE_MULTIPLIER = 4.0
CHUNK = 16
# What the other matrices read has too many directions for that much noise.
ATTENTION, MLP = 'stacks/*/attention/[kqv]*', 'stacks/*/mlp/[gu]*'


def release(
  model: language_layers.Model,
  task: language_rows.Task,
  examples: data.Examples,
  seed: int,
) -> contrib.InputMetric:
  """Second moments of the inputs of the uppermost layer's matrices.

  Of queries, keys and values at all tokens up to the last that is asked for; of
  the gated layer where an answer is read. Adapters are as at the start: zero.

  Args:
    model: With one layer that has adapters.
    task: Says how long answers are.
    examples: The private records; each is read once.
    seed: Of the noise.
  """
  layer_def, leaves = nnx.split(
    nnx.merge(model.graphdef, model.params, model.frozen[0]).stacks[0]
  )

  @jax.jit
  def inputs(leaves, batch):
    layer = nnx.merge(layer_def, jax.tree.map(lambda x: x[-1], leaves))
    tokens = batch.inputs.astype(jnp.float32)
    rows, length, hidden = tokens.shape
    asked = batch.labels != data.BLANK
    shown = jnp.cumsum(asked[:, ::-1], 1)[:, ::-1] > 0
    places = jnp.argsort(~asked, axis=1, stable=True)
    places = places[:, : task.response_length]
    read = layer.attention_norm(tokens.reshape(-1, hidden))
    mixed = language_layers.attended(layer, tokens, places)
    within = layer.mlp_norm(mixed).reshape(*places.shape, hidden)
    weights = jnp.take_along_axis(asked, places, 1)
    return {
      ATTENTION: read.reshape(rows, length, hidden) * shown[..., None],
      MLP: within * weights[..., None],
    }

  def batches():
    for begin in range(0, len(examples.labels), CHUNK):
      rows = np.arange(begin, min(begin + CHUNK, len(examples.labels)))
      yield inputs(leaves, data.Examples(*(x[rows] for x in examples)))

  return contrib.input_metric(
    batches(),
    noise_multiplier=NOISE_MULTIPLIER,
    dataset_size=len(examples.labels),
    prng_key=jax.random.fold_in(jax.random.key(seed), 2),
  )
