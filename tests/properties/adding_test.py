"""Adapters stand where the pattern says and change nothing at the start."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from prism_optax import lora
from tests.properties import cases

nnx = pytest.importorskip('flax.nnx', reason='needs flax')

NAMES = ('up', 'down', 'lift')


@cases.few
@given(st.sets(st.sampled_from(NAMES), min_size=1), st.integers(1, 3))
def test_the_chosen_layers_and_no_others_get_an_adapter(chosen, rank):
  rngs = nnx.Rngs(0)
  model = nnx.Dict({name: nnx.Linear(3, 3, rngs=rngs) for name in NAMES})
  x = np.ones((2, 3), np.float32)
  before = {name: np.asarray(model[name](x)) for name in NAMES}
  model, adapters = lora.add_adapters(
    model, '|'.join(sorted(chosen)), rank, rngs=nnx.Rngs(1)
  )
  found = lora.deltas(nnx.state(model, adapters))
  assert set(found) == {f'{name}/lora' for name in chosen}
  assert all(z.right.shape == (3, rank) for z in found.values())
  for name in NAMES:
    np.testing.assert_array_equal(model[name](x), before[name])
