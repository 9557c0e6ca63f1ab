"""The optimizers are their chains, with the options that are fixed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import contrib, transforms
from tests import cases
from tests.oracles import problems

REQUIRED = {
  'l2_clip_norm': 2.0, 'noise_multiplier': 0.4, 'expected_batch_size': 5.0,
  'prng_key': 7,
}  # fmt: skip
STDDEV = 0.4 * 2.0 / 5.0


def _head():
  return (
    prism_optax.intrinsic_clip(2.0, normalize_by=5.0),
    prism_optax.tangent_privatizer(STDDEV, prng_key=7),
  )


ROWS = (
  *_head(),
  contrib.scale_by_row_moments(noise_stddev=STDDEV),
  prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV),
  prism_optax.add_decayed_factors(0.1),
  prism_optax.scale_by_learning_rate(0.05),
  prism_optax.retract(),
)
PAIRS = {
  'rows are scaled in either chain': (
    prism_optax.chain(*ROWS),
    optax.chain(*ROWS),
  ),
  'prism_muon is Muon on the manifold': (
    contrib.prism_muon(0.05, **REQUIRED, momentum=0.8),
    optax.chain(
      *_head(),
      contrib.orthogonalize_tangents(0.8, b1=0.8, coordinate_rms=1.0),
      prism_optax.add_decayed_factors(0.1),
      optax.scale_by_learning_rate(0.05),
      prism_optax.retract(),
    ),
  ),
  'published_prism aligns its retraction': (
    prism_optax.published_prism(0.05, **REQUIRED),
    optax.chain(
      *_head(),
      transforms.scale_by_published_preconditioner(noise_stddev=STDDEV),
      optax.scale_by_learning_rate(0.05),
      prism_optax.retract(align=True),
    ),
  ),
}


@pytest.mark.slow
@pytest.mark.parametrize('pair', PAIRS)
def test_an_optimizer_is_its_chain(pair):
  problem = problems.Problem([(8, 6, 3)])
  one, other = (problem.trajectory(tx, 4, jnp.float32) for tx in PAIRS[pair])
  cases.assert_close(one, other, 2e-5)


def _first_update(tx):
  params = {'lora_a': jnp.eye(4, 1), 'lora_b': jnp.full((1, 3), 0.5)}
  grads = jax.tree.map(lambda x: jnp.ones((2, *x.shape)), params)
  return jax.jit(tx.update)(grads, tx.init(params), params)[0]


def _difference(one, other):
  pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
  return max(float(np.max(np.abs(x - y))) for x, y in pairs)


@pytest.mark.slow
def test_what_is_not_given_to_prism():
  """A little decay, and no correction of the first moment's bias."""
  default = _first_update(prism_optax.prism(0.05, **REQUIRED))

  def chained(**options):
    given = {'weight_decay': 0.1, 'bias_correction': False} | options
    return _first_update(problems.chain_of(0.05, **REQUIRED, **given))

  cases.assert_same_bits(default, chained())
  for other in ({'weight_decay': 0.0}, {'bias_correction': True}):
    assert _difference(default, chained(**other)) > 1e-4, other


@pytest.mark.slow
def test_what_is_fixed_in_published_prism():
  """No decay, and the correction of the bias: the first step has no b1."""

  def first(**options):
    tx = prism_optax.published_prism(0.05, **REQUIRED, **options)
    return _first_update(tx)

  def chained(decay):
    return _first_update(
      prism_optax.chain(
        *_head(),
        transforms.scale_by_published_preconditioner(noise_stddev=STDDEV),
        prism_optax.add_decayed_factors(decay),
        prism_optax.scale_by_learning_rate(0.05),
        prism_optax.retract(align=True),
      )
    )

  # A decay of zero adds a product with zeros: the same to rounding.
  assert _difference(first(), chained(0.0)) < 1e-6
  assert _difference(first(), chained(0.1)) > 1e-4
  # (1 - b1) g / (1 - b1^1) = g, to rounding.
  assert _difference(first(), first(b1=0.0)) < 1e-6
