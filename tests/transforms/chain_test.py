"""`prism_optax.chain`: the numbers of `optax.chain`."""

import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import fixed_rank, transforms
from tests import cases
from tests.oracles import problems
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')


def _shifted(x, frame):
  left, right = fixed_rank.multiply_out(x)
  shifted = fixed_rank.Tangent(left - frame.left, 2 * right)
  return fixed_rank.project(frame, shifted)


def _own(stacks, state, step):
  return stacks.map_pairs(_shifted, step.frames), state


DESCENT = (
  prism_optax.add_decayed_factors(0.1),
  prism_optax.scale_by_learning_rate(0.05), prism_optax.retract(),
)  # fmt: skip
PARTS = {
  'prism': (chains.direction(), *DESCENT),
  'foreign and own': (
    optax.trace(0.5),
    transforms.tangent_transformation('own', _own),
    *DESCENT,
  ),
}


@cases.fast_first('name', ['foreign and own'], PARTS)
def test_optax_chains_the_same_numbers(name):
  parts = chains.clip(), chains.noise(), *PARTS[name]
  fused, steps = (
    problems.Problem(chains.ONE_SHAPE).trajectory(chain(*parts), steps=2)
    for chain in (prism_optax.chain, optax.chain)
  )
  chains.assert_close(steps, fused)
  assert np.abs(steps[1]['extra'] - steps[0]['extra']).max() > 1e-3


@pytest.mark.slow
def test_nested_chains_are_flat_ones():
  parts = (
    prism_optax.chain(chains.clip(), chains.noise(), retract_elsewhere=True),
    prism_optax.chain(chains.direction()),
    prism_optax.chain(*DESCENT),
  )
  nested = prism_optax.chain(*parts[:2], prism_optax.chain(parts[2]))
  chains.assert_same_program(nested, problems.chain_of(0.05, **chains.OPTIONS))
  bound = chains.CLIP / chains.BATCH_SIZE
  assert nested.sensitivity() == parts[0].sensitivity() == bound
