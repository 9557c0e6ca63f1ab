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
from prism_optax import _modules
from tests.audit import chains, harness

SIGMA, STEPS = 2.0, 3


def _attack(steps, draws, **options):
  play = harness.white_box(
    harness.setting(),
    lambda key, noise: chains.prism_chain(SIGMA, key, noise, **options),
    steps=steps,
    position=chains.RECORDER,
  )
  return harness.attacked(play, draws, noises=(1.0, 0.5))


def _check(honest, halved, claim):
  """Below the claim but not for want of an attack; above it if halved."""
  for below, above, claimed in zip(honest, halved, claim, strict=True):
    assert 0 < below <= claimed < above
  assert honest.gdp > claim.gdp / 2


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
    harness.setting(),
    lambda key, noise: chains.prism_chain(sigma, key, noise),
    steps=steps,
    position=chains.RECORDER,
    sampling=lambda key: jax.random.bernoulli(key, q),
  )
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
  where = harness.setting()
  clip = prism_optax.per_matrix_clip(
    harness.CLIP,
    normalize_by=harness.EXPECTED_BATCH_SIZE,
    weight_dimension_numbers=_muon_matrices,
  )

  def released(old, new, like):
    matrices = (optax.tree.get(s, 'trace') for s in (old, new))
    rest = (optax.tree.get(s, 'mu') for s in (old, new))
    before, now = matrices
    total = {
      name: jax.tree.map(lambda y, x: y - 0.95 * x, now[name], before[name])
      for name in ('m0', 'm1')
    }
    before, now = rest
    return total | {'extra': (now['extra'] - 0.9 * before['extra']) / 0.1}

  def play(key, canary, noise):
    tx = prism_optax.dp_muon(
      chains.LEARNING_RATE,
      l2_clip_norms=harness.CLIP,
      noise_multiplier=SIGMA * noise,
      expected_batch_size=harness.EXPECTED_BATCH_SIZE,
      prng_key=key,
      weight_dimension_numbers=_muon_matrices,
    )

    def step(carry, _):
      params, old = carry
      batch, one = harness.batch_of(where, params)
      updates, state = tx.update(
        batch, old, params, is_padding_example=harness.absent(canary)
      )
      known, _ = clip.update(
        batch, optax.EmptyState(), params,
        is_padding_example=harness.absent(jnp.array(False)),
      )  # fmt: skip
      signal = jax.tree.map(jnp.subtract, released(old, state, known), known)
      # All groups have one clip norm: equal weights for their directions.
      along = jax.tree.map(lambda x: x / jnp.linalg.norm(x), one)
      score = optax.tree.vdot(signal, along)
      return (optax.apply_updates(params, updates), state), score

    start = (where.params, tx.init(where.params))
    _, scores = jax.lax.scan(step, start, length=steps)
    return jnp.sum(scores)

  return play


def _muon_matrices(tree):
  return jax.tree.map(
    lambda x: optax.contrib.MuonDimensionNumbers() if x.ndim == 2 else None,
    tree,
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
  released, _ = tx.update(
    grads, tx.init(params), params, is_padding_example=is_padding
  )
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
  frames = jax.jit(_modules.ModuleTree(params).frames)(params)
  grads = {
    'lora_a': inside @ np.asarray(frames[0].left_core[0]),
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
