"""Every misuse that a newcomer tries is refused, with what to do instead."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import training
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS, N

SGD = optax.sgd(0.1)


@functools.cache
def private():
  return cases.make(SGD, prng_key=None)


def first_batch(training_, state):
  return next(iter(training_.batches(state, DATA)))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'delta': 0.5}, r'delta < 1 / dataset_size, got delta=0\.5'),
    ({'delta': 1 / N}, r'publishing one record'),
    ({'delta': 0.0}, r'0 < delta < 1'),
    ({'steps': 0}, r'steps to be an integer >= 1'),
    ({'steps': 1e3}, r'steps to be an integer'),
    ({'expected_batch_size': 201}, r'expected_batch_size <= dataset_size'),
    ({'expected_batch_size': 20.5}, r'expected_batch_size to be an integer'),
    ({'l2_clip_norm': 0.0}, r'0 < l2_clip_norm'),
    ({'noise_multiplier': None}, r'exactly one of target_epsilon and noise'),
    ({'target_epsilon': 3.0}, r'exactly one of target_epsilon and noise'),
    ({'noise_multiplier': -1.0}, r'noise_multiplier >= 0'),
    (
      {'execution': training.Execution(7, padded_batch_size=48)},
      r'multiple of microbatch',
    ),
    ({'examples_per_user': 2, 'batched_loss': True}, r'not supported'),
    ({'prng_key': 'secret'}, r'chacha20'),
  ],
)
def test_constants_that_do_not_fit(options, message):
  with pytest.raises(ValueError, match=message):
    cases.make(SGD, **options)


@pytest.mark.parametrize(
  ('optimizer', 'message'),
  [
    (
      prism_optax.prism(
        0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=20
      ),
      r'functools\.partial\(prism_optax\.prism, learning_rate\)',
    ),
    (prism_optax.scale_by_rank_preconditioner(noise_stddev=1.0), r'functools'),
    (prism_optax.intrinsic_clip(1.0), r'functools'),
    (prism_optax.per_matrix_clip(1.0), r'functools'),
    (0.1, r'optax\.GradientTransformation or a function'),
    (optax.adamw, r'does not take'),
    (lambda **constants: optax.sgd(0.1), r'leaves the optimizer without'),
    (lambda **constants: 0.1, r'begins with a clip'),
    (
      functools.partial(prism_optax.prism, 0.1, noise_multiplier=0.01),
      r"fixes \['noise_multiplier'\]",
    ),
    (
      lambda **k: prism_optax.chain(
        prism_optax.intrinsic_clip(10.0, normalize_by=k['expected_batch_size']),
        prism_optax.tangent_privatizer(0.05),
        prism_optax.retract(),
      ),
      r'noise multiplier of this training, 1, got one of 0\.1:',
    ),
  ],
)
def test_optimizers_that_do_not_fit(optimizer, message):
  with pytest.raises(ValueError, match=message):
    cases.make(optimizer)


def test_weights_beside_their_adapters_are_warned_of():
  """As a filter ``nnx.Param`` lets them through; the training goes on."""
  weight = {'kernel': jnp.ones((6, 5), jnp.float32)}
  pair = {'lora_a': jnp.ones((6, 2)), 'lora_b': jnp.zeros((2, 5))}

  def loss(params, x):
    delta = params['kernel'] + params['lora_a'] @ params['lora_b']
    return jnp.sum((x @ delta) ** 2)

  with pytest.warns(UserWarning, match='entries of params .* kernel, the wei'):
    training.make_private(
      loss,
      pair | weight,
      optimizer=functools.partial(prism_optax.prism, 0.1),
      l2_clip_norm=1.0,
      noise_multiplier=1.0,
      expected_batch_size=4,
      dataset_size=100,
      steps=2,
      delta=1e-4,
    )


def test_other_clips_need_an_optimizer_that_lets_them():
  with pytest.raises(ValueError, match='thresholds of its own'):
    cases.make(
      functools.partial(prism_optax.dp_muon, 0.1),
      clipping=training.AutomaticClipping(),
    )
  with pytest.raises(ValueError, match='per_example_gradients=False'):
    cases.make(
      lambda **k: prism_optax.prism(0.1, **k),
      clipping=training.AutomaticClipping(),
    )
  labels = training.GroupClipping({'head': 'a', 'layer': 'b'}, {'a': 1.0})
  with pytest.raises(ValueError, match=r"shares, \['a'\], got 'b'"):
    cases.make(SGD, clipping=labels)
  split = {'head': 'a', 'layer': {'lora_a': 'a', 'lora_b': 'b'}}
  with pytest.raises(ValueError, match='one label for both factors'):
    cases.make(
      functools.partial(prism_optax.prism, 0.1),
      clipping=training.GroupClipping(split, {'a': 1.0, 'b': 1.0}),
    )


def test_a_loss_of_the_wrong_shape():
  def per_entry(params, frozen, x, y):
    return (x @ frozen + params['head'] - y) ** 2

  made = cases.make(SGD, loss=per_entry)
  state = made.init(PARAMS)
  with pytest.raises(ValueError, match='the loss of one example, which has no'):
    made.step(state, first_batch(made, state), FROZEN)


@pytest.mark.parametrize('mixes', [False, True])
def test_a_loss_that_mixes_records(mixes):
  def losses(params, frozen, x, y):
    x = x - x.mean(0) if mixes else x  # As batch normalisation does.
    return jnp.sum((x @ frozen + params['head'] - y) ** 2, -1)

  made = cases.make(SGD, loss=losses, batched_loss=True)
  state = made.init(PARAMS)
  batch = first_batch(made, state)
  if not mixes:
    made.step(state, batch, FROZEN)
    return
  with pytest.raises(ValueError, match='no batch normalisation, no mean'):
    made.step(state, batch, FROZEN)


def test_a_mean_loss_of_a_batch_has_no_gradient_of_copies():
  """The loss that every newcomer has: one number for the whole batch."""

  def mean(params, frozen, x, y):
    return jnp.mean((x @ frozen + params['head'] - y) ** 2)

  made = cases.make(SGD, loss=mean, batched_loss=True)
  state = made.init(PARAMS)
  with pytest.raises(ValueError, match=r'Expected losses of shape \(\d+,\)'):
    made.step(state, first_batch(made, state), FROZEN)


def test_a_step_beyond_the_last():
  made = private()
  state = cases.trained(made)
  assert len(made.batches(state, DATA)) == 0
  batch = first_batch(made, made.init(PARAMS))
  with pytest.raises(ValueError, match='All steps=3 are done, and no other'):
    made.step(state, batch, FROZEN)


def test_a_spent_state_and_forgotten_weights():
  """Before XLA and Python speak of deleted buffers and missing arguments."""
  made = private()
  state = made.init(PARAMS)
  batch = first_batch(made, state)
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
  state = made.init(PARAMS)
  with pytest.raises(ValueError, match='step 0 of another'):
    made.step(state, first_batch(other, other.init(PARAMS)), FROZEN)


@pytest.mark.parametrize(
  'options',
  [
    {'noise_multiplier': 0.5},
    {'steps': 4},
    {'l2_clip_norm': 2.0},
    {'dataset_size': 400},
    {'expected_batch_size': 10},
    {'execution': training.Execution(padded_batch_size=100)},
    {'tags': {'base': 'other'}},
    {'clipping': training.AutomaticClipping()},
    {'delta': 1e-5},
    {'record': cases.RECORD},
    {'stop': 'adaptive'},
  ],
)
def test_states_of_another_training(options):
  other = cases.make(SGD, prng_key=None, **options)
  state = private().init(PARAMS)
  for call in (
    lambda: other.batches(state, DATA),
    lambda: other.step(state, None, FROZEN),
    lambda: other.statement(state),
  ):
    with pytest.raises(ValueError, match='state of this training'):
      call()


def test_states_that_are_none():
  with pytest.raises(ValueError, match='state of this training'):
    private().step(PARAMS, None)
  with pytest.raises(ValueError, match='params of the shapes'):
    private().init({'head': PARAMS['head']})


@pytest.mark.parametrize(
  ('data', 'message'),
  [
    ((DATA[0], DATA[1][:-1]), r'each record, got 2 leaves of 2 lengths'),
    ([*zip(*DATA, strict=True)], r'make_private\(\.\.\., record=\.\.\.\)'),
    ((np.array(['text'] * N), DATA[1]), r'Expected data of numbers'),
    (7, r'a source with len\(data\)'),
  ],
)
def test_data_that_do_not_fit(data, message):
  state = private().init(PARAMS)
  with pytest.raises(ValueError, match=message):
    private().batches(state, data)


def test_users_where_they_belong():
  state = private().init(PARAMS)
  with pytest.raises(ValueError, match='if and only if examples_per_user'):
    private().batches(state, DATA, users=np.arange(N))
  made = cases.make(SGD, examples_per_user=2, dataset_size=100)
  state = made.init(PARAMS)
  with pytest.raises(ValueError, match='if and only if examples_per_user'):
    made.batches(state, DATA)
  with pytest.raises(ValueError, match='one id for each record'):
    made.batches(state, DATA, users=np.arange(10))


def test_nothing_is_made_under_jit():
  made = cases.make(SGD, prng_key=None)
  with pytest.raises(ValueError, match='outside of jit'):
    jax.jit(made.init)(PARAMS)
