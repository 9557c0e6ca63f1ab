"""What is known before, beside and after the steps: compile, means, claims."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tqdm

from prism_optax import lora, training
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS, B, N

SGD = optax.sgd(0.1)


def with_aux(params, frozen, x, y):
  return cases.loss(params, frozen, x, y), {'x': x, 'hit': x[0] > -0.5}


def test_compiled_ahead_of_the_first_record():
  traces = []

  def loss(params, frozen, x, y):
    traces.append(1)
    return cases.loss(params, frozen, x, y)

  private = cases.make(SGD, loss=loss, record=cases.RECORD, prng_key=None)
  state = private.init(PARAMS)
  private.compile(state, FROZEN)
  assert all(private.proofs)
  assert len(private.proofs) == 2
  count = len(traces)
  batches = private.batches(state, DATA)
  with pytest.raises(ValueError, match='as they were compiled for'):
    private.step(state, next(iter(batches)), FROZEN[:, :, None])
  state = private.step(state, next(iter(batches)), FROZEN)
  assert len(traces) == count
  # A restored state is compared before its data are there.
  other = cases.make(optax.sgd(0.2), record=cases.RECORD, prng_key=None)
  with pytest.raises(ValueError, match=r'another one: program \(loss'):
    other.compile(state, FROZEN)


def test_a_loss_that_mixes_records_is_refused_before_they_are_read():
  def losses(params, frozen, x, y):
    z = (x - x.mean(0)) @ frozen + params['head']
    return jnp.sum((z - y) ** 2, -1)

  private = cases.make(SGD, loss=losses, batched_loss=True, record=cases.RECORD)
  state = private.init(PARAMS)
  with pytest.raises(ValueError, match='no mean over the batch'):
    private.compile(state, FROZEN)
  without = cases.make(SGD)
  with pytest.raises(ValueError, match='record=.*to compile before'):
    without.compile(without.init(PARAMS), FROZEN)


def test_users_are_compiled_ahead():
  private = cases.make(
    SGD, record=cases.RECORD, dataset_size=100, examples_per_user=2,
    delta=1e-3,
  )  # fmt: skip
  state = private.init(PARAMS)
  private.compile(state, FROZEN)
  cases.trained(private, state, users=np.arange(N) // 2)
  assert len(private._program.digests) == 1


def test_auxiliary_values_change_no_step():
  plain = cases.by_keys_alone(cases.make(SGD))
  aux = cases.by_keys_alone(cases.make(SGD, loss=with_aux, has_aux=True))
  cases.assert_same_bits(plain, aux)
  private = cases.make(SGD, has_aux=True)
  state = private.init(PARAMS)
  with pytest.raises(
    ValueError, match=r'return \(loss, aux\), as has_aux=True'
  ):
    private.step(state, next(iter(private.batches(state, DATA))), FROZEN)


@pytest.mark.parametrize('kind', ['records', 'micro-batches', 'batched'])
def test_means_of_a_batch(kind):
  """Against NumPy, over the records that were drawn and no padding.

  Padding is zeros, which would be hits.
  """

  def batched(params, frozen, x, y):
    pair = params['layer']
    more = lora.per_example_product(x, pair['lora_a'], pair['lora_b'])
    z = x @ frozen + more + params['head']
    return jnp.sum((z - y) ** 2, -1), {'x': x, 'hit': x[:, 0] > -0.5}

  private = cases.make(
    SGD,
    loss=batched if kind == 'batched' else with_aux,
    batched_loss=kind == 'batched',
    has_aux=True,
    execution=training.Execution(8 if kind == 'micro-batches' else None),
  )
  state = private.init(PARAMS)
  batch = next(iter(private.batches(state, DATA)))
  found = private.nonprivate_means(state, batch, FROZEN)
  here = ~np.asarray(batch.is_padding_example)
  assert 5 < here.sum() < len(here)
  x, y = (np.asarray(leaf)[here] for leaf in batch.examples)
  values = jax.vmap(cases.loss, (None, None, 0, 0))(PARAMS, FROZEN, x, y)
  grads = jax.vmap(jax.grad(cases.loss), (None, None, 0, 0))(
    PARAMS, FROZEN, x, y
  )
  norms = jax.vmap(optax.tree.norm)(grads)
  # Float32, in another order of the sums.
  np.testing.assert_allclose(found.loss, values.mean(), rtol=1e-5)
  np.testing.assert_allclose(found.gradient_norm, norms.mean(), rtol=1e-5)
  np.testing.assert_allclose(found.aux['x'], x.mean(0), atol=1e-6)
  np.testing.assert_allclose(
    found.aux['hit'], (x[:, 0] > -0.5).mean(), rtol=1e-6
  )
  private.step(state, batch, FROZEN)  # Its buffers are all there still.


def test_means_of_users():
  """Of each user the mean over the records that are there."""
  private = cases.make(
    SGD, loss=with_aux, has_aux=True, dataset_size=50, expected_batch_size=50,
    examples_per_user=4, delta=1e-3,
  )  # fmt: skip
  users = np.repeat(np.arange(50), 3)
  state = private.init(PARAMS)
  data = tuple(x[:150] for x in DATA)
  batch = next(iter(private.batches(state, data, users=users)))
  found = private.nonprivate_means(state, batch, FROZEN)
  np.testing.assert_allclose(found.aux['x'], data[0].mean(0), atol=1e-6)
  values = jax.vmap(cases.loss, (None, None, 0, 0))(PARAMS, FROZEN, *data)
  np.testing.assert_allclose(found.loss, values.mean(), rtol=1e-5)


def test_a_ledger_that_is_ahead_of_the_state():
  private = cases.make(SGD)
  state = private.init(PARAMS)
  fixed = private.statement(state, released_steps=2, stop_was_fixed=True)
  assert '2 of 3 steps (a stop that was fixed beforehand)' in fixed
  assert f'epsilon <= {np.ceil(private.epsilon(2) * 1e3) / 1e3:.3f}' in fixed
  assert '0 of 3 steps' in private.statement(state)
  with pytest.raises(ValueError, match='at most 3 steps, got 4'):
    private.statement(state, released_steps=4)


def test_progress_has_a_total():
  """The number of batches is public, so a progress bar may know it."""
  private = cases.make(SGD)
  batches = private.batches(private.init(PARAMS), DATA)
  assert tqdm.tqdm(batches, disable=True).total == 3 == len(batches)
  assert B < N
