"""The attacker sees the parameters after training, nothing else.

Everything after the noise is post-processing, whatever it keeps in memory: it
can only hide. These bounds are lower than those of the white box; half the
noise is still seen.
"""

import pytest

import prism_optax
from prism_optax import contrib
from tests.audit import chains, harness
from tests.oracles import problems

SIGMA, STEPS = 2.0, 2


def _prism(make=prism_optax.prism, **options):
  def optimizer_of(key, noise):
    return make(
      chains.LEARNING_RATE, l2_clip_norm=harness.CLIP, prng_key=key,
      noise_multiplier=SIGMA * noise,
      expected_batch_size=harness.EXPECTED_BATCH_SIZE, **options,
    )  # fmt: skip

  return optimizer_of


OPTIMIZERS = {
  'prism': _prism(), 'published_prism': _prism(prism_optax.published_prism),
  'prism, momentum only': _prism(problems.chain_of, max_condition_number=1.0),
  'prism_muon': _prism(contrib.prism_muon), 'dp_muon': chains.dp_muon_of(SIGMA),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('name', OPTIMIZERS)
def test_trained_parameters_tell_no_more_than_is_claimed(name):
  play = harness.black_box(harness.setting(), OPTIMIZERS[name], steps=STEPS)
  honest, halved = harness.attacked(play, 10_000, noises=(1.0, 0.5))
  claim = harness.claims(SIGMA, STEPS)
  assert claim.gdp / 4 < honest.gdp <= claim.gdp < halved.gdp
  assert honest.counting <= claim.counting
