"""The audit to copy: it refutes a wrong claim, and lets a true one stand."""

import functools
import math
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import prism_optax
from prism_optax import training
from prism_optax.finetune import audit

# Small and sharp, every record in every batch: the claim is 1.33, and right
# guesses alone show 3.57.
CANARIES, GUESSES, OWN = 400, 120, 20
SIZE = OWN + CANARIES
SIGMA, STEPS, DELTA = 3.5, 2, 1e-4


def _rate(step):
  return 0.1 / (1 + step)


def _loss(params, frozen, x, y):
  return jnp.sum((x @ params['lora_a'] @ params['lora_b'] * frozen - y) ** 2)


def _problem():
  rng = np.random.default_rng(0)
  params = {
    'own': {
      'lora_a': rng.normal(size=(4, 2)).astype(np.float32),
      'lora_b': rng.normal(size=(2, 3)).astype(np.float32),
    },
    'canaries': np.zeros(CANARIES, np.float32),
  }
  data = tuple(rng.normal(size=(OWN, n)).astype(np.float32) for n in (4, 3))
  return params, data, rng.random(CANARIES) < 0.5


def _private(sigma):
  params, _, _ = _problem()
  return training.make_private(
    audit.with_canaries(_loss), params,
    optimizer=functools.partial(prism_optax.prism, _rate),
    l2_clip_norm=1.0, noise_multiplier=sigma, expected_batch_size=SIZE,
    dataset_size=SIZE, steps=STEPS, delta=DELTA, prng_key=3,
  )  # fmt: skip


def _bounds(sigma):
  """By attacker: right guesses, and both lower bounds."""
  params, data, coin = _problem()
  places = audit.with_places(data, coin)
  found = audit.scores(_private(sigma), params, places, np.float32(1), _rate)
  return {
    name: audit.lower_bounds(score, coin, GUESSES, DELTA)
    for name, score in found.items()
  }


@pytest.mark.slow
def test_a_true_claim_stands_and_planted_bugs_are_found():
  claim = _private(SIGMA).epsilon()
  honest, silent = _bounds(SIGMA), _bounds(0.0)
  for attacker in ('final parameters', 'every step'):
    assert max(honest[attacker][1:]) <= claim < min(silent[attacker][1:])
    assert silent[attacker][0] == GUESSES  # Without noise no coin is secret.
    assert honest[attacker][0] > GUESSES / 2  # The attack sees something.


def test_a_canary_pulls_at_its_own_number_in_its_own_place():
  data = np.ones((2, 3), np.float32), np.array([4, 7])
  *own, canaries = audit.with_places(data, np.array([True, False, True]))
  for found, given in zip(own, data, strict=True):
    np.testing.assert_array_equal(found, [*given, *3 * [0 * given[0]]])
  np.testing.assert_array_equal(canaries, [0, 0, 1, -1, 3])
  pull = jax.grad(audit.with_canaries(lambda own, frozen, x: own * frozen * x))
  params = {'own': 2.0, 'canaries': np.zeros(3)}
  for canary in (0, 1, 3, -1):
    found = pull(params, 3.0, 5.0, canary)
    assert found['own'] == (15 if canary == 0 else 0)
    want = 1e3 * (np.arange(1, 4) == canary)
    np.testing.assert_array_equal(found['canaries'], want)


def test_a_score_is_the_whole_way_down_or_the_steps_over_their_rates():
  private = mock.Mock()
  private.batches.return_value = [mock.Mock(step=i) for i in range(2)]
  private.step.side_effect = [mock.Mock(params={'canaries': x}) for x in (4, 6)]
  found = audit.scores(private, {'canaries': 5}, (), (), lambda i: 1.0 + i)
  assert found == {'final parameters': 5 - 6, 'every step': 1 / 1 - 2 / 2}


def test_bounds_are_those_of_the_source():
  """Theorem 5.2 of arXiv:2305.08846, for guesses that are all right."""
  coin = np.arange(CANARIES) % 2 == 0
  right, bound, _ = audit.lower_bounds(coin, coin, GUESSES, DELTA)
  assert right == GUESSES
  pmf = stats.binom(GUESSES, 1 / (1 + math.exp(-bound))).pmf(range(GUESSES + 1))
  worst = max(sum(pmf[-1 - i : -1]) / i for i in range(1, GUESSES + 1))
  chance = pmf[-1] + 2 * CANARIES * DELTA * worst
  assert chance == pytest.approx(audit.SIGNIFICANCE, rel=1e-6)
  wrong = np.where(np.arange(CANARIES) < 20, -1, coin)
  *_, gaussian = audit.lower_bounds(wrong, coin, GUESSES, DELTA)
  assert gaussian == pytest.approx(2.7865, rel=1e-3)
  # As many right as by chance, and none at all, show nothing.
  assert audit.lower_bounds(0 * coin, coin, GUESSES, DELTA)[1:] == (0, 0)
  assert audit.lower_bounds(~coin, coin, GUESSES, DELTA) == (0, 0, 0)
  # What is more than was claimed is said, and nothing else is.
  scores = [('blind', 0 * coin), ('sees all', coin)]
  *_, blind, sees_all, _ = audit.table(0.0, coin, GUESSES, DELTA, scores)
  assert 'WRONG' not in blind
  assert sees_all.endswith('THE CLAIM IS WRONG')


@pytest.mark.slow
def test_it_runs_and_says_what_it_can_show(capsys, tmp_path):
  """Without noise the claim of 3 falls."""
  import audit as example  # Which compiles when it is imported.

  path = tmp_path / 'scores.png'
  claim, _ = example.main(planted=0.0, canaries=500, seed=0, plot=path)
  assert claim <= example.train.EPSILON
  printed = capsys.readouterr().out
  assert '150 guesses of 500 coins can show 3.76 at most' in printed
  assert printed.count('THE CLAIM IS WRONG') == 2
