"""Adapters that go through the files of PEFT come back as they were."""

import itertools
import tempfile

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

from prism_optax import lora
from tests.properties import cases

TYPES = st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16])
# Also with what means something in a pattern of names.
PLAIN = ['q', 'a.b', 'a.b.q', 'x+y', 'k[0]', '(v)', '^q', 'ünï', 'a.b_q']
modules = st.dictionaries(
  st.sampled_from(PLAIN),
  st.tuples(
    st.integers(1, 3), st.integers(0, 2), st.integers(0, 2),
    st.sampled_from([0.5, 1.0, 2.0, 1 / 3]), st.booleans(),
  ),
  min_size=1,
  max_size=4,
)  # fmt: skip


def _tree(drawn, seed, dtype):
  """Modules with their layouts and names; some stack two layers."""
  rng = np.random.default_rng(seed)
  params, pairs, names = {}, [], {}
  for i, (name, (rank, more_in, more_out, scale, stacked)) in enumerate(
    drawn.items()
  ):
    lead = (2,) if stacked else ()
    key = f'm{i}'
    params[key] = {
      'lora_a': rng.normal(size=(*lead, rank + more_in, rank)).astype(dtype),
      'lora_b': rng.normal(size=(*lead, rank, rank + more_out)).astype(dtype),
    }
    layout = lora.Layout(scale=scale)
    pairs.append(lora.Pair(f'{key}/lora_a', f'{key}/lora_b', layout))
    names[key] = f'layers.{{}}.{name}' if stacked else name
  return params, pairs, names


@cases.settings
@given(modules, cases.seeds, TYPES)
def test_what_is_saved_is_what_is_loaded(drawn, seed, dtype):
  """Factors bit for bit, scales to rounding, layer after layer."""
  params, pairs, names = _tree(drawn, seed, dtype)
  with tempfile.TemporaryDirectory() as folder:
    lora.save_peft(folder, params, names=names, layout=pairs)
    loaded = lora.load_peft(folder)
  assert loaded.others == {}
  scales = {x.a.removesuffix('/lora_a'): x.layout.scale for x in loaded.layout}
  expected = {}
  for pair, (key, name) in zip(pairs, names.items(), strict=True):
    factors = params[key]
    stack = factors['lora_a'].shape[:-2]
    for index in itertools.product(*map(range, stack)):
      torch = name.format(*index)
      expected[torch] = {k: x[index] for k, x in factors.items()}
      assert np.isclose(scales[torch], pair.layout.scale, rtol=1e-15)
  assert set(loaded.params) == set(expected)
  for name, factors in expected.items():
    for side, x in factors.items():
      got = loaded.params[name][side]
      assert got.dtype == x.dtype
      np.testing.assert_array_equal(got, x)


@pytest.mark.slow
@hypothesis.settings(cases.few, max_examples=6)
@given(modules, cases.seeds, TYPES, st.sampled_from([0.25, 1.0, 16.0]))
def test_every_tree_that_fits_gets_the_same_products(drawn, seed, dtype, scale):
  """Into a tree with scales and factors of its own."""
  params, pairs, names = _tree(drawn, seed, dtype)
  with tempfile.TemporaryDirectory() as folder:
    lora.save_peft(folder, params, names=names, layout=pairs)
    loaded = lora.load_peft(folder)
  # Its own tree, scales and types: the same bits.
  back = lora.from_peft(loaded, params, names=names, layout=pairs)
  for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(params), strict=True):
    assert x.dtype == y.dtype
    # The scale is alpha / r of the file: a root of one, but for rounding.
    np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=1e-2)
  other = {
    **{key: {k: jnp.zeros(x.shape) for k, x in value.items()}
       for key, value in params.items()},
    'head': jnp.ones(3),
  }  # fmt: skip
  layout = lora.Layout(scale=scale)
  filled = lora.from_peft(loaded, other, names=names, layout=layout)
  np.testing.assert_array_equal(filled['head'], other['head'])
  found = lora.deltas(filled, layout=layout, dense=True)
  for pair, key in zip(pairs, names, strict=True):
    a, b = (np.float64(params[key][f'lora_{side}']) for side in 'ab')
    z = pair.layout.scale * np.swapaxes(a @ b, -1, -2)
    np.testing.assert_allclose(found[key], z, atol=1e-5 * np.abs(z).max())
