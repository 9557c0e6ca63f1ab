"""Batches of no record, of one, and of far more than were expected."""

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from dp_accounting import pld

import prism_optax
from prism_optax import training
from prism_optax.training._sampling import Sampling
from tests import cases
from tests.oracles import oracles

CLIP, EXPECTED, STDDEV = 0.7, 4.0, 0.3
PARAMS = cases.tree_of(
  [oracles.random_factors(np.random.default_rng(0), 6, 5, 2)],
  np.ones(3),
  jnp.float32,
)


SHARED = {
  'noise_multiplier': STDDEV * EXPECTED / CLIP,
  'expected_batch_size': EXPECTED,
  'prng_key': 1,
  'per_example_gradients': False,
}
# The optimizers in two parts: only the clip is compiled for each batch size.
CLIPS = {
  'prism': prism_optax.intrinsic_clip(CLIP, normalize_by=EXPECTED),
  'dp_muon': prism_optax.per_matrix_clip(CLIP, normalize_by=EXPECTED),
}
OPTIMIZERS = {
  'prism': prism_optax.prism(0.1, l2_clip_norm=CLIP, **SHARED),
  'dp_muon': prism_optax.dp_muon(0.1, l2_clip_norms=CLIP, **SHARED),
}
INITS = {name: jax.jit(tx.init) for name, tx in OPTIMIZERS.items()}
UPDATES = {name: jax.jit(tx.update) for name, tx in OPTIMIZERS.items()}


def _gradients(size):
  """Long ones, of functions of the product."""
  rng = np.random.default_rng(size)
  return cases.factor_gradients(
    cases.factors_of(PARAMS),
    [100 * rng.normal(size=(size, 6, 5))],
    100 * rng.normal(size=(size, 3)),
    jnp.float32,
  )


@pytest.mark.parametrize(
  'name', [pytest.param('prism', marks=pytest.mark.slow), 'dp_muon']
)
@pytest.mark.parametrize('size', [0, 1, 40])
def test_every_batch_size_trains(name, size):
  params, state = PARAMS, INITS[name](PARAMS)
  clip = jax.jit(lambda grads, now: CLIPS[name].update(grads, None, now)[0])
  for _ in range(2):
    mean = clip(_gradients(size), params)
    updates, state = UPDATES[name](mean, state, params)
    params = optax.apply_updates(params, updates)
  for old, new in zip(
    jax.tree.leaves(PARAMS), jax.tree.leaves(params), strict=True
  ):
    assert np.isfinite(new).all()
    assert not np.array_equal(old, new)  # Noise moves it at least.


@jax.jit
def _released(grads):
  noisy = optax.chain(
    prism_optax.intrinsic_clip(CLIP, normalize_by=EXPECTED),
    prism_optax.tangent_privatizer(STDDEV, prng_key=2),
  )
  return noisy.update(grads, noisy.init(PARAMS), PARAMS)[0]


@pytest.mark.parametrize('size', [0, 1, 400])
def test_the_signal_grows_with_the_records_and_the_noise_does_not(size):
  """A hundred times the expected batch: the divisor is still the constant."""
  one = jax.device_get(_gradients(1))
  released = _released(jax.tree.map(lambda x: np.repeat(x, size, axis=0), one))
  noise = _released(jax.tree.map(lambda x: x[:0], one))
  difference = jax.tree.map(np.subtract, released, noise)
  signal = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(difference)))
  # float32: the noise is subtracted again, of about 0.3 an entry.
  assert abs(signal - size * CLIP / EXPECTED) < 1e-5 * max(size, 1)


def test_a_batch_above_the_limit_is_cut_and_the_cut_is_accounted_for():
  """With probability one all 97 places are drawn; ten are kept."""
  sampling = Sampling(97, 97, 10, None, None)
  drawn = sampling.draw(np.arange(4, dtype=np.uint32), 0)
  assert len(set(drawn.tolist())) == 10
  assert (drawn >= 0).all()

  def epsilon(padded):
    private = training.make_private(
      lambda params, x: params * x,
      jnp.zeros(()),
      optimizer=optax.sgd(0.1),
      l2_clip_norm=1.0,
      noise_multiplier=8.0,
      expected_batch_size=20,
      dataset_size=97,
      steps=5,
      delta=1e-4,
      execution=training.Execution(padded_batch_size=padded),
    )
    return private.event(), private.epsilon()

  one = dp_accounting.TruncatedSubsampledGaussianDpEvent(97, 20 / 97, 30, 8.0)
  event, cut = epsilon(30)
  assert event == dp_accounting.SelfComposedDpEvent(one, 5)
  exact = pld.PLDAccountant().compose(one, 5).get_epsilon(1e-4)
  # That of the noise as it is drawn is above that of ideal noise.
  assert exact <= cut == pytest.approx(exact, rel=1e-3)
  # The cut is not free: a record may push another one out.
  assert cut > epsilon(97)[1]
