"""Losses that let records meet do not get through ``make_private``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import training
from tests import cases
from tests.core import seams
from tests.proofs import losses

N = 40
PARAMS, *DATA = losses.problem(losses.hand_mlp, N)
# By itself, and what a batch makes of it.
MIXING = {
  losses.divided_by_tokens: 'reduce_sum', losses.capacity: 'cumsum',
  losses.dispatched: 'dot_general', losses.contrastive: 'dot_general',
  losses.secret_of_one: 'reduce_sum',
}  # fmt: skip


def begun(loss, microbatch_size=None, users=None, **options):
  """A training, its state and a batch."""
  options = {
    'dataset_size': N, 'batched_loss': loss is not losses.secret_of_one
  } | options  # fmt: skip
  private = cases.make(
    optax.sgd(0.1), loss=lambda p, frozen, x, y: loss(p, x, y), params=PARAMS,
    execution=training.Execution(microbatch_size, padded_batch_size=8),
    expected_batch_size=4, **options,
  )  # fmt: skip
  state = private.init(PARAMS)
  batch = next(iter(private.batches(state, tuple(DATA), users=users)))
  return private, state, batch


@pytest.mark.parametrize(
  ('loss', 'microbatch_size'),
  [*((loss, None) for loss in MIXING), (losses.divided_by_tokens, 2)],
)
def test_a_loss_that_mixes_records_is_refused(loss, microbatch_size):
  private, state, batch = begun(loss, microbatch_size=microbatch_size)
  message = rf'epsilon holds: {MIXING[loss]} at losses.py:\d+ .* Instead'
  with pytest.raises(ValueError, match=message):
    private.step(state, batch, 0)


def checked(loss, **options):
  """What a step finds before it begins, without the step."""
  private, state, batch = begun(loss, **options)
  return seams.proof_of_records(private, state.params, 0, batch)


def test_the_proof_is_of_the_rows_that_run():
  for microbatch_size, rows in ((None, 8), (4, 4)):
    proof = checked(losses.hand_mlp, microbatch_size=microbatch_size)
    assert proof
    assert proof.claim.endswith(f'in a batch of {rows}')
  proof = checked(losses.divided_by_tokens, microbatch_size=1)
  assert proof
  assert 'can meet no other' in str(proof)


@pytest.mark.slow
def test_the_proof_is_of_the_program_that_runs():
  """A loss that is another function when it is traced again never runs."""
  traced = []

  def once(p, x, y):
    traced.append(x)
    loss = losses.hand_mlp if len(traced) == 1 else losses.divided_by_tokens
    return loss(p, x, y)

  def after_a_step(loss):
    private, state, batch = begun(loss, noise_multiplier=0.0)
    return private.step(state, batch, 0).params

  one, other = map(after_a_step, (losses.hand_mlp, once))
  cases.assert_same_bits(one, other)


@pytest.mark.slow
def test_what_is_proved_runs_without_jit_too():
  ran = []

  def eager(p, x, y):
    ran.append(not isinstance(x, jax.core.Tracer))
    return losses.hand_mlp(p, x, y)

  private, state, batch = begun(eager)
  mixing, start, rows = begun(losses.divided_by_tokens)
  with jax.disable_jit():
    private.step(state, batch, 0)
    with pytest.raises(ValueError, match='epsilon holds: reduce_sum'):
      mixing.step(start, rows, 0)
  assert 'in a batch of 8' in private.proofs[0].claim
  assert not any(ran)


@pytest.mark.slow
def test_losses_of_one_record_and_of_users():
  check = functools.partial(checked, batched_loss=False)
  assert check(losses.mlp)
  users = {
    'dataset_size': N // 2, 'examples_per_user': 2,
    'users': np.arange(N) // 2,
  }  # fmt: skip
  proof = check(losses.mlp, **users)
  assert proof
  # Inputs, labels, and which of a user's records are there.
  assert 'enter: 3 arrays of 8 examples' in str(proof)
  # Records of one user may meet: the first batch axis is that of the user.
  assert check(losses.secret_of_one, **users)


def test_a_backward_pass_that_mixes():
  @jax.custom_vjp
  def odd(x):
    return x

  odd.defvjp(lambda x: (x, None), lambda _, g: (g - jnp.mean(g, 0),))
  with pytest.raises(ValueError, match='reduce_sum at no_record_meets'):
    checked(lambda p, x, y: losses.hand_mlp(p | {'a': odd(p['a'])}, x, y))
