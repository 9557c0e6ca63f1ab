"""Losses that let records meet do not get through ``make_private``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import lora, training
from tests.core import seams
from tests.proofs import oracle

N, WORDS, LENGTH, WIDTH, EXPERTS = 40, 13, 5, 4, 3
PAD = 0
_rng = np.random.default_rng(0)
# Tokens 0 (padding) and 1 (end) are rare enough for made-up rows of them to
# hide what the losses do.
TOKENS = _rng.integers(0, WORDS, (N, LENGTH)).astype(np.int32)
LABELS = _rng.integers(0, 3, N).astype(np.int32)
PARAMS = {
  'lora_a': _rng.normal(size=(WIDTH, 2)).astype(np.float32),
  'lora_b': _rng.normal(size=(2, WORDS)).astype(np.float32),
}
FROZEN = {
  'table': _rng.normal(size=(WORDS, WIDTH)).astype(np.float32),
  'router': _rng.normal(size=(WIDTH, EXPERTS)).astype(np.float32),
}


def logits_of(params, x):
  return lora.per_example_product(x, params['lora_a'], params['lora_b'])


def of_tokens(params, frozen, tokens):
  """Cross-entropy of each next token, (B, LENGTH - 1)."""
  logits = logits_of(params, frozen['table'][tokens])
  return optax.softmax_cross_entropy_with_integer_labels(
    logits[:, :-1], tokens[:, 1:]
  )


def apart(params, frozen, tokens, labels):
  """Divided by the tokens of each record, which is allowed."""
  counts = tokens[:, 1:] != PAD
  sums = jnp.sum(of_tokens(params, frozen, tokens) * counts, 1)
  return sums / jnp.maximum(jnp.sum(counts, 1), 1)


def divided_by_tokens_of_the_batch(params, frozen, tokens, labels):
  counts = tokens[:, 1:] != PAD
  sums = jnp.sum(of_tokens(params, frozen, tokens) * counts, 1)
  return sums / jnp.maximum(jnp.sum(counts), 1)


def experts_with_a_capacity(params, frozen, tokens, labels):
  x = frozen['table'][tokens]
  scores = jax.nn.softmax(x @ frozen['router'])
  chosen = jax.nn.one_hot(jnp.argmax(scores, -1), EXPERTS).reshape(-1, EXPERTS)
  place = jnp.sum(jnp.cumsum(chosen, 0) * chosen, -1).reshape(tokens.shape)
  kept = x * (place <= 8)[..., None]
  return jnp.sum(logits_of(params, kept) ** 2, (1, 2))


def dispatched_by_products(params, frozen, tokens, labels):
  """To a place of its own at one expert, by one-hot products: 0 times NaN."""
  x = frozen['table'][tokens].sum(1)
  own = jnp.eye(len(x))[:, None]
  places = jax.nn.one_hot(labels, EXPERTS)[..., None] * own
  slots = jnp.einsum('bec,bd->ecd', places, x)
  collected = jnp.einsum('bec,ecd->bd', places, jnp.tanh(slots))
  return jnp.sum(logits_of(params, collected[:, None]) ** 2, (1, 2))


def contrastive(params, frozen, tokens, labels):
  z = logits_of(params, frozen['table'][tokens]).sum(1)
  return optax.softmax_cross_entropy_with_integer_labels(
    z @ z.T, jnp.arange(len(z))
  )


@jax.custom_batching.custom_vmap
def centred(x):
  return x


@centred.def_vmap
def _(size, batched, x):
  return x - jnp.mean(x, 0), True


def secretly_centred(params, frozen, tokens, label):
  """A loss of ONE record, whose rule for batches is another function."""
  x = centred(frozen['table'][tokens])
  return jnp.sum((x @ params['lora_a'] @ params['lora_b']) ** 2)


MIXING = {
  divided_by_tokens_of_the_batch: 'reduce_sum',
  experts_with_a_capacity: 'cumsum',
  dispatched_by_products: 'dot_general',
  contrastive: 'dot_general',
  secretly_centred: 'reduce_sum',
}


def make(loss, microbatch_size=None, **options):
  return training.make_private(
    loss,
    PARAMS,
    optimizer=optax.sgd(0.1),
    **{
      'l2_clip_norm': 1.0,
      'noise_multiplier': 1.0,
      'expected_batch_size': 4,
      'dataset_size': N,
      'execution': training.Execution(microbatch_size, padded_batch_size=8),
      'steps': 1,
      'delta': 1e-3,
      'prng_key': 0,
      'batched_loss': loss is not secretly_centred,
      **options,
    },
  )


def step(private, **users):
  state = private.init(PARAMS)
  batch = next(iter(private.batches(state, (TOKENS, LABELS), **users)))
  return private.step(state, batch, FROZEN)


@pytest.mark.parametrize('microbatch_size', [None, 2])
@pytest.mark.parametrize('loss', MIXING, ids=lambda f: f.__name__)
def test_a_loss_that_mixes_records_is_refused(loss, microbatch_size):
  private = make(loss, microbatch_size=microbatch_size)
  file = 'no_record_meets_another_test.py'
  with pytest.raises(
    ValueError, match=rf'epsilon holds: {MIXING[loss]} at {file}:\d+ .* Instead'
  ):
    step(private)


@pytest.mark.slow
@pytest.mark.parametrize('loss', MIXING, ids=lambda f: f.__name__)
def test_these_losses_do_mix(loss):
  """A word of one record, or NaN in its vectors, moves another's gradient."""
  if loss is secretly_centred:
    gradients = jax.vmap(jax.grad(loss), (None, None, 0, 0))
  else:
    of_batch = lora.per_example_gradients(
      lambda p, rows, frozen: loss(p, frozen, *rows)
    )

    def gradients(params, frozen, *rows):
      return of_batch(params, rows, frozen)

  def of_vectors(params, x, *rows):
    """Each record brings its own table, so that NaN can be in it."""
    tokens, labels = rows
    words = jnp.arange(tokens.size).reshape(tokens.shape)
    table = x.reshape(-1, WIDTH)
    return gradients(params, FROZEN | {'table': table}, words, labels)

  rows = TOKENS[:8], LABELS[:8]
  axes = None, None, 0, 0
  if loss is not dispatched_by_products:
    assert oracle.mixes(gradients, PARAMS, FROZEN, *rows, in_axes=axes)
    return
  assert not oracle.mixes(gradients, PARAMS, FROZEN, *rows, in_axes=axes)
  x = _rng.normal(size=(8, LENGTH, WIDTH)).astype(np.float32)
  assert oracle.mixes(of_vectors, PARAMS, x, *rows, in_axes=(None, 0, 0, 0))


