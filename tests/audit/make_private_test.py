"""Attacks on trainings of `make_private`: users, and clips that are not flat.

The unit may be a user and the clip norm a release: the claim is that of all of
it together.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import accounting, training
from tests.audit import harness, trainings
from tests.core import seams

SIGMA, ROWS, MOST = trainings.SIGMA, trainings.ROWS, trainings.MOST
DRAWS = 3000  # See `harness`.
CASES = [
  ('dense', 'flat', True), ('dense', 'automatic', False),
  ('dense', 'groups', True), ('dense', 'quantile', True),
  ('prism', 'flat', True), ('prism', 'automatic', False),
  ('prism', 'groups', False), ('prism', 'quantile', True),
]  # fmt: skip


def test_the_noise_of_gradients_and_fraction_has_its_size():
  """Together they are one Gaussian mechanism of the multiplier: squares add."""
  step = trainings.step_of(trainings.make('dense', 'quantile'))
  known = trainings.others(ROWS)

  @jax.jit
  def released(keys):
    return jax.vmap(lambda key: step(key, known, np.zeros(ROWS, bool))[1])(keys)

  draws = 1000
  seen = released(jax.random.split(jax.random.key(1), draws))
  of_vote = trainings.RULES['quantile'].fraction_stddev
  own = 1 / math.sqrt(SIGMA**-2 - (2 * ROWS * of_vote) ** -2)
  mean = np.concatenate(
    [x.reshape(draws, -1) for x in jax.tree.leaves(seen.mean)], axis=1
  )
  # Five standard errors of a standard deviation.
  np.testing.assert_allclose(
    np.std(seen.vote), of_vote, rtol=5 / math.sqrt(2 * draws)
  )
  np.testing.assert_allclose(
    np.sqrt(mean.var(0).mean()), own / ROWS, rtol=5 / math.sqrt(2 * mean.size)
  )
  both = np.corrcoef(np.column_stack([seen.vote, mean]).T)[0, 1:]
  assert np.abs(both).max() < 5 / math.sqrt(draws)


def test_the_noise_of_a_fraction_has_a_new_key_at_every_step():
  private = trainings.make('dense', 'quantile')
  start = private.init(trainings.params())
  before = np.array(jax.random.key_data(start.optimizer[0].prng_key))
  _, (clip, *_), _ = seams.run_step(
    private, start.params, start.optimizer, None, trainings.others(ROWS),
    np.zeros(ROWS, bool),
  )  # fmt: skip
  assert not np.array_equal(before, jax.random.key_data(clip.prng_key))


def _canary(count, users):
  """Rows of a record far beyond the clip."""
  lead = (count, MOST) if users else (count,)
  return jax.tree.map(
    lambda x: np.broadcast_to(1e3 * x, (*lead, *x.shape)),
    trainings.gradients(5),
  )


def _claim(private):
  event = private.event(1)
  return harness.Bounds(
    private.epsilon(1),
    # Large, as counts need it; but the data are few.
    accounting.epsilon(event, harness.COUNTING_DELTA, dataset_size=ROWS),
  )


def _attack(optimizer, rule, *, users=False, rows=ROWS, canaries=1, vote=1.0):
  """Bounds of an attack on one step, and the claim.

  Args:
    optimizer: Key of `trainings.OPTIMIZERS`.
    rule: Key of `trainings.RULES`, or a rule.
    users: Whether a row is a user.
    rows: Of the batch.
    canaries: How many of them are the canary's.
    vote: Standard deviation of the noise of the vote, if there is one.
  """
  private, silent = (
    trainings.make(optimizer, rule, users=users, sigma=sigma, rows=rows)
    for sigma in (SIGMA, 0.0)
  )
  rule = trainings.RULES.get(rule) if isinstance(rule, str) else rule
  of_mean = SIGMA * trainings.CLIP / rows
  if isinstance(rule, training.QuantileClipping):
    of_mean = seams.gradients_multiplier(rule, SIGMA, rows) / rows
  known = trainings.others(rows - canaries, users)
  bounds = trainings.attack(
    private, silent, trainings.batch_of(known, _canary(canaries, users)),
    (of_mean, vote), DRAWS, canaries=canaries,
    is_present=np.ones((rows, MOST), bool) if users else None,
  )  # fmt: skip
  return bounds, _claim(private)


def _stays_below(bounds, claim):
  assert bounds.gdp <= claim.gdp
  assert bounds.counting <= claim.counting
  # Not for want of an attack.
  assert bounds.gdp > claim.gdp / 4


def _goes_above(bounds, claim):
  assert bounds.gdp > claim.gdp


@pytest.mark.slow
@pytest.mark.parametrize(
  ('optimizer', 'rule', 'users'),
  [case for case in CASES if case != ('prism', 'automatic', False)],
)
def test_a_step_tells_no_more_of_a_row_than_is_claimed(optimizer, rule, users):
  stddev = getattr(trainings.RULES[rule], 'fraction_stddev', 1.0)
  _stays_below(*_attack(optimizer, rule, users=users, vote=stddev))


@pytest.mark.slow
def test_a_user_whose_records_are_clipped_one_by_one():
  """Each record is a row, and a user has three: another unit than is said."""
  _goes_above(*_attack('dense', 'flat', rows=6, canaries=MOST))


@dataclasses.dataclass(frozen=True)
class _EachToAll(training.GroupClipping):
  """Groups that are clipped to the whole clip norm each."""

  def _factors(self, leaves, l2_clip_norm, rows):
    whole = math.sqrt(len(self.shares))  # All shares are one.
    return super()._factors(leaves, whole * l2_clip_norm, rows)


@pytest.mark.slow
def test_groups_that_are_clipped_to_the_whole_norm_each():
  names = dict.fromkeys(trainings.SHAPES, 1.0)
  rule = _EachToAll({name: name for name in names}, names)
  _goes_above(*_attack('dense', rule))


def _charged_for_other_noise(multiplier, optimizer, rule, vote):
  """The attack on noise that is refused unless nobody looks at it."""
  with seams.charged_for(multiplier):
    with pytest.raises(ValueError, match='noise multiplier of this training'):
      _attack(optimizer, rule)
    with seams.nobody_looks():
      return _attack(optimizer, rule, vote=vote)


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', ['dense', 'prism'])
def test_a_fraction_that_is_not_charged(optimizer):
  """The gradients keep the whole multiplier; the fraction has much of it."""

  def whole(clipping, joint, size):
    return joint

  rule = trainings.quantile(fraction_stddev=0.1)
  _goes_above(*_charged_for_other_noise(whole, optimizer, rule, 0.1))


@pytest.mark.slow
def test_a_fraction_without_noise():
  """It is charged for noise that it does not get."""

  def honest(_, *sizes):
    return seams.exact_multiplier(trainings.RULES['quantile'], *sizes)

  rule = trainings.quantile(fraction_stddev=1e-4)
  _goes_above(*_charged_for_other_noise(honest, 'dense', rule, 1e-4))


OPTIMIZERS = {
  'prism': functools.partial(prism_optax.prism, 0.05),
  'published_prism': functools.partial(prism_optax.published_prism, 0.05),
  'sgd': optax.sgd(0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  ('name', 'rule', 'users'),
  [('prism', 'flat', True), ('prism', 'quantile', False),
   ('published_prism', 'groups', True), ('sgd', 'quantile', True)],
)  # fmt: skip
def test_trained_parameters_tell_no_more_than_is_claimed(name, rule, users):
  """The attacker sees them alone; a third of the noise is still seen."""
  start, record = trainings.params(), trainings.gradients(5)
  along = np.outer(*np.random.default_rng(6).normal(size=(2, 6)))[:, :5]
  record['lora_a'] = np.float32(along @ start['lora_b'].T)
  record['lora_b'] = np.float32(start['lora_a'].T @ along)
  canary = jax.tree.map(
    lambda x: np.broadcast_to(
      1e3 * x, (1, MOST, *x.shape) if users else (1, *x.shape)
    ),
    record,
  )
  batch = trainings.batch_of(trainings.others(users=users), canary)
  present = np.ones((ROWS, MOST), bool) if users else None

  def bounds_of(sigma):
    private = trainings.make(OPTIMIZERS[name], rule, users=users, sigma=sigma)
    step = trainings.step_of(private)

    def play(key, canary, noise):
      del noise
      padding = ~canary & (np.arange(ROWS) == ROWS - 1)
      new, _ = step(key, batch, padding, present)
      moved = new['lora_a'] @ new['lora_b'] - start['lora_a'] @ start['lora_b']
      of_head = jnp.vdot(new['head'] - start['head'], record['head'])
      return -jnp.vdot(moved, along) - of_head

    return harness.attacked(play, DRAWS)[0], _claim(private)

  honest, claim = bounds_of(SIGMA)
  less, _ = bounds_of(SIGMA / 3)
  assert honest.gdp <= claim.gdp < less.gdp
  assert honest.counting <= claim.counting
