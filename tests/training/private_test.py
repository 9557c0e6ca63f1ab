"""A private training is the spelled-out chain, and can be resumed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import accounting, lora, training
from prism_optax.training import _fingerprint
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS, B, N, loss

CHAINS = {
  'prism': (functools.partial(prism_optax.prism, 0.1), 'l2_clip_norm'),
  'dp_muon': (functools.partial(prism_optax.dp_muon, 0.1), 'l2_clip_norms'),
}


def spelled_out(name, batches, release):
  """Parameters after three steps that a user wrote by hand."""
  make, clip_norm = CHAINS[name]
  tx = make(
    **{clip_norm: 1.0},
    noise_multiplier=1.0,
    expected_batch_size=B,
    prng_key=7,
    steps=3,
  )

  @jax.jit
  def step(params, state, x, y, is_padding):
    grads = jax.vmap(jax.grad(loss), (None, None, 0, 0))(params, FROZEN, x, y)
    updates, state = tx.update(
      grads,
      state,
      params,
      is_padding_example=is_padding,
      release_digest=release ^ _fingerprint.of_arrays(params),
    )
    return optax.apply_updates(params, updates), state

  params, state = PARAMS, tx.init(PARAMS)
  for batch in batches:
    params, state = step(
      params, state, *batch.examples, batch.is_padding_example
    )
  return params


@pytest.mark.parametrize(
  'name', [pytest.param('prism', marks=pytest.mark.slow), 'dp_muon']
)
def test_same_bits_as_the_spelled_out_chain(name):
  private = cases.make(CHAINS[name][0])
  state = private.init(PARAMS)
  batches = private.batches(state, DATA)
  end = cases.trained(private, state)
  release = _fingerprint.release(end.fingerprint, 0)
  cases.assert_same_bits(end.params, spelled_out(name, batches, release))
  assert not np.array_equal(end.params['head'], PARAMS['head'])


def test_microbatches_give_the_same():
  """Sums are exact; a gradient may be rounded by the shape of its batch."""
  optimizer = optax.sgd(0.1)
  whole = cases.by_keys_alone(cases.make(optimizer))
  for size, skip in ((1, True), (16, False)):
    execution = training.Execution(size, skip_padding=skip)
    parts = cases.make(optimizer, execution=execution)
    # More rows, the same records: the seed and the step say which.
    assert parts.padded_batch_size % size == 0
    np.testing.assert_allclose(
      cases.by_keys_alone(parts)['head'], whole['head'], atol=1e-7
    )


def test_dense_optimizers_are_dp_sgd():
  """One step without noise, against the clipped mean in float64."""
  private = cases.make(
    optax.sgd(1.0), noise_multiplier=0.0, l2_clip_norm=20.0, steps=1
  )
  state = private.init(PARAMS)
  (batch,) = private.batches(state, DATA)
  here = ~np.asarray(batch.is_padding_example)
  rows = np.concatenate(
    [np.asarray(x)[here] for x in batch.examples], 1, dtype=np.float64
  )
  # Which records were drawn is read off the batch, as nobody else may.
  drawn = [
    np.flatnonzero((np.concatenate(DATA, 1) == row).all(1))[0] for row in rows
  ]
  assert 5 < len(set(drawn)) == len(drawn) < 45
  grads = [np.float64(x) for x in jax.tree.leaves(cases.gradients())]
  norms = np.sqrt(sum((x**2).reshape(N, -1).sum(1) for x in grads))
  weights = np.minimum(1, 20 / norms)
  assert 0.1 < np.mean(weights < 1) < 1  # Some are cut, some are not.
  state = private.step(state, batch, FROZEN)
  for x, old, new in zip(
    grads, *map(jax.tree.leaves, (PARAMS, state.params)), strict=True
  ):
    mean = np.tensordot(weights[drawn], x[drawn], 1) / B
    np.testing.assert_allclose(new - old, -mean, rtol=2e-5, atol=1e-6)


def test_one_backward_pass_gives_the_same():
  def losses(params, frozen, x, y):
    pair = params['layer']
    more = lora.per_example_product(x, pair['lora_a'], pair['lora_b'])
    z = x @ frozen + more + params['head']
    return jnp.sum((z - y) ** 2, -1)

  private = cases.make(optax.sgd(0.1), loss=losses, batched_loss=True)
  np.testing.assert_allclose(
    cases.by_keys_alone(private)['head'],
    cases.by_keys_alone(cases.make(optax.sgd(0.1)))['head'],
    rtol=1e-4,
    atol=1e-6,
  )


def test_an_interrupted_run_goes_on_with_the_same_bits():
  """From arrays alone, in a training that was made anew."""
  optimizer = optax.adam(0.1)
  first = cases.make(optimizer, prng_key=None)
  state = first.init(PARAMS)
  for batch in first.batches(state, DATA):
    state = first.step(state, batch, FROZEN)
    if int(state.step) == 1:
      keys = jax.tree.map(_saved, state)
  again = cases.make(optimizer, prng_key=None)
  restored = jax.tree.map(
    lambda x, like: _restored(x, like), keys, again.init(PARAMS)
  )
  assert len(again.batches(restored, DATA)) == 2
  cases.assert_same_bits(cases.trained(again, restored).params, state.params)


def _saved(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if is_key else x).copy()


def _restored(x, like):
  if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
  return jnp.asarray(x)


def test_two_runs_have_nothing_in_common():
  """Without a key: other batches, other noise."""
  private = cases.make(optax.sgd(0.1), prng_key=None)
  one, other = private.init(PARAMS), private.init(PARAMS)
  assert not np.array_equal(one.seed, other.seed)
  one, other = (cases.trained(private, state) for state in (one, other))
  assert not np.allclose(one.params['head'], other.params['head'])
  known = cases.make(optax.sgd(0.1), noise_multiplier=0.0)
  assert 'no guarantee against anyone who knows prng_key' in known.statement()
  unknown = cases.make(optax.sgd(0.1), noise_multiplier=0.0, prng_key=None)
  assert 'no guarantee' not in unknown.statement()


@pytest.mark.parametrize(
  ('data', 'record'),
  [
    ([(x, y) for x, y in zip(*DATA, strict=True)], cases.RECORD),
    (tuple(map(jnp.asarray, DATA)), None),
  ],
  ids=['a list of records', 'jax arrays'],
)
def test_data_of_any_kind_give_the_same(data, record):
  optimizer = optax.sgd(0.1)
  cases.assert_same_bits(
    cases.by_keys_alone(cases.make(optimizer, record=record), data=data),
    cases.by_keys_alone(cases.make(optimizer)),
  )


def test_records_of_dicts_and_a_source():
  """Like a ``datasets.Dataset``: dicts of lists, found by position."""

  class Source:
    def __len__(self):
      return N

    def __getitem__(self, i):
      return {'x': DATA[0][i].tolist(), 'y': DATA[1][i].tolist()}

  def of_dict(params, frozen, record):
    return loss(params, frozen, record['x'], record['y'])

  optimizer = optax.sgd(0.1)
  record = dict(zip('xy', cases.RECORD, strict=True))
  private = cases.make(optimizer, loss=of_dict, record=record)
  found = cases.by_keys_alone(private, data=Source())
  wanted = cases.by_keys_alone(cases.make(optimizer))
  np.testing.assert_allclose(found['head'], wanted['head'], rtol=1e-5)


def test_the_statement_keeps_the_promise_without_sampling():
  private = cases.make(
    optax.sgd(0.1),
    noise_multiplier=None,
    target_epsilon=0.5,
    expected_batch_size=N,
  )
  shown = float(re.match(r'epsilon <= (\S+) ', private.statement())[1])
  assert 0.498 <= shown <= 0.5
  assert private.epsilon() <= 0.5


@pytest.mark.slow
def test_the_statement_keeps_the_promise():
  epsilon, size, cut, steps = 0.5, 200, 30, 10
  private = cases.make(
    optax.sgd(0.1),
    noise_multiplier=None,
    target_epsilon=epsilon,
    steps=steps,
    execution=training.Execution(padded_batch_size=cut),
  )
  shown = float(re.match(r'epsilon <= (\S+) ', private.statement())[1])
  assert epsilon - 2e-3 <= shown <= epsilon
  assert private.epsilon() <= epsilon
  assert private.event() == _event(private, size, cut, steps)


def test_batches_beyond_six_deviations_are_cut_and_accounted_for():
  size = 1000
  private = cases.make(optax.sgd(0.1), dataset_size=size, steps=30)
  assert private.padded_batch_size == 47
  assert private.event() == _event(private, size, 47, 30)


def _event(private, size, cut, steps):
  return accounting.dpsgd_event(
    private.noise_multiplier,
    B / size,
    steps,
    truncated_batch_size=cut,
    dataset_size=size,
  )


def test_full_batches_are_not_cut():
  private = cases.make(optax.sgd(0.1), expected_batch_size=N, steps=1)
  assert private.padded_batch_size == N
  (batch,) = private.batches(private.init(PARAMS), DATA)
  assert not batch.is_padding_example.any()
  # Nothing is sampled: the Gaussian mechanism itself.
  assert private.epsilon() == pytest.approx(
    accounting.gaussian_epsilon(1.0, 1e-4), rel=1e-3
  )


def test_users_contribute_the_mean_of_some_records():
  """A step without noise, against the gradient of each user's mean loss."""
  users = np.arange(N) // 4  # Fifty users of four records.
  private = cases.make(
    optax.sgd(1.0),
    noise_multiplier=0.0,
    l2_clip_norm=3.0,
    dataset_size=50,
    expected_batch_size=50,
    examples_per_user=4,
    steps=1,
  )
  assert 'unit: one user with all records, at most 4' in private.statement()
  state = cases.trained(private, users=users)
  grads = [
    x.reshape(50, 4, *x.shape[1:]).mean(1, dtype=np.float64)
    for x in jax.tree.leaves(cases.gradients())
  ]
  norms = np.sqrt(sum((x**2).reshape(50, -1).sum(1) for x in grads))
  weights = np.minimum(1, 3 / norms)
  for x, old, new in zip(
    grads, *map(jax.tree.leaves, (PARAMS, state.params)), strict=True
  ):
    mean = np.tensordot(weights, x, 1) / 50
    np.testing.assert_allclose(new - old, -mean, rtol=2e-5, atol=1e-6)
