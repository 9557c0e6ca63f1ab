"""A private training is the spelled-out chain; what is known beside it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import lora, training
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS, B, N, loss
from tests.core import seams

SGD = optax.sgd(0.1)
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
CHAINS = {
  'prism': (functools.partial(prism_optax.prism, 0.1), 'l2_clip_norm'),
  'dp_muon': (functools.partial(prism_optax.dp_muon, 0.1), 'l2_clip_norms'),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', CHAINS)
def test_same_bits_as_the_spelled_out_chain(name):
  make, clip_norm = CHAINS[name]
  private = cases.make(make, steps=2)
  state = private.init(PARAMS)
  batches = list(private.batches(state, DATA))
  end = cases.trained(private, state)
  tx = make(
    **{clip_norm: 1.0}, noise_multiplier=1.0, expected_batch_size=B,
    prng_key=7, steps=2,
  )  # fmt: skip

  @jax.jit
  def step(params, state, digest, x, y, is_padding):
    grads = jax.vmap(jax.grad(loss), (None, None, 0, 0))(params, FROZEN, x, y)
    updates, state = tx.update(
      grads, state, params, is_padding_example=is_padding,
      release_digest=digest,
    )  # fmt: skip
    return optax.apply_updates(params, updates), state

  params, state = PARAMS, tx.init(PARAMS)
  for batch in batches:
    rows = *batch.examples, batch.is_padding_example
    digest = seams.release_digest(end, batch, params)
    params, state = step(params, state, digest, *rows)
  cases.assert_same_bits(end.params, params)
  assert not np.array_equal(end.params['head'], PARAMS['head'])


@pytest.fixture(scope='module')
def usual():
  return cases.by_keys_alone(cases.make(SGD))


def of_dict(params, frozen, record):
  return loss(params, frozen, record['x'], record['y'])


def with_aux(params, frozen, x, y):
  return loss(params, frozen, x, y), {'x': x, 'hit': x[0] > -0.5}


FORM = dict(zip('xy', cases.RECORD, strict=True))
# As of a ``datasets.Dataset``.
DICTS = [{'x': x.tolist(), 'y': y.tolist()} for x, y in zip(*DATA, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
  ('options', 'data'),
  [
    ({'record': cases.RECORD}, [*zip(*DATA, strict=True)]),
    ({}, tuple(map(jnp.asarray, DATA))),
    ({'record': FORM, 'loss': of_dict}, DICTS),
    ({'loss': cases.losses, 'batched_loss': True}, DATA),
    ({'loss': with_aux, 'has_aux': True}, DATA),
    # More rows, the same records: the seed and the step say which.
    ({'execution': training.Execution(1, skip_padding=True)}, DATA),
    ({'execution': training.Execution(16, skip_padding=True)}, DATA),
  ],
  ids=['list', 'jax', 'dicts', 'batched', 'aux', 'one by one', 'micro'],
)
def test_data_and_execution_of_any_kind_give_the_same(options, data, usual):
  """Sums are exact; a gradient may be rounded by the shape of its batch."""
  private = cases.make(SGD, **options)
  found = cases.by_keys_alone(private, data)
  if private.parts.execution.microbatch_size:
    assert private.padded_batch_size % options['execution'].microbatch_size == 0
  rtol = 1e-4 if 'batched_loss' in options else 1e-6
  np.testing.assert_allclose(found['head'], usual['head'], rtol, 1e-6)
  np.testing.assert_allclose(
    found['layer']['lora_b'], usual['layer']['lora_b'], rtol, 1e-6
  )


def test_dense_optimizers_are_dp_sgd():
  """One step without noise, against the clipped mean in float64."""
  private = cases.make(
    optax.sgd(1.0), noise_multiplier=0.0, l2_clip_norm=20.0, steps=1
  )
  state = private.init(PARAMS)
  (batch,) = private.batches(state, DATA)
  here = ~np.asarray(batch.is_padding_example)
  rows = np.concatenate([np.asarray(x)[here] for x in batch.examples], 1)
  # Which records were drawn is read off the batch, as nobody else may.
  data = np.concatenate(DATA, 1)
  drawn = [np.flatnonzero((data == row).all(1))[0] for row in rows]
  assert 5 < len(set(drawn)) == len(drawn) < 45
  grads = [np.float64(x) for x in jax.tree.leaves(cases.gradients())]
  size = np.sqrt(sum((x**2).reshape(N, -1).sum(1) for x in grads))
  weights = np.minimum(1, 20 / size)
  assert 0.1 < np.mean(weights < 1) < 1
  after = private.step(state, batch, FROZEN)
  assert 'passes' not in private.statement(after)  # No noise, no proof.
  for x, old, new in zip(
    grads, *map(jax.tree.leaves, (PARAMS, after.params)), strict=True
  ):
    mean = np.tensordot(weights[drawn], x[drawn], 1) / B
    np.testing.assert_allclose(new - old, -mean, rtol=2e-5, atol=1e-6)


def test_two_runs_have_nothing_in_common():
  """Without a key: other batches, other noise."""
  private = cases.make(SGD, prng_key=None)
  one, other = private.init(PARAMS), private.init(PARAMS)
  assert one.seed.shape == (4,)  # Words: too many seeds to try them all.
  assert not np.array_equal(one.seed, other.seed)
  one, other = (cases.trained(private, state) for state in (one, other))
  assert not np.allclose(one.params['head'], other.params['head'])


def rate(count):
  """Overflows in the second of three steps."""
  return jnp.where(count == 1, jnp.inf, 0.1)


# Of one entry alone.
ONE_OVERFLOWS = optax.GradientTransformation(
  lambda params: jnp.zeros((), jnp.int32),
  lambda updates, count, params: (
    updates | {'head': updates['head'].at[0].multiply(rate(count))},
    count + 1,
  ),
)
# A state that holds infinity, as that of a search may.
BEST_SO_FAR = optax.GradientTransformation(
  lambda params: jnp.array(jnp.inf), optax.identity().update
)


@pytest.mark.parametrize(
  'optimizer',
  [
    optax.chain(BEST_SO_FAR, optax.sgd(0.1, momentum=0.9), ONE_OVERFLOWS),
    slow(functools.partial(prism_optax.prism, rate)),
  ],
  ids=['momentum', 'prism'],
)
def test_floats_stay_and_keys_and_counters_move_on(optimizer):
  """A step that is not finite leaves the parameters and counts all the same."""
  private = cases.make(optimizer, prng_key=None, expected_batch_size=N)
  state = private.init(PARAMS)
  seen = [cases.saved(state)]
  for batch in private.batches(state, DATA):
    state = private.step(state, batch, FROZEN)
    seen.append(cases.saved(state))
  assert [(int(x.held), int(x.step)) for x in seen] == [
    (0, 0), (0, 1), (1, 2), (1, 3),
  ]  # fmt: skip
  moved = 0
  for x, y in zip(
    *(jax.tree.leaves((s.params, s.optimizer)) for s in seen[1:3]), strict=True
  ):
    if np.issubdtype(x.dtype, np.floating):
      np.testing.assert_array_equal(x, y)
    else:
      moved += not np.array_equal(x, y)
  assert moved >= 2  # The key of the noise and the count of the schedule.
  heads = [x.params['head'] for x in seen]
  assert not np.array_equal(heads[0], heads[1])  # The others were taken.
  assert not np.array_equal(heads[2], heads[3])


@pytest.mark.slow
def test_a_state_may_change_its_type_in_a_step():
  """Sums that begin in half precision go on in that of the gradients."""
  sums = optax.GradientTransformation(
    lambda params: optax.tree.zeros_like(params, jnp.float16),
    lambda updates, state, params: 2 * (optax.tree.add(updates, state),),
  )
  private = cases.make(optax.chain(sums, SGD))
  state = private.init(PARAMS)
  for batch in private.batches(state, DATA):
    state = private.step(state, batch, FROZEN)
  assert int(state.held) == 0
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))


# Epsilon.


# Half of the batches are cut, which costs something.
CUT = training.Execution(padded_batch_size=B)


@pytest.mark.parametrize(
  ('target', 'options'),
  [
    (0.5, {'expected_batch_size': N}),
    (0.5, {'steps': 5, 'stop': 'adaptive', 'execution': CUT}),
  ],
)
def test_the_statement_keeps_the_promise(target, options):
  private = cases.make(
    SGD, noise_multiplier=None, target_epsilon=target, **options
  )
  shown = float(re.match(r'epsilon <= (\S+) ', private.statement())[1])
  assert target * 0.995 <= shown <= target
  assert target * 0.995 <= private.epsilon() <= target


# What is known before and beside the steps.


def test_compiled_ahead_of_the_first_record(caplog):
  traces = []

  def counted(params, frozen, x, y):
    traces.append(1)
    return loss(params, frozen, x, y)

  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
  shapes = jax.eval_shape(lambda: params)  # In the place of parameters.
  private = cases.make(
    SGD, params=shapes, loss=counted, record=cases.RECORD, prng_key=None
  )
  state = private.init(params)
  jax.clear_caches()  # What other tests have compiled.
  private.compile(state, FROZEN)
  assert len(private.proofs) == 2
  assert all(private.proofs)
  count, batches = len(traces), private.batches(state, DATA)
  with pytest.raises(ValueError, match=r'compiled for, .*\(rows \[\(\d+, 6\)'):
    private.step(state, next(iter(batches)), FROZEN[:, :, None])
  batch = next(iter(batches))
  with jax.log_compiles():
    state = private.step(state, batch, FROZEN)
  assert len(traces) == count
  assert caplog.text.count('Compiling') <= 1  # The sum of a counter.
  assert {str(x.dtype) for x in jax.tree.leaves(state.params)} == {'bfloat16'}
  assert len(batches) == 3  # Public, so a progress bar may know it.
  # A restored state is compared before its data are there.
  other = cases.make(
    optax.sgd(0.2), params=params, record=cases.RECORD, prng_key=None
  )
  with pytest.raises(ValueError, match=r'a difference in program \(loss'):
    other.compile(state, FROZEN)
  without = cases.make(SGD)
  with pytest.raises(ValueError, match='record=.*to compile before'):
    without.compile(without.init(PARAMS), FROZEN)


@pytest.mark.slow
def test_users_are_compiled_ahead():
  private = cases.make(
    SGD, record=cases.RECORD, dataset_size=100, examples_per_user=2, delta=1e-3
  )
  state = private.init(PARAMS)
  private.compile(state, FROZEN)
  # Another program would be refused.
  cases.trained(private, state, users=np.arange(N) // 2)


@jax.jit
def of_each(x, y):
  """Loss and norm of the gradient of each record."""
  values, grads = jax.vmap(jax.value_and_grad(loss), (None, None, 0, 0))(
    PARAMS, FROZEN, x, y
  )
  return values, jax.vmap(optax.tree.norm)(grads)


@cases.fast_first(
  'kind', ['batched'], ['records', 'micro-batches', 'batched', 'users']
)
def test_means_of_a_batch(kind):
  """Against NumPy, over the records that were drawn and no padding.

  Padding is zeros, which would be hits. Of each user it is the mean over the
  records that are there.
  """
  users, batched = None, kind == 'batched'
  of_batch = jax.vmap(with_aux, (0, None, 0, 0)) if batched else with_aux
  options = {'execution': training.Execution(8)} if 'micro' in kind else {}
  if kind == 'users':
    users = np.repeat(np.arange(50), 3)
    options = {
      'dataset_size': 50, 'expected_batch_size': 50, 'examples_per_user': 4,
      'delta': 1e-3,
    }  # fmt: skip
  private = cases.make(
    SGD, loss=of_batch, batched_loss=batched, has_aux=True, **options
  )
  state = private.init(PARAMS)
  data = tuple(x[:150] for x in DATA)
  batch = next(iter(private.batches(state, data, users=users)))
  found = private.nonprivate_means(state, batch, FROZEN)
  assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(batch.examples))
  here, (x, y) = slice(None), data
  if users is None:
    here, (x, y) = ~np.asarray(batch.is_padding_example), batch.examples
    assert 5 < here.sum() < len(here)
  values, norms = (np.asarray(z)[here] for z in of_each(x, y))
  x = np.asarray(x)[here]
  # Float32, in another order of the sums.
  np.testing.assert_allclose(found.loss, values.mean(), rtol=1e-5)
  np.testing.assert_allclose(found.aux['x'], x.mean(0), atol=1e-6)
  hits = (x[:, 0] > -0.5).mean()
  np.testing.assert_allclose(found.aux['hit'], hits, rtol=1e-5)
  if users is None:
    np.testing.assert_allclose(found.gradient_norm, norms.mean(), rtol=1e-5)
  nobody = dataclasses.replace(
    batch, is_padding_example=jnp.ones_like(batch.is_padding_example)
  )
  assert private.nonprivate_means(state, nobody, FROZEN).loss == 0
  private.step(state, batch, FROZEN)  # Its buffers are all there still.


@pytest.mark.slow
def test_means_of_coordinates_are_in_the_layout_of_the_optimizer():
  layout = lora.Layout(scale=4.0)
  private = cases.make(functools.partial(prism_optax.prism, 1, layout=layout))
  state = private.init(PARAMS)
  batch = next(iter(private.batches(state, DATA)))
  found = private.nonprivate_means(state, batch, FROZEN)
  here = ~np.asarray(batch.is_padding_example)
  coordinates = prism_optax.tangent_coordinates(PARAMS, layout=layout)

  @jax.jit
  @functools.partial(jax.vmap)
  def norm(x, y):
    return optax.tree.norm(coordinates(jax.grad(loss)(PARAMS, FROZEN, x, y)))

  want = norm(*batch.examples)[here].mean()
  np.testing.assert_allclose(found.gradient_norm, want, rtol=1e-5)
