"""Banking77 with nnx, linen and Keras: a private training in fifteen lines.

The data are those that PRISM_OPTAX_DATA names, or made-up tokens of the same
shape. What stands between the two comments of each training is all that a model
needs to be trained privately.
"""

import functools
import inspect
import json
import os
import pathlib
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import lora, training
from prism_optax.accounting import _epsilon

nnx = pytest.importorskip('flax.nnx', reason='needs flax')
linen = pytest.importorskip('flax.linen', reason='needs flax')

WORDS, BUCKETS, WIDTH, LABELS, RANK = 24, 4096, 256, 77, 16
DELTA, RATE = 1e-5, 0.5
# Frozen and random: what a word means is not learned.
TABLE = np.random.default_rng(0).normal(size=(BUCKETS, WIDTH)) / WIDTH**0.5
TABLE = np.float32(np.where(np.arange(BUCKETS)[:, None], TABLE, 0))


def read(path):
  """Hashed words (N, WORDS), zero where there is none, and labels (N,)."""
  rows = [json.loads(line) for line in path.read_text('utf-8').splitlines()]
  names = sorted({row['label'] for row in rows})
  x = np.zeros((len(rows), WORDS), np.int32)
  for places, row in zip(x, rows, strict=True):
    words = ''.join(c if c.isalnum() else ' ' for c in row['text'].lower())
    hashed = [1 + zlib.crc32(w.encode()) % (BUCKETS - 1) for w in words.split()]
    places[: len(hashed[:WORDS])] = hashed[:WORDS]
  return x, np.array([names.index(row['label']) for row in rows], np.int32)


def made_up(size, rng):
  """Each label has words of its own, which are a third of a text."""
  y = rng.integers(0, LABELS, size)
  x = rng.integers(1, BUCKETS, (size, WORDS))
  own = 1 + 20 * y[:, None] + rng.integers(0, 20, (size, WORDS))
  x = np.where(rng.random((size, WORDS)) < 1 / 3, own, x)
  return x.astype(np.int32), y.astype(np.int32)


@pytest.fixture(scope='module')
def data():
  named = os.environ.get('PRISM_OPTAX_DATA')
  if not named:
    rng = np.random.default_rng(1)
    return made_up(10_000, rng), made_up(2_000, rng)
  folder = pathlib.Path(named) / 'banking77'
  return read(folder / 'train.jsonl'), read(folder / 'test.jsonl')


@pytest.fixture(scope='module', autouse=True)
def accounted_once():
  """The promise of one library is that of the others; to search takes long."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(_epsilon, 'epsilon_at', functools.cache(_epsilon.epsilon_at))
    yield


def features(tokens):
  """Mean of the words' vectors, of length about one."""
  vectors = jnp.asarray(TABLE)[tokens]
  found = jnp.sum(tokens > 0, -1, keepdims=True)
  return jnp.sum(vectors, -2) / jnp.sqrt(jnp.maximum(found, 1))


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.head = nnx.LoRALinear(WIDTH, LABELS, lora_rank=RANK, rngs=rngs)

  def __call__(self, tokens):
    return self.head(features(tokens))


class Linen(linen.Module):
  @linen.compact
  def __call__(self, tokens):
    x = features(tokens)
    a = self.param('lora_a', linen.initializers.he_uniform(), (WIDTH, RANK))
    b = self.param('lora_b', linen.initializers.zeros, (RANK, LABELS))
    return linen.Dense(LABELS)(x) + x @ a @ b


def with_nnx(x, y):
  model = Nnx(nnx.Rngs(0))
  # Ours, from here:
  graph, params, frozen = nnx.split(model, nnx.LoRAParam, ...)

  def loss(params, frozen, tokens, label):
    logits = nnx.merge(graph, params, frozen)(tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)

  private = training.make_private(loss, params, delta=DELTA, target_epsilon=8.0,
    optimizer=partial(prism_optax.prism, RATE), steps=60,
    l2_clip_norm=1.0, expected_batch_size=512, dataset_size=len(x))  # fmt: skip
  state = private.init(params)
  for batch in private.batches(state, (x, y)):
    state = private.step(state, batch, frozen)
  nnx.update(model, state.params)
  # To here.
  return model, private.statement(state)


def with_linen(x, y):
  model = Linen()
  variables = model.init(jax.random.key(0), x[0])['params']
  # Ours, from here:
  params = {k: v for k, v in variables.items() if k.startswith('lora')}
  frozen = {k: v for k, v in variables.items() if k not in params}

  def loss(params, frozen, tokens, label):
    logits = model.apply({'params': {**frozen, **params}}, tokens)
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)

  private = training.make_private(loss, params, delta=DELTA, target_epsilon=8.0,
    optimizer=partial(prism_optax.prism, RATE), steps=60,
    l2_clip_norm=1.0, expected_batch_size=512, dataset_size=len(x))  # fmt: skip
  state = private.init(params)
  for batch in private.batches(state, (x, y)):
    state = private.step(state, batch, frozen)
  # To here.
  trained = {'params': {**frozen, **state.params}}
  return partial(model.apply, trained), private.statement(state)


def with_keras(x, y):
  os.environ.setdefault('KERAS_BACKEND', 'jax')
  keras = pytest.importorskip('keras', reason='needs keras')
  model = keras.Sequential(
    [
      keras.Input((WORDS,), dtype='int32'),
      keras.layers.Lambda(features, output_shape=(WIDTH,)),
      keras.layers.Dense(LABELS),
    ]
  )
  model.layers[-1].enable_lora(RANK)
  # Ours, from here:
  variables = model.trainable_variables
  params = [v.value for v in variables]
  frozen = [v.value for v in model.non_trainable_variables]
  layout = lora.pairs_by_name([v.path for v in variables], params)

  def loss(params, frozen, tokens, label):
    logits = model.stateless_call(params, frozen, tokens[None])[0][0]
    return optax.softmax_cross_entropy_with_integer_labels(logits, label)

  private = training.make_private(loss, params, delta=DELTA, target_epsilon=8.0,
    optimizer=partial(prism_optax.prism, RATE, layout=layout), steps=60,
    l2_clip_norm=1.0, expected_batch_size=512, dataset_size=len(x))  # fmt: skip
  state = private.init(params)
  for batch in private.batches(state, (x, y)):
    state = private.step(state, batch, frozen)
  for variable, value in zip(variables, state.params, strict=True):
    variable.assign(value)
  # To here.
  return model, private.statement(state)


TRAININGS = {'nnx': with_nnx, 'linen': with_linen, 'keras': with_keras}


def ours(function):
  """The lines of code between the two comments."""
  source = inspect.getsource(function)
  between = source.split('# Ours, from here:\n')[1].split('# To here.')[0]
  return [line for line in between.splitlines() if line.strip()]


@pytest.mark.parametrize('name', TRAININGS)
def test_fifteen_lines_are_enough(name):
  lines = ours(TRAININGS[name])
  assert 8 < len(lines) <= 15
  assert any('make_private' in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize('name', TRAININGS)
def test_it_learns_privately(name, data):
  (x, y), (x_test, y_test) = data
  apply, statement = TRAININGS[name](x, y)
  found = np.argmax(np.asarray(apply(x_test)), -1)
  accuracy = np.mean(found == y_test)
  print(f'{name}: {accuracy:.3f}')
  assert accuracy > 0.3  # Guessing is 0.013.
  # Calibrated to 8, less what the noise as drawn may add at most.
  assert 7.9 < float(statement.split()[2]) <= 8
  assert '60 of 60 steps' in statement
