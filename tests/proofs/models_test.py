"""Models of the examples and layers of Flax are proved, from shapes alone."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from benchmarks.accuracy import digits_network
from benchmarks.geometry import given_noise
from benchmarks.speed import decoder, steps
from prism_optax import diagnostics, lora
from prism_optax.finetune import language, training
from prism_optax.finetune.models import (
  classifier,
  llama,
  llama_config,
  minilm,
  vit,
)
from tests import cases
from tests.proofs.losses import normal

B, T, D = 6, 4, 8
prove = diagnostics.prove_independent


def ids(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def shapes(tree):
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def gradients(losses):
  """Both ways to the gradients of ``losses(params, frozen, *rows)``."""

  def one(params, frozen, rows):
    return losses(params, frozen, *jax.tree.map(lambda x: x[None], rows))[0]

  def of_batch(params, frozen, rows):
    return lora.per_example_gradients(
      lambda copies, rows: losses(copies, frozen, *rows)
    )(params, rows)

  return jax.vmap(jax.grad(one), (None, None, 0)), of_batch


def assert_proved(losses, params, frozen, *rows):
  params, frozen, rows = map(shapes, (params, frozen, rows))
  for function in gradients(losses):
    proof = prove(function, params, frozen, rows, in_axes=(None, None, 0))
    assert proof, proof


def of_classifier(encoder, hidden):
  network = classifier.Classifier(
    encoder, hidden, 3, temperature=1.0, rngs=nnx.Rngs(0)
  )
  return classifier.split(network)


def encoders():
  config = minilm.Config(50, D, 2, 2, 12, 16, 1e-6)
  text = minilm.Encoder(config, minilm.LoraConfig(rank=2), rngs=nnx.Rngs(0))
  pictures = vit.VisionTransformer(
    vit.Config(), rank=2, targets=('attention', 'mlp'), rngs=nnx.Rngs(0)
  )
  return {
    'MiniLM': (of_classifier(text, D), ids(B, T)),
    'ViT': (
      of_classifier(pictures, 64),
      jax.ShapeDtypeStruct((B, 8, 8), jnp.float32),
    ),
  }


@pytest.mark.slow
@pytest.mark.parametrize('name', ['MiniLM', 'ViT'])
def test_encoders_of_the_examples(name):
  (graph, params, frozen), x = encoders()[name]

  def losses(params, frozen, x, y):
    logits = nnx.merge(graph, params, frozen)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y)

  assert_proved(losses, params, frozen, x, ids(B))
  assert_proved_one_by_one(training.make_loss(graph), params, frozen, x, ids(B))


def assert_proved_one_by_one(loss, params, frozen, *rows):
  def one(params, frozen, row):
    return loss(params, frozen, *row)[0]

  proof = prove(
    jax.vmap(jax.grad(one), (None, None, 0)),
    *map(shapes, (params, frozen, rows)),
    in_axes=(None, None, 0),
  )
  assert proof, proof


def small_decoder(kind):
  return llama_config.Config.from_dict(
    {
      'model_type': kind, 'vocab_size': 64, 'hidden_size': 16, 'head_dim': 8,
      'intermediate_size': 24, 'num_hidden_layers': 2,
      'num_attention_heads': 4, 'num_key_value_heads': 2,
      'max_position_embeddings': 32, 'rms_norm_eps': 1e-6,
      'tie_word_embeddings': True,
    },
    'here',
  )  # fmt: skip


def of_decoder(kind):
  """``(graph, params, frozen)`` of shapes, and the losses of records."""

  def build():
    config = minilm.LoraConfig(2)
    return llama.Decoder(small_decoder(kind), config, rngs=nnx.Rngs(0))

  graph, *trees = nnx.split(nnx.eval_shape(build), nnx.LoRAParam, ...)

  def losses(params, frozen, tokens):
    if jax.tree.leaves(params)[0].ndim == 4:
      # Copies stand before the layers, and the scan wants the layers in front.
      params = jax.tree.map(lambda x: x.swapaxes(0, 1), params)
    logits = nnx.merge(graph, params, frozen)(tokens)[:, :-1]
    each = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )
    return jnp.sum(each, 1)

  return (graph, *trees), losses


@pytest.mark.parametrize(
  'kind', ['llama', pytest.param('qwen3', marks=pytest.mark.slow)]
)
def test_decoders_of_the_examples(kind):
  (graph, params, frozen), losses = of_decoder(kind)
  assert_proved(losses, params, frozen, ids(B, T))
  loss = language.make_loss(graph, 4)
  assert_proved_one_by_one(loss, params, frozen, ids(B, T), ids(B, T))


def test_a_mean_over_the_tokens_of_a_batch_is_refused():
  """What `language.make_loss` has a declared divisor for."""
  (_, params, frozen), losses = of_decoder('llama')

  def divided(params, frozen, x):
    return losses(params, frozen, x) / jnp.sum(x != 0)

  rows = (ids(B, T),)
  of_batch = gradients(divided)[1]
  proof = prove(of_batch, params, frozen, rows, in_axes=(None, None, 0))
  assert 'reduce_sum at models_test.py:' in proof.offence


def test_the_decoder_of_the_benchmarks():
  shape = decoder.Shape(
    layers=2, width=16, heads=2, key_heads=2, head=8, inner=24, vocabulary=30,
    length=T, batch=B, microbatch=B,
  )  # fmt: skip
  frozen, params = (
    jax.eval_shape(lambda make=make: make(jax.random.key(0)))
    for make in (
      lambda key: decoder.weights(shape, key),
      lambda key: decoder.adapters(shape, 2, key),
    )
  )
  loss = decoder.make_loss(shape)

  def one(params, frozen, tokens):
    return loss(params, frozen, tokens[None])

  proof = prove(
    jax.vmap(jax.grad(one), (None, None, 0)),
    params, frozen, ids(B, T + 1), in_axes=(None, None, 0),
  )  # fmt: skip
  assert proof, proof


def test_losses_of_the_benchmarks_and_of_the_tests():
  x, y = jax.ShapeDtypeStruct((B, 64), jnp.float32), ids(B)
  digits = steps.digits()
  params, frozen = shapes((digits.params, digits.frozen))
  axes = None, None, 0, 0
  for loss in (digits.loss, digits_network.loss):
    function = jax.vmap(jax.grad(loss), axes)
    assert prove(function, params, frozen, x, y, in_axes=axes)
  assert prove(
    gradients(digits.losses)[1], params, frozen, (x, y),
    in_axes=(None, None, 0),
  )  # fmt: skip
  rows = tuple(a[:B] for a in cases.DATA)
  function = jax.vmap(jax.grad(cases.loss), axes)
  assert prove(function, cases.PARAMS, cases.FROZEN, *rows, in_axes=axes)


@pytest.mark.parametrize('published', [False, True])
def test_the_step_of_the_benchmarks_with_a_given_draw(published):
  params = {'lora_a': jnp.eye(5, 2), 'lora_b': jnp.ones((2, 3))}
  one = given_noise.tangent_step(0.1, 1.0, B, 0.5, published)
  rows = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((B, *x.shape), x.dtype), params
  )
  noise = shapes(params)
  proof = diagnostics.prove_released(
    lambda grads, noise, state: one.update(grads, noise, state, params),
    rows, noise, one.init(params), private=0,
  )  # fmt: skip
  assert proof, proof


LAYERS = {
  'dense': (nnx.Linear(D, 5, rngs=nnx.Rngs(0)), (T, D)),
  'convolution': (nnx.Conv(D, 6, (3,), rngs=nnx.Rngs(0)), (T, D)),
  'attention': (
    nnx.MultiHeadAttention(2, D, decode=False, rngs=nnx.Rngs(0)),
    (T, D),
  ),
  'layer norm': (nnx.LayerNorm(D, rngs=nnx.Rngs(0)), (T, D)),
  'rms norm': (nnx.RMSNorm(D, rngs=nnx.Rngs(0)), (T, D)),
  'group norm': (nnx.GroupNorm(D, num_groups=2, rngs=nnx.Rngs(0)), (T, D)),
  'embedding': (nnx.Embed(9, D, rngs=nnx.Rngs(0)), (T,)),
}


@pytest.mark.parametrize('name', LAYERS)
def test_layers_of_flax(name):
  layer, shape = LAYERS[name]
  graph, weights, others = nnx.split(layer, nnx.Param, ...)
  x = jax.ShapeDtypeStruct((B, *shape), jnp.float32)
  x = ids(*x.shape) if name == 'embedding' else x

  def outputs(weights, x):
    return nnx.merge(graph, weights, others)(x)

  def loss(weights, x):
    return jnp.sum(outputs(weights, x[None]) ** 2)

  axes = None, 0
  for function in (outputs, jax.vmap(jax.grad(loss), axes)):
    proof = prove(function, weights, x, in_axes=axes)
    assert proof, proof


def test_batch_norm_of_flax_is_refused_unless_its_averages_are_used():
  for average, fits in ((True, True), (False, False)):
    layer = nnx.BatchNorm(D, use_running_average=average, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    proof = prove(
      lambda state, x, graph=graph: nnx.merge(graph, state)(x),
      state, normal(B, T, D), in_axes=(None, 0),
    )  # fmt: skip
    assert bool(proof) is fits, proof
  assert 'reduce_sum at normalization.py' in proof.offence
