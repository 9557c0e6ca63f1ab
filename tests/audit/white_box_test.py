"""The attacker sees the noised coordinates of every step.

With all records in every batch the mechanism is exactly a Gaussian one, so the
best lower bound meets the claim as the draws grow: an honest audit that comes
near is also a proof that no noise is wasted.
"""

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import fixed_rank
from tests.audit import chains, harness

SIGMA, STEPS = 2.0, 3


def _attack(steps, draws, **options):
  play = harness.white_box(
    harness.setting(),
    lambda key, noise: chains.prism_chain(SIGMA, key, noise, **options),
    steps=steps, position=chains.RECORDER,
  )  # fmt: skip
  return harness.attacked(play, draws, noises=(1.0, 0.5))


def _check(honest, halved, claim):
  """Below the claim but not for want of an attack; above it if halved."""
  for below, above, claimed in zip(honest, halved, claim, strict=True):
    assert 0 < below <= claimed < above
  assert honest.gdp > claim.gdp / 2


@pytest.mark.slow
def test_one_step_costs_what_is_claimed_and_half_the_noise_is_seen():
  _check(*_attack(1, 12_000, kind='none'), harness.claims(SIGMA, 1))


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['orthonormal', 'published', 'muon'])
def test_steps_of_the_whole_chain(kind):
  """The parameters of each step follow from the noise of those before."""
  _check(*_attack(STEPS, 6000, kind=kind), harness.claims(SIGMA, STEPS))


def _log_likelihood_ratio(signals, sigma, q):
  """Of steps that the canary enters with probability q, as numbers."""
  shift = (signals - 0.5) / sigma**2
  return np.sum(np.logaddexp(np.log1p(-q), np.log(q) + shift), axis=1)


@pytest.mark.slow
def test_subsampled_steps():
  """Amplification by sampling is not more than the accountant says.

  No Gaussian mechanism, hence bounds by the counts alone.
  """
  sigma, q, steps = 1.0, 0.5, 3
  play = harness.white_box(
    harness.setting(), lambda key, noise: chains.prism_chain(sigma, key, noise),
    steps=steps, position=chains.RECORDER,
    sampling=lambda key: jax.random.bernoulli(key, q),
  )  # fmt: skip
  honest, halved = (
    harness.lower_bounds(
      *(_log_likelihood_ratio(signals, sigma, q) for signals in worlds)
    ).counting
    for worlds in harness.scores(play, 6000, noises=(1.0, 0.5))
  )
  claim = harness.claims(sigma, steps, q).counting
  assert claim / 5 < honest <= claim < halved


def _muon_play(steps):
  """DP-Muon's own state: its moments tell every noised mean."""
  clip = prism_optax.per_matrix_clip(
    harness.CLIP,
    normalize_by=harness.EXPECTED_BATCH_SIZE,
    weight_dimension_numbers=chains.matrices,
  )

  def signal(params, batch, one, old, new):
    known = harness.known_mean(clip, batch, params)
    (before, now), (first, last) = (
      [optax.tree.get(s, name) for s in (old, new)] for name in ('trace', 'mu')
    )
    released = {
      name: jax.tree.map(lambda y, x: y - 0.95 * x, now[name], before[name])
      for name in ('m0', 'm1')
    }
    released['extra'] = (last['extra'] - 0.9 * first['extra']) / 0.1
    # All groups have one clip norm: equal weights for their directions.
    along = jax.tree.map(lambda x: x / jnp.linalg.norm(x), one)
    seen = jax.tree.map(jnp.subtract, released, known)
    return optax.tree.vdot(seen, along)

  return harness.played(
    harness.setting(), chains.dp_muon_of(SIGMA), steps, signal=signal
  )


@pytest.mark.slow
def test_dp_muon_spends_what_the_joint_multiplier_says():
  """Four matrices and a vector; sigma of a single one would be 5^0.5 less."""
  single = 5**-0.5
  bounds = harness.attacked(_muon_play(STEPS), 6000, noises=(1.0, single))
  _check(*bounds, harness.claims(SIGMA, STEPS))


@jax.jit
def _released(params, grads, is_padding, noise_multiplier):
  """One release, and the coordinates of every canary."""
  tx = optax.chain(
    prism_optax.intrinsic_clip(1.0),
    prism_optax.tangent_privatizer(noise_multiplier, prng_key=5),
  )
  state = tx.init(params)
  released, _ = tx.update(grads, state, params, is_padding_example=is_padding)
  return released, jax.vmap(prism_optax.tangent_coordinates(params))(grads)


def _one_run(noise_multiplier, canaries=1000):
  """m canaries at once, in or out by a coin each, one release."""
  rng = np.random.default_rng(0)
  params = {
    'lora_a': np.float32(rng.normal(size=(40, 8))),
    'lora_b': np.float32(rng.normal(size=(8, 30))),
    'head': np.zeros(800, np.float32),
  }
  # Orthogonal to each other: 800 along the head, the others in the module,
  # as gradients of `lora_a`, whose coordinates are free in any direction.
  inside = np.zeros((canaries, 40, 8), np.float32)
  inside[800:] = np.eye(320, dtype=np.float32)[: canaries - 800].reshape(
    -1, 40, 8
  )
  head = np.eye(canaries, 800, dtype=np.float32)
  left = fixed_rank.Factors(params['lora_b'].T, params['lora_a'])
  grads = {
    'lora_a': inside @ np.asarray(fixed_rank.frame(left).left_core),
    'lora_b': np.zeros((canaries, 8, 30), np.float32),
    'head': head,
  }
  grads = jax.tree.map(lambda x: 100 * x, grads)
  chosen = rng.integers(2, size=canaries).astype(bool)
  released, coordinates = _released(
    params, grads, ~chosen, np.float32(noise_multiplier)
  )
  scores = sum(
    np.tensordot(np.asarray(x), np.asarray(r), r.ndim) / 100
    for x, r in zip(
      jax.tree.leaves(coordinates), jax.tree.leaves(released), strict=True
    )
  )
  auditor = jax_privacy.auditing.CanaryScoreAuditor(
    scores[chosen], scores[~chosen]
  )
  # The guesses: the quarter with the highest scores.
  threshold = jax_privacy.auditing.Explicit(np.quantile(scores, 0.75))
  return auditor.epsilon_one_run_fdp(
    1e-2, harness.GDP_DELTA, threshold_strategy=threshold
  )


@pytest.mark.slow
def test_one_run_with_many_canaries():
  """Auditing f-DP in one run (arXiv 2410.22235).

  All records are canaries, each in or out by its own coin. One run proves half
  of the claim at best, so half the noise stays unseen; a quarter does not.
  """
  sigma = 2.0
  claim = harness.claims(sigma, 1).gdp
  assert _one_run(sigma) <= claim < _one_run(sigma / 4)
