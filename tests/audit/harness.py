"""Attacks on the whole chain, and what they prove about epsilon.

The attacker chooses a record whose gradient is far beyond the clip, the canary,
knows all other records, the parameters and every constant, and has to tell
from what is released whether the canary was in the data. A mechanism is played
many times with fresh keys, with and without the canary; jax_privacy's auditor
turns the scores into a lower bound of epsilon. A bound above the claim is a
proof (with the stated confidence) that the claim is wrong.

How many draws: over repetitions with other keys, for sigma 2 and one step,
where the claim is 1.99 (gdp) and 0.92 (counting), the bounds are

    draws     gdp          half the noise    counting      half the noise
    3,000     0.99 ± 0.16  3.20 ± 0.25       0.28 ± 0.10   1.10 ± 0.17
    6,000     1.27 ± 0.12  3.51 ± 0.16       0.40 ± 0.08   1.32 ± 0.15
    12,000    1.50 ± 0.08  3.79 ± 0.10       0.52 ± 0.10   1.52 ± 0.16

so 3,000 are enough where Gaussian DP is assumed, and 12,000 for the counts. All
limits of the tests are 3.5 of these deviations or more away from what is
expected, whatever the generator of the noise. Counts alone cannot convict where
epsilon is large: no bound exceeds the logarithm of the draws.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import auditing

import prism_optax
from prism_optax import accounting
from tests import cases
from tests.oracles import oracles

# A correct mechanism goes above its claim in one of a thousand audits. Keys are
# fixed, so a test that has passed once passes always.
SIGNIFICANCE = 1e-3
GDP_DELTA, COUNTING_DELTA = 1e-5, 1e-2
CLIP, EXPECTED_BATCH_SIZE, OTHERS = 0.7, 4.0, 3
SHAPES = [(6, 5, 2), (6, 5, 2)]


class Bounds(NamedTuple):
  """Lower bounds of epsilon.

  Attributes:
    gdp: At ``GDP_DELTA``, given that the mechanism is a Gaussian one.
    counting: At ``COUNTING_DELTA``, by Clopper-Pearson limits of the counts,
      given nothing.
  """

  gdp: float
  counting: float


def lower_bounds(inside, outside):
  """Bounds from the scores with and without the canary, higher with it."""
  half = len(inside) // 2
  # One half chooses the threshold; the other is counted there, at only one
  # threshold, so that nothing has been looked for in what is counted.
  middle = (np.median(inside[:half]) + np.median(outside[:half])) / 2
  counted = auditing.CanaryScoreAuditor(
    np.float64(inside[half:] > middle), np.float64(outside[half:] > middle)
  )
  everything = auditing.CanaryScoreAuditor(inside, outside)
  return Bounds(
    float(counted.epsilon_from_gdp(SIGNIFICANCE, GDP_DELTA)),
    float(
      everything.epsilon_clopper_pearson(
        SIGNIFICANCE, COUNTING_DELTA, threshold_strategy=auditing.Split(seed=0)
      )
    ),
  )


@functools.cache
def claims(noise_multiplier, steps, sampling_probability=1.0):
  """The epsilon that the library reports, at both deltas."""
  event = accounting.dpsgd_event(noise_multiplier, sampling_probability, steps)
  return Bounds(
    accounting.epsilon(event, GDP_DELTA),
    # Large, as counts need it; but the data are few.
    accounting.epsilon(event, COUNTING_DELTA, dataset_size=OTHERS + 1),
  )


def scores(play, draws, noises=(1.0,), seed=0):
  """Scores with and without the canary over fresh keys, for each noise.

  Args:
    play: ``play(key, canary, noise) -> score``, compiled once.
    draws: Keys for each of the two worlds.
    noises: What the noise is multiplied by: 0.5 is a planted bug.
    seed: Of the keys.
  """

  @jax.jit
  def many(keys, canary, noise):
    return jax.lax.map(
      lambda key: play(key, canary, noise), keys, batch_size=1000
    )

  keys = jax.random.split(jax.random.key(seed), (2, draws))
  return [
    (
      np.float64(many(keys[0], jnp.array(True), jnp.float32(noise))),
      np.float64(many(keys[1], jnp.array(False), jnp.float32(noise))),
    )
    for noise in noises
  ]


def attacked(play, draws, noises=(1.0,), seed=0):
  """Bounds from :func:`scores`, for each noise."""
  return [lower_bounds(*pair) for pair in scores(play, draws, noises, seed)]


class Setting(NamedTuple):
  """Who is in the data, and where training starts.

  Attributes:
    params: Two modules of one shape and a vector.
    others: Dense gradients of the known records, (OTHERS, m, n) each, and of
      the vector.
    canary: The same for the canary alone, without the leading axis.
  """

  params: Any
  others: tuple[Any, Any]
  canary: tuple[Any, Any]


def setting(seed=0, left_scale=1.0):
  """Random, except that the canary is far beyond the clip."""
  rng = np.random.default_rng(seed)
  factors = [oracles.random_factors(rng, *s, 3.0) for s in SHAPES]
  factors = [(left_scale * left, right) for left, right in factors]
  params = cases.tree_of(factors, np.zeros(3), jnp.float32)

  def gradients(lead, scale):
    dense = [
      jnp.asarray(scale * rng.normal(size=(*lead, m, n)), jnp.float32)
      for m, n, _ in SHAPES
    ]
    vector = jnp.asarray(scale * rng.normal(size=(*lead, 3)), jnp.float32)
    return dense, vector

  return Setting(params, gradients((OTHERS,), 0.2), gradients((), 1e3))


def batch_of(where, params):
  """Per-example gradients of all records, the canary last; and the canary's."""
  others, canary = (
    cases.factor_gradients(cases.factors_of(params), *x, jnp.float32)
    for x in (where.others, where.canary)
  )
  batch = jax.tree.map(lambda x, y: jnp.concatenate([x, y[None]]), others,
                       canary)  # fmt: skip
  return batch, canary