def sum_of_squares(params, frozen, tokens, label):
  x = frozen['table'][tokens]
  return jnp.sum((x @ params['lora_a'] @ params['lora_b']) ** 2)


def checked(loss, **options):
  """What a step finds before it begins, without the step."""
  users = options.pop('users', {})
  private = make(loss, **options)
  state = private.init(PARAMS)
  batch = next(iter(private.batches(state, (TOKENS, LABELS), **users)))
  return seams.proof_of_records(private, state.params, FROZEN, batch)


def test_the_proof_is_of_the_rows_that_run():
  for microbatch_size, rows in ((None, 8), (4, 4), (8, 8)):
    proof = checked(apart, microbatch_size=microbatch_size)
    assert proof
    assert proof.claim.endswith(f'in a batch of {rows}')


def test_one_row_meets_no_other():
  proof = checked(divided_by_tokens_of_the_batch, microbatch_size=1)
  assert proof
  assert 'can meet no other' in str(proof)


def test_losses_of_one_record_and_of_users():
  options = {'batched_loss': False}
  assert checked(sum_of_squares, **options)
  options |= {
    'dataset_size': N // 2, 'examples_per_user': 2,
    'users': {'users': np.arange(N) // 2},
  }  # fmt: skip
  proof = checked(sum_of_squares, **options)
  assert proof
  # Tokens, labels, and which of a user's records are there.
  assert 'enter: 3 arrays of 8 examples' in str(proof)
  # Records of one user may meet: the first batch axis is that of the user.
  assert checked(secretly_centred, **options)


def test_a_backward_pass_that_mixes():
  @jax.custom_vjp
  def odd(x):
    return x

  odd.defvjp(lambda x: (x, None), lambda _, g: (g - jnp.mean(g, 0),))

  def losses(params, frozen, tokens, labels):
    x = frozen['table'][tokens]
    return jnp.sum(odd(logits_of(params, x)) ** 2, (1, 2))

  with pytest.raises(ValueError, match='reduce_sum at no_record_meets'):
    checked(losses)
