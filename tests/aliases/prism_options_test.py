"""The optimizers are their chains, with the options that are fixed."""

import optax
import pytest

import prism_optax
from prism_optax import contrib, transforms
from tests import cases
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')
CLIP, NOISE, STDDEV = chains.clip(), chains.noise(), chains.STDDEV
RETRACT, SCHEDULE = prism_optax.retract(), optax.linear_schedule(0.1, 0.0, 3)
RATE = prism_optax.scale_by_learning_rate(0.05)
DECAY = prism_optax.add_decayed_factors(0.1)
# A little decay, and no correction of the first moment's bias.
DIRECTION = prism_optax.scale_by_rank_preconditioner(
  0.9, 0.999, noise_stddev=STDDEV, bias_correction=False
)
# No decay, and the correction of the bias.
PUBLISHED = transforms.scale_by_published_preconditioner(
  0.9, 0.999, noise_stddev=STDDEV, floor_mode='geometry', floor_factor=1.0
)
MUON = contrib.orthogonalize_tangents(
  0.8, b1=0.8, b2=0.999, eps=1e-8, coordinate_rms=1.0
)
CHAINS = {
  'prism': (
    prism_optax.prism, {}, (CLIP, NOISE, DIRECTION, DECAY, RATE, RETRACT),
  ),
  'prism with a schedule': (
    prism_optax.prism, {'learning_rate': SCHEDULE},
    (CLIP, NOISE, DIRECTION, DECAY,
     prism_optax.scale_by_learning_rate(SCHEDULE), RETRACT),
  ),
  'prism behind a clip': (
    prism_optax.prism, {'per_example_gradients': False},
    (NOISE, DIRECTION, DECAY, RATE, RETRACT),
  ),
  'prism without a rate': (
    prism_optax.prism, {'learning_rate': None, 'steps': 3},
    (CLIP, prism_optax.tangent_privatizer(STDDEV, prng_key=7, steps=3),
     transforms.adapt_step_size(DIRECTION, noise_stddev=STDDEV),
     prism_optax.add_decayed_factors(3.0),
     prism_optax.scale_by_learning_rate(optax.linear_schedule(0.01, 0.0, 3)),
     RETRACT),
  ),
  'published_prism': (
    prism_optax.published_prism, {},
    (CLIP, NOISE, PUBLISHED, RATE, prism_optax.retract(align=True)),
  ),
  'prism_muon': (
    contrib.prism_muon, {'momentum': 0.8},
    (CLIP, NOISE, MUON, DECAY, RATE, RETRACT),
  ),
}  # fmt: skip


@cases.fast_first('name', ['prism without a rate'], CHAINS)
def test_an_optimizer_is_its_chain_bit_for_bit(name):
  make, options, parts = CHAINS[name]
  tx = make(**{'learning_rate': 0.05} | chains.OPTIONS | options)
  mean = not options.get('per_example_gradients', True)
  chains.assert_same_program(tx, prism_optax.chain(*parts), mean=mean)
