"""Each method trains by `make_private`; the loss of a row; the evaluation."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from prism_optax import accounting
from prism_optax.contrib import heads
from prism_optax.finetune import (
  command_line,
  data,
  methods,
  releasing,
  summaries,
  tasks,
  training,
)
from prism_optax.finetune.models import classifier

WIDTH, CLASSES, RANK, ROWS = 5, 3, 2, 40


class _Encoder(nnx.Module):
  """Two dense layers of one shape: what is compiled works on both."""

  def __init__(self):
    rngs = nnx.Rngs(3)
    self.first = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)
    self.second = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)

  def __call__(self, inputs):
    return self.second(jnp.tanh(self.first(inputs)))


def _rows(count=ROWS):
  rng = np.random.default_rng(0)
  inputs = rng.normal(size=(count, WIDTH)).astype(np.float32)
  return data.Examples(inputs, rng.integers(CLASSES, size=count, dtype='int32'))


@pytest.fixture(scope='module')
def task():
  network = classifier.Classifier(
    _Encoder(), WIDTH, CLASSES, temperature=2.0, rngs=nnx.Rngs(4)
  )
  base = {'model': 'tiny', 'sha256': '0'}
  rows = _rows(), _rows()
  return tasks.make('tiny', network, *rows, ('a', 'b', 'c'), base)


USED = {
  'task': 'classify', 'dataset_size': 64, 'batch_size': 8, 'steps': 2,
  'delta': 1e-3, 'noise_multiplier': 4.0, 'target_epsilon': None, 'plan': None,
  'learning_rate': 0.1, 'l2_clip_norm': 0.7, 'microbatch_size': 8,
  'skip_padding': False, 'mesh': 1, 'seed': None, 'head': 'random',
}  # fmt: skip


def _options(**more):
  return types.SimpleNamespace(**USED | more)


@pytest.mark.slow
@pytest.mark.parametrize('name', command_line.METHODS)
def test_adapters_and_head_move_and_the_step_is_proved(task, name, tmp_path):
  """Of 64 places 40 have a row, one of them a blank one."""
  labels = task.train.labels.copy()
  labels[0] = data.BLANK
  private = training.make(task, _options(), name, tmp_path)
  start = methods.prepared(name, task.params)
  before = jax.tree.map(np.array, start)
  state = private.init(start)
  private.compile(state, task.frozen)  # Before a row is read.
  for batch in private.batches(state, task.train._replace(labels=labels)):
    state = private.step(state, batch, task.frozen)
  for one, other in zip(
    *map(jax.tree.leaves, (before, state.params)), strict=True
  ):
    assert np.isfinite(other).all()
    assert not np.array_equal(one, other)
  statement = private.statement(state)
  if name == command_line.NOT_PRIVATE:
    assert statement.startswith('epsilon <= inf')
  else:
    assert statement.startswith(f'epsilon <= {private.epsilon():.1f}'[:13])
    assert 'noise as drawn' in statement
    assert statement.endswith(
      'proved: no record acts on another, and nothing bypasses the noise'
    )


def test_features_without_a_norm_stay_small():
  tiny, head = jnp.full((1, 4), 1e-7), (jnp.eye(4), jnp.zeros(4))
  found = classifier.logits_of(tiny, *head, temperature=2.0)
  np.testing.assert_allclose(found, 0.2, rtol=1e-5)  # Not 1: of norm one.


@pytest.mark.slow
def test_a_blank_row_has_no_gradient_and_others_that_of_the_model(task):
  loss = training.make_loss(task.graphdef)
  inputs = task.train.inputs[0]
  of_row = jax.jit(jax.value_and_grad(loss, has_aux=True))

  def gradient(label):
    return of_row(task.params, task.frozen, inputs, np.int32(label))

  (value, hit), blank = gradient(data.BLANK)
  assert float(value) == 0.0
  assert not hit
  assert not any(np.any(x) for x in jax.tree.leaves(blank))
  (value, _), real = gradient(1)
  logits = nnx.merge(task.graphdef, task.params, task.frozen)(inputs[None])
  expected = optax.softmax_cross_entropy_with_integer_labels(logits[0], 1)
  assert float(value) == pytest.approx(float(expected), rel=1e-5)
  assert any(np.any(x) for x in jax.tree.leaves(real))


@pytest.mark.parametrize('rows', [1, 7, 8])
def test_evaluation_counts_every_row_once(task, rows):
  examples = _rows(rows)
  evaluate = training.make_evaluate(task.graphdef, examples, chunk=4)
  loss = jax.vmap(training.make_loss(task.graphdef), (None, None, 0, 0))
  losses, hits = jax.jit(loss)(task.params, task.frozen, *examples)
  found = evaluate(task.params, task.frozen)
  assert found['eval_loss'] == pytest.approx(float(losses.mean()), rel=1e-5)
  assert found['eval_accuracy'] == pytest.approx(float(hits.mean()))


@pytest.mark.slow
def test_a_head_is_released_once_and_paid_for(task, tmp_path, monkeypatch):
  """Of rows in chunks, the last one shorter; a blank row adds nothing."""
  labels = np.append(task.train.labels, data.BLANK)
  inputs = np.append(task.train.inputs, task.train.inputs[:1], axis=0)
  rows = dataclasses.replace(task, train=data.Examples(inputs, labels))
  monkeypatch.setattr(releasing, 'CHUNK', 15)
  sizes, ridge = [], heads.ridge

  def seen(batches, **options):
    batches = [*batches]
    sizes.extend(len(y) for _, y in batches)
    return ridge(batches, **options)

  monkeypatch.setattr(heads, 'ridge', seen)
  used = _options(target_epsilon=3.0, seed=1, plan={'noise_multiplier': 4.0})
  found = releasing.with_head(rows, used, tmp_path)
  model = nnx.merge(task.graphdef, task.params, task.frozen)
  alone = accounting.calibrate_noise_multiplier(3.0, 1e-3, 1.0, 1)
  want = ridge(
    [(model.encoder(task.train.inputs), task.train.labels)],
    num_classes=CLASSES,
    noise_multiplier=alone / np.sqrt(0.8),
    dataset_size=64,
    logit_scale=model.temperature,
    prng_key=1,
  )
  assert sizes == [15, 15, 15, 15, 4]  # Whatever the number of rows.
  kernel = found.params['kernel'][...]
  np.testing.assert_allclose(kernel, want.kernel, rtol=0.02)  # Of the grid.
  assert np.all(task.params['kernel'][...] != kernel)
  private = training.make(found, used, 'prism', tmp_path)
  assert private.epsilon(0) == pytest.approx(
    accounting.epsilon(want.event, 1e-3, entries=want.entries)
  )
  assert '2 steps and 1 prior release' in private.statement()
  # Another seed would release another one.
  releasing.save(found, tmp_path)
  again = releasing.with_head(rows, _options(seed=2), tmp_path)
  np.testing.assert_array_equal(again.params['kernel'][...], kernel)
  training.make(again, used, 'prism', tmp_path)
  stored = dict(np.load(tmp_path / 'head.npz'))
  stored['facts'] = stored['facts'].astype(object)  # A pickle can run code.
  np.savez(tmp_path / 'head.npz', **stored)
  with pytest.raises(ValueError, match='expected the release of a head'):
    releasing.with_head(rows, used, tmp_path)
  with pytest.raises(ValueError, match='delta'):
    releasing.release(rows, _options(target_epsilon=3.0, delta=0.1))
  (tmp_path / 'head.npz').unlink()
  (tmp_path / 'metrics.jsonl').touch()
  with pytest.raises(ValueError, match=r'head.npz is gone'):
    releasing.with_head(rows, used, tmp_path)


def test_unknown_method_is_named(task):
  with pytest.raises(ValueError, match="got 'sgd'"):
    methods.optimizer('sgd', 0.1, 1.0, task.params)


def test_what_is_printed_is_never_less_than_spent():
  assert summaries.round_up(1.2341) == 1.235
  assert summaries.round_up(2.0) == 2.0
  assert summaries.round_up(float('inf')) == float('inf')


def test_matrices_and_stacks_of_them_are_for_muon():
  dims = optax.contrib.MuonDimensionNumbers
  params = {'b': jnp.ones(3), 'w': jnp.ones((2, 3)), 's': jnp.ones((4, 2, 3))}
  found = {'b': None, 'w': dims(0, 1), 's': dims(1, 2)}
  assert methods.matrices(params) == found
