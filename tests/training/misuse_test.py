"""Every misuse that a newcomer tries is refused, with what to do instead."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import training
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS, N
from tests.core import seams

SGD = optax.sgd(0.1)
prism = functools.partial(prism_optax.prism, 0.1)


@functools.cache
def private():
  return cases.make(SGD, prng_key=None)


def groups(labels, **shares):
  return {'clipping': training.GroupClipping(labels, shares)}


AUTOMATIC = {'clipping': training.AutomaticClipping()}
# An optimizer with the constants of a training, and what is said of it.
CONSTANTS = [
  (SGD, {'delta': 0.5}, r'delta < 1 / dataset_size, got delta=0\.5'),
  (SGD, {'delta': 1 / N}, r'publishing one record'),
  (SGD, {'delta': 0.0}, r'0 < delta < 1'),
  (SGD, {'steps': 0}, r'steps to be an integer >= 1'),
  (SGD, {'steps': 1e3}, r'steps to be an integer'),
  (SGD, {'expected_batch_size': 201}, r'expected_batch_size <= dataset_size'),
  (SGD, {'expected_batch_size': 20.5}, r'expected_batch_size to be an integer'),
  (SGD, {'l2_clip_norm': 0.0}, r'0 < l2_clip_norm'),
  # A compiler multiplies by the inverse: at 2e38 that is zero on a CPU.
  (SGD, {'l2_clip_norm': 1e-31}, r'Expected 1e-30 <=.*l2_clip_norm=1e-31'),
  (SGD, {'l2_clip_norm': 1.1e30}, r'<= 1e\+30, .*l2_clip_norm=1\.1e\+30'),
  (SGD, {'noise_multiplier': None}, r'exactly one of target_epsilon and noise'),
  (SGD, {'target_epsilon': 3.0}, r'exactly one of target_epsilon and noise'),
  (SGD, {'noise_multiplier': -1.0}, r'noise_multiplier >= 0'),
  (SGD, {'execution': training.Execution(7, padded_batch_size=48)},
   r'multiple of microbatch'),
  *((SGD, {x: 0}, f'Expected {x} to be an integer >= 1') for x in (
    'dataset_size', 'expected_batch_size', 'examples_per_user')),
  *((SGD, {'execution': training.Execution(**{x: 0})}, f'{x} .* >= 1')
    for x in ('microbatch_size', 'padded_batch_size')),
  (SGD, {'examples_per_user': 2, 'batched_loss': True}, r'not supported'),
  (SGD, {'batched_loss': True, 'execution': training.Execution(
    batch_sharding=jax.sharding.NamedSharding(
      jax.make_mesh((1,), ('data',), (jax.sharding.AxisType.Explicit,)),
      jax.sharding.PartitionSpec('data')))},
   r'batch is not supported on a mesh with explicit axes'),
  (SGD, {'prng_key': 'secret'}, r'chacha20'),
  (SGD, {'dataset_size': 'many'}, r"dataset_size.*'many'"),
  (SGD, {'record': (memoryview(b'a'),)}, r'a tree of .*record\[0\]=<memory'),
  (SGD, {'record': {'x': None}}, r'Expected record to have a leaf'),
  (SGD, {'record': jax.ShapeDtypeStruct((3,), np.dtype('U3'))},
   r'Expected data of numbers'),
  (SGD, {'stop': 'when it is good'}, r"stop to be .*'planned'"),
  (SGD, {'tags': {'base': [1]}}, r"got tags\['base'\]=.* of list"),
  (SGD, {'tags': {'base': 'x' * 201}}, r'at most 200'),
  (SGD, groups({'head': 'a', 'layer': 'b'}, a=1.0), r"shares, \['a'\], got"),
  # The fraction alone has all of the noise at 0.025, for b = 20 and sigma = 1.
  *(
    (SGD, {'clipping': training.QuantileClipping(fraction_stddev=x)}, message)
    for x, message in ((0.02, r'fraction_stddev > 0\.025'), (0.025, r'0\.025'))
  ),
  # Optimizers.
  (prism(l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=20), {},
   r'functools\.partial\(prism_optax\.prism, learning_rate\)'),
  (prism_optax.add_decayed_factors(0.1), {}, r'functools'),
  (lambda **k: optax.GradientTransformation(*optax.sgd(0.1)), {},
   r'hands is_padding_example and release_digest on'),
  (prism_optax.intrinsic_clip(1.0), {}, r'functools'),
  (prism_optax.per_matrix_clip(1.0), {}, r'functools'),
  (0.1, {}, r'optax\.GradientTransformation or a function'),
  (optax.adamw, {}, r'does not take'),
  (lambda **k: SGD, {}, r'leaves the optimizer without'),
  (functools.partial(prism, noise_multiplier=0.01), {},
   r"fixes \['noise_multiplier'\]"),
  # Other clips need an optimizer that lets them.
  (functools.partial(prism_optax.dp_muon, 0.1), AUTOMATIC,
   r'thresholds of its own'),
  (lambda **k: prism(**k), AUTOMATIC, r'per_example_gradients=False'),
  (prism, groups({'head': 'a', 'layer': {'lora_a': 'a', 'lora_b': 'b'}},
                 a=1, b=1), r'one label for both factors'),
]  # fmt: skip


@pytest.mark.parametrize(('optimizer', 'options', 'message'), CONSTANTS)
def test_constants_and_optimizers_that_do_not_fit(optimizer, options, message):
  with pytest.raises(ValueError, match=message):
    cases.make(optimizer, **options)


@pytest.mark.parametrize(
  ('word', 'right'),
  [
    ('epochs', 'give steps='),
    ('max_grad_norm', 'give l2_clip_norm='),
    ('batch_size', 'give expected_batch_size='),
    ('microbatch_size', r'execution=, training\.Execution\(microbatch_size'),
    ('noise_multipler', 'did you mean noise_multiplier='),  # Misspelt.
    ('max_gradnorm', 'give l2_clip_norm='),  # Another library's, misspelt.
    ('zzz', 'It has loss, params, optimi'),
  ],
)
def test_the_right_word_is_named(word, right):
  with pytest.raises(TypeError, match=rf'no {word}=.*{right}'):
    cases.make(SGD, **{word: 1})


def test_the_table_of_words_names_arguments():
  own = set(inspect.signature(training.make_private).parameters)
  assert {right for right, _ in seams.FOREIGN_WORDS.values()} <= own
  assert not set(seams.FOREIGN_WORDS) & own


def test_weights_beside_their_adapters_are_warned_of():
  """As a filter ``nnx.Param`` lets them through; the training goes on."""
  pair = {'lora_a': jnp.ones((6, 2)), 'lora_b': jnp.zeros((2, 5))}
  with pytest.warns(
    UserWarning, match='entries of params .* kernel, the wei'
  ) as (caught):
    cases.make(prism, params=pair | {'kernel': jnp.ones((6, 5), jnp.float32)})
  # Of the line that made it, and none without adapters or without a weight.
  assert caught[0].filename == cases.__file__
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    cases.make(SGD, params={'kernel': jnp.ones((6, 5))})
    cases.make(prism, params=pair)


# Losses, when the first step is made; each takes a batch but the first ones.


def per_entry(params, frozen, x, y):
  return (x @ frozen + params['head'] - y) ** 2


def mean(params, frozen, x, y):
  """The loss that every newcomer has: one number for the whole batch."""
  return jnp.mean(per_entry(params, frozen, x, y))


def centred(params, frozen, x, y):
  """As batch normalisation does."""
  return jnp.sum(per_entry(params, frozen, x - x.mean(0), y), -1)


@pytest.mark.parametrize(
  ('loss', 'options', 'message'),
  [
    (per_entry, {}, 'the loss of one example, which has no'),
    (centred, {'batched_loss': True}, 'no batch normalisation, no mean'),
    (mean, {'batched_loss': True}, r'Expected losses of shape \(\d+,\)'),
    (cases.loss, {'has_aux': True}, r'return \(loss, aux\), as has_aux=True'),
  ],
)
def test_losses_that_do_not_fit(loss, options, message):
  made = cases.make(SGD, loss=loss, record=cases.RECORD, **options)
  state = made.init(PARAMS)
  with pytest.raises(ValueError, match=message):
    made.compile(state, FROZEN)  # Before any record is read.
  with pytest.raises(ValueError, match=message):
    made.step(state, next(iter(made.batches(state, DATA))), FROZEN)


def losses(copies, frozen, x, y):
  """Of a batch; a second frozen weight makes it mix the records."""
  of_each = cases.losses(copies, frozen['weight'], x, y)
  return of_each * jnp.sum(x) if 'mixed' in frozen else of_each


def test_a_state_has_one_program_and_each_is_proved_before_it_runs():
  made = cases.make(SGD, loss=losses, batched_loss=True)
  frozen = {'weight': jnp.asarray(FROZEN)}
  state = made.init(PARAMS)
  batches = iter(made.batches(state, DATA))
  state, batch = made.step(state, next(batches), frozen), next(batches)
  assert all(made.proofs)
  for more, message in (
    ('mixed', 'reduce_sum at misuse_test'),
    ('unused', 'a difference in program'),
  ):
    with pytest.raises(ValueError, match=message):
      made.step(state, batch, frozen | {more: jnp.ones(())})


def test_a_step_beyond_the_last():
  made = private()
  state = cases.trained(made)
  assert len(made.batches(state, DATA)) == 0
  start = made.init(PARAMS)
  with pytest.raises(ValueError, match='All steps=3 are done, and no other'):
    made.step(state, next(iter(made.batches(start, DATA))), FROZEN)


def test_a_spent_state_and_forgotten_weights():
  """Before XLA and Python speak of deleted buffers and missing arguments."""
  made = private()
  state = made.init(PARAMS)
  batch = next(iter(made.batches(state, DATA)))
  for call in (made.step, made.nonprivate_means):
    with pytest.raises(ValueError, match=r"frozen=.* missing .* argument: 'y'"):
      call(state, batch)
  made.step(state, batch, FROZEN)
  for call in (made.step, made.nonprivate_means):
    with pytest.raises(ValueError, match='newest state, got .* is of step 0'):
      call(state, batch, FROZEN)


def test_batches_that_are_not_ours():
  made = private()
  state = made.init(PARAMS)
  rows = tuple(x[:20] for x in DATA)
  with pytest.raises(ValueError, match=r'batches\(state, data\).*got tuple'):
    made.step(state, rows, FROZEN)
  with pytest.raises(ValueError, match='the batches are drawn here, by chance'):
    made.batches(state, iter([rows]))
  batches = list(made.batches(state, DATA))
  with pytest.raises(ValueError, match='batch of step 0 .* got that of step 1'):
    made.step(state, batches[1], FROZEN)
  state = made.step(state, batches[0], FROZEN)
  with pytest.raises(ValueError, match='iterate .* once'):
    made.step(state, batches[0], FROZEN)
  # Of the same settings, but another seed.
  other = cases.make(SGD, prng_key=None)
  start = other.init(PARAMS)
  with pytest.raises(ValueError, match='step 0 of another'):
    made.step(made.init(PARAMS), next(iter(other.batches(start, DATA))), FROZEN)


@pytest.mark.parametrize(
  'options',
  [
    {'noise_multiplier': 0.5}, {'steps': 4}, {'l2_clip_norm': 2.0},
    {'dataset_size': 400}, {'expected_batch_size': 10}, {'delta': 1e-5},
    {'execution': training.Execution(padded_batch_size=100)}, AUTOMATIC,
    {'tags': {'base': 'o' * 200}}, {'record': cases.RECORD},
    {'stop': 'adaptive'},
  ],
)  # fmt: skip
def test_states_of_another_training(options):
  other = cases.make(SGD, prng_key=None, **options)
  state = private().init(PARAMS)
  message = 'state of this training'
  if 'tags' in options:
    message += r".*tags; here \{'base': 'ooo"
  for call in (
    lambda: other.batches(state, DATA),
    lambda: other.step(state, None, FROZEN),
    lambda: other.statement(state),
    lambda: other.compile(state),
    lambda: other.nonprivate_means(state, None),
    lambda: other.adapters(state),
    # And what was saved by a version whose states held less.
    lambda: other.batches(state._replace(fingerprint=np.zeros(8)), DATA),
    lambda: other.step(PARAMS, None),
  ):
    with pytest.raises(ValueError, match=message):
      call()


def test_states_and_data_that_do_not_fit():
  made = private()
  state = made.init(PARAMS)
  of_users = cases.make(SGD, examples_per_user=2, dataset_size=100)
  start = of_users.init(PARAMS)

  def init_from(head):  # All else of the parameters is known.
    return made.init(PARAMS | {'head': head})

  def step_from(params):  # All else of the state is known.
    return made.step(state._replace(params=params), None)

  for call, message in (
    (lambda: made.init({'head': PARAMS['head']}), 'params of the shapes'),
    (lambda: jax.jit(made.init)(PARAMS), 'outside of jit'),
    (lambda: jax.jit(init_from)(PARAMS['head']), 'outside of jit'),
    (lambda: jax.jit(step_from)(PARAMS), 'outside of jit'),
    # What else data may be is in records_test.py.
    (lambda: made.batches(state, 7), r'a source with len\(data\)'),
    (
      lambda: made.batches(state, DATA, users=np.arange(N)),
      'if and only if examples_per_user',
    ),
    (lambda: of_users.batches(start, DATA), 'if and only if examples_per_user'),
  ):
    with pytest.raises(ValueError, match=message):
      call()
