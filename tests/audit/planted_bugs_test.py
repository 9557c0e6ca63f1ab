"""Known ways to leak, built into a chain: the audit must go above the claim.

Each attack is also played on the library's own chain, where it must not.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

from prism_optax import transforms
from tests.audit import chains, harness

SIGMA, DRAWS = 2.0, 3000


def _white_box(where, chain_of):
  """Of one step."""
  play = harness.white_box(where, chain_of, steps=1, position=chains.RECORDER)
  (bounds,) = harness.attacked(play, DRAWS)
  return bounds


def _stay_below(bounds, steps=1):
  claim = harness.claims(SIGMA, steps)
  assert bounds.gdp <= claim.gdp
  assert bounds.counting <= claim.counting


def _go_above(bounds, steps=1):
  # Twice the claimed `mu` at least: the counts alone would need more draws.
  assert bounds.gdp > harness.claims(SIGMA, steps).gdp


def _chain(**wrong_parts):
  return lambda key, noise: chains.prism_chain(
    SIGMA, key, noise, kind='none', **wrong_parts
  )


@pytest.mark.slow
def test_a_module_without_clip():
  wrong = _chain(clip_with=chains.clip_that_forgets_a_module())
  _go_above(_white_box(harness.setting(), wrong))


@pytest.mark.slow
def test_the_realised_batch_size_as_divisor():
  """The canary pulls against three others: it moves a mean by more."""
  where = harness.setting()
  against = jax.tree.map(
    lambda x: jnp.stack([-x] * harness.OTHERS), where.canary
  )
  where = where._replace(others=against)
  _stay_below(_white_box(where, _chain()))
  wrong = _chain(clip_with=chains.clip_divided_by_the_realised_size())
  _go_above(_white_box(where, wrong))


def _difference_of_two_steps(noise_of):
  """The canary is in the first batch alone; the attacker subtracts."""
  where = harness.setting()

  def play(key, canary, noise):
    del noise
    clip, noise = chains.clip(), noise_of(key)
    state = noise.init(where.params)
    batch, one = harness.batch_of(where, where.params)
    seen = []
    for present in (canary, jnp.array(False)):
      mean, _ = clip.update(
        batch, optax.EmptyState(), where.params,
        is_padding_example=harness.absent(present),
      )  # fmt: skip
      released, state = noise.update(mean, state, where.params)
      seen.append(released['extra'])
    return jnp.vdot(seen[0] - seen[1], one['extra'])

  (bounds,) = harness.attacked(play, DRAWS)
  return bounds


@pytest.mark.slow
def test_a_key_that_is_used_twice():
  stddev = chains.stddev_of(SIGMA)
  honest = chains.prism_optax.tangent_privatizer
  _stay_below(
    _difference_of_two_steps(lambda key: honest(stddev, prng_key=key)), 2
  )
  _go_above(
    _difference_of_two_steps(lambda k: chains.noise_with_one_key(stddev, k)), 2
  )


@pytest.mark.slow
def test_a_zero_factor_with_a_completed_frame():
  """The start of every LoRA library. The canary lies in the first r rows."""
  where = harness.setting(left_scale=0.0)
  dense, vector = where.canary
  rows = jnp.arange(6)[:, None] < 2
  where = where._replace(canary=([g * rows for g in dense], 0 * vector))
  wrong = _chain(privatizer=chains.noise_projected_by_a_completed_frame)
  _stay_below(_white_box(where, _chain()))
  _go_above(_white_box(where, wrong))


@pytest.mark.slow
def test_small_factors_with_damped_whitening():
  where = harness.setting(left_scale=1e-4)
  # Gradients that the small factor whitens: left blocks and head are zero.
  dense, vector = where.canary
  bases = [
    jnp.linalg.qr(where.params[name]['lora_b'].T)[0] for name in ('m0', 'm1')
  ]
  whitened = [q @ (q.T @ g) for q, g in zip(bases, dense, strict=True)]
  where = where._replace(canary=(whitened, 0 * vector))
  wrong = _chain(privatizer=chains.noise_with_damped_whitening)
  _stay_below(_white_box(where, _chain()))
  _go_above(_white_box(where, wrong))


def _vertical(pair, steps):
  """``L^T dL - dR^T R``: zero for a horizontal lift."""
  left, right = pair['lora_b'].T, pair['lora_a']
  return left.T @ steps[0] - steps[1].T @ right


@pytest.mark.slow
def test_moments_of_factors_that_read_a_part_without_noise():
  where = harness.setting(left_scale=3.0)  # Unbalanced: the lifts differ.
  stddev = chains.stddev_of(SIGMA)

  def steps_of(tx, canary_present, key):
    batch, _ = harness.batch_of(where, where.params)
    mean, _ = chains.clip().update(
      batch, optax.EmptyState(), where.params,
      is_padding_example=harness.absent(canary_present),
    )  # fmt: skip
    out, _ = tx.update(mean, tx.init(where.params), where.params)
    return out

  def play(key, canary, noise):
    del noise
    tx = chains.factor_moments_of_two_lifts(stddev, key)
    silent = chains.factor_moments_of_two_lifts(0.0, key)
    moments = steps_of(tx, canary, key)
    # What differs without any noise is what the attacker looks for.
    with_it = steps_of(silent, jnp.array(True), key)
    without = steps_of(silent, jnp.array(False), key)
    return sum(
      jnp.vdot(
        _vertical(where.params[name], moments[name]),
        _vertical(where.params[name], with_it[name])
        - _vertical(where.params[name], without[name]),
      )
      for name in ('m0', 'm1')
    )

  _go_above(*harness.attacked(play, DRAWS))

  def honest_play(key, canary, noise):
    """The moments of the library's published preconditioner, after one step."""
    del noise

    def moments(stddev, present):
      tx = optax.chain(
        chains.clip(),
        chains.prism_optax.tangent_privatizer(stddev, prng_key=key),
        transforms.scale_by_published_preconditioner(noise_stddev=stddev),
      )
      batch, _ = harness.batch_of(where, where.params)
      _, state = tx.update(
        batch, tx.init(where.params), where.params,
        is_padding_example=harness.absent(present),
      )  # fmt: skip
      (mu,) = (pair.mu for pair in state[2].pairs)
      return [
        _vertical(where.params[name], (mu.left[i], mu.right[i]))
        for i, name in enumerate(('m0', 'm1'))
      ]

    seen = moments(stddev, canary)
    with_it = moments(0.0, jnp.array(True))
    without = moments(0.0, jnp.array(False))
    return sum(
      jnp.vdot(s, x - y) for s, x, y in zip(seen, with_it, without, strict=True)
    )

  _stay_below(*harness.attacked(honest_play, DRAWS))