def absent(canary):
  """``is_padding_example`` of a batch in which all the others are."""
  return jnp.zeros(OTHERS + 1, bool).at[-1].set(~canary)


def recorder():
  """Lets the attacker see what passes: the state is the last update."""
  return optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda updates, state, params=None: (updates, updates),
  )


def played(where, make, steps, *, signal=None, score=None, sampling=None):
  """An attack on a training with the same records in each step.

  Args:
    where: Records and start.
    make: From a key, and what the noise is multiplied by, to a transformation.
    steps: Of training.
    signal: ``signal(params, batch, one, old, new)`` of a step: its parameters,
      gradients of all and of the canary, and the states around it.
    score: In its place, of the parameters after the last step.
    sampling: From a key to whether the canary is drawn, for each step; None
      draws it always.

  Returns:
    ``play(key, canary, noise) -> score``, the sum of the signals; with
    ``sampling`` the signals of all steps.
  """

  def play(key, canary, noise):
    noise_key, sampling_key = jax.random.split(key)
    tx = make(noise_key, noise)
    drawn = jnp.ones(steps, bool)
    if sampling is not None:
      drawn = jax.vmap(sampling)(jax.random.split(sampling_key, steps))

    def step(carry, drawn_now):
      params, state = carry
      batch, one = batch_of(where, params)
      updates, new = tx.update(
        batch, state, params, is_padding_example=absent(canary & drawn_now)
      )
      seen = signal and signal(params, batch, one, state, new)
      return (optax.apply_updates(params, updates), new), seen

    start = where.params, tx.init(where.params)
    (params, _), signals = jax.lax.scan(step, start, drawn)
    if score is not None:
      return score(params)
    return signals if sampling is not None else jnp.sum(signals)

  return play


def known_mean(clip, batch, params):
  """The clipped mean of all records but the canary."""
  nobody = absent(jnp.array(False))
  state = clip.init(params)
  return clip.update(batch, state, params, is_padding_example=nobody)[0]


def white_box(where, chain_of, *, steps, position, sampling=None):
  """The attacker sees the noised coordinates of every step.

  The signal is what was released along the canary, in units of what an honest
  clip lets through.

  Args:
    where: Records and start.
    chain_of: As for :func:`played`; its clip comes first, and it has a
      :func:`recorder` in it.
    steps: Of training.
    position: Of the recorder in the chain.
    sampling: As for :func:`played`.
  """
  clip = prism_optax.intrinsic_clip(CLIP, normalize_by=EXPECTED_BATCH_SIZE)

  def signal(params, batch, one, old, new):
    known = known_mean(clip, batch, params)  # What the attacker knows.
    along = prism_optax.tangent_coordinates(params)(one)
    seen = jax.tree.map(jnp.subtract, new[position], known)
    size = optax.tree.vdot(seen, along) / optax.tree.norm(along)
    return size * EXPECTED_BATCH_SIZE / CLIP

  return played(where, chain_of, steps, signal=signal, sampling=sampling)


def black_box(where, optimizer_of, *, steps):
  """The attacker sees the parameters after the last step alone.

  The score is how far they moved against the canary's gradient: in ``Z`` for
  the modules, whatever the gauge of the factors.
  """
  dense, vector = where.canary

  def score(params):
    found = -jnp.vdot(params['extra'] - where.params['extra'], vector)
    for i, g in enumerate(dense):
      new, old = (
        (x[f'm{i}']['lora_a'] @ x[f'm{i}']['lora_b']).T  # Z, (m, n).
        for x in (params, where.params)
      )
      found -= jnp.vdot(new - old, g)
    return found

  return played(where, optimizer_of, steps, score=score)
