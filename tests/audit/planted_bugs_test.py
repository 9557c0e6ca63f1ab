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


def _clipped_mean(where, present):
  """At the start, and the canary's gradient."""
  batch, one = harness.batch_of(where, where.params)
  clip = chains.clip()
  mean, _ = clip.update(
    batch, clip.init(where.params), where.params,
    is_padding_example=harness.absent(jnp.asarray(present)),
  )  # fmt: skip
  return mean, one


@pytest.mark.slow
def test_a_key_that_is_used_twice():
  """The canary is in the first batch alone; the attacker subtracts."""
  where, stddev = harness.setting(), chains.stddev_of(SIGMA)

  def bounds(noise_of):
    def play(key, canary, noise):
      del noise
      noise, seen = noise_of(stddev, prng_key=key), []
      state = noise.init(where.params)
      for present in (canary, False):
        mean, one = _clipped_mean(where, present)
        released, state = noise.update(mean, state, where.params)
        seen.append(released['extra'])
      return jnp.vdot(seen[0] - seen[1], one['extra'])

    return harness.attacked(play, DRAWS)[0]

  _stay_below(bounds(chains.prism_optax.tangent_privatizer), 2)
  _go_above(bounds(chains.noise_with_one_key), 2)


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


@pytest.mark.slow
def test_moments_of_factors_that_read_a_part_without_noise():
  """The library's published preconditioner has moments, too: not these."""
  where = harness.setting(left_scale=3.0)  # Unbalanced: the lifts differ.

  def wrong(stddev, present, key):
    tx = chains.factor_moments_of_two_lifts(stddev, key)
    mean, _ = _clipped_mean(where, present)
    out, _ = tx.update(mean, tx.init(where.params), where.params)
    return out

  def honest(stddev, present, key):
    tx = optax.chain(
      chains.prism_optax.tangent_privatizer(stddev, prng_key=key),
      transforms.scale_by_published_preconditioner(noise_stddev=stddev),
    )
    mean, _ = _clipped_mean(where, present)
    _, state = tx.update(mean, tx.init(where.params), where.params)
    (mu,) = (pair.mu for pair in state[1].pairs)
    return {f'm{i}': (mu.left[i], mu.right[i]) for i in range(2)}

  def bounds(moments):
    def vertical(*args):
      """``L^T dL - dR^T R``: zero for a horizontal lift."""
      return [
        where.params[name]['lora_b'] @ left
        - right.T @ where.params[name]['lora_a']
        for name, (left, right) in moments(*args).items()
      ]

    def play(key, canary, noise):
      del noise
      seen = vertical(chains.stddev_of(SIGMA), canary, key)
      # What differs without any noise is what the attacker looks for.
      with_it, without = (vertical(0.0, x, key) for x in (True, False))
      rows = zip(seen, with_it, without, strict=True)
      return sum(jnp.vdot(s, x - y) for s, x, y in rows)

    return harness.attacked(play, DRAWS)[0]

  _go_above(bounds(wrong))
  _stay_below(bounds(honest))
