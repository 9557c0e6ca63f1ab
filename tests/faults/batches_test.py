"""Batches of no record, of one, and of far more than were expected."""

import dp_accounting
import jax
import numpy as np
import optax
import pytest
from dp_accounting import pld

import prism_optax
from prism_optax import training
from tests import cases

CLIP, EXPECTED = 0.7, 4.0
PARAMS = cases.adapters([(6, 5, 2)], extra=3)


@jax.jit
def _released(grads):
  noisy = optax.chain(
    prism_optax.intrinsic_clip(CLIP, normalize_by=EXPECTED),
    prism_optax.tangent_privatizer(0.3, prng_key=2),
  )
  return noisy.update(grads, noisy.init(PARAMS), PARAMS)[0]


@pytest.mark.slow
@pytest.mark.parametrize('size', [0, 1, 400])
def test_the_signal_grows_with_the_records_and_the_noise_does_not(size):
  """A hundred times the expected batch: the divisor is still the constant."""
  one = cases.normal(PARAMS, 1, lead=(1,), scale=100)
  released = _released(jax.tree.map(lambda x: np.repeat(x, size, axis=0), one))
  noise = _released(jax.tree.map(lambda x: x[:0], one))
  signal = cases.norm(jax.tree.map(np.subtract, released, noise))
  # float32: the noise is subtracted again, of about 0.3 an entry.
  assert abs(signal - size * CLIP / EXPECTED) < 1e-5 * max(size, 1)


def test_a_batch_above_the_limit_is_cut_and_the_cut_is_accounted_for():
  """With probability one all 97 places are drawn; ten are kept."""

  def make(padded, expected=20):
    return cases.make(
      optax.sgd(0.1), loss=lambda params, x: params * x,
      params=np.zeros((), np.float32), noise_multiplier=8.0, steps=5,
      expected_batch_size=expected, dataset_size=97,
      execution=training.Execution(padded_batch_size=padded),
    )  # fmt: skip

  full = make(10, 97)
  state = full.init(np.zeros((), np.float32))
  batch = next(iter(full.batches(state, np.arange(97))))
  assert len(set(batch.examples.tolist())) == 10
  assert not batch.is_padding_example.any()
  one = dp_accounting.TruncatedSubsampledGaussianDpEvent(97, 20 / 97, 30, 8.0)
  cut = make(30)
  assert cut.event() == dp_accounting.SelfComposedDpEvent(one, 5)
  exact = pld.PLDAccountant().compose(one, 5).get_epsilon(1e-4)
  # That of the noise as it is drawn is above that of ideal noise.
  assert exact <= cut.epsilon() == pytest.approx(exact, rel=1e-3)
  # The cut is not free: a record may push another one out.
  assert cut.epsilon() > make(97).epsilon()
