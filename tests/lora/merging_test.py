"""Merged models compute what models with adapters compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from prism_optax import lora
from tests import cases


def test_axes_in_another_order_are_given():
  """kv of attention: (in, r) and (r, 2, heads, out)."""
  like = {'lora_a': np.zeros((6, 2)), 'lora_b': np.zeros((2, 2, 3, 4))}
  params = {'kv': cases.normal(like, 1, dtype=np.float32)}
  layout = lora.Layout(-1, 0, (), (), scale=2.0)
  weights = {'attention': {'w': jnp.zeros((2, 3, 6, 4), jnp.float32)}}
  kernel = 'attention/w', (2, 0, 1, 3)
  merged = lora.merge(params, weights, kernels={'kv': kernel}, layout=layout)
  want = 2 * np.einsum(
    'dr,rchk->chdk', params['kv']['lora_a'], params['kv']['lora_b']
  )
  np.testing.assert_allclose(merged['attention']['w'], want, atol=1e-5)


def test_one_rounding_to_the_type_of_the_weight():
  params = {'q': {'lora_a': jnp.full((3, 1), 0.01), 'lora_b': jnp.ones((1, 2))}}
  weights = {'q': {'kernel': jnp.ones((3, 2), jnp.bfloat16)}}
  merged = lora.merge(params, weights)['q']['kernel']
  assert merged.dtype == jnp.bfloat16
  np.testing.assert_array_equal(merged, jnp.bfloat16(1.01))


PAIR = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
KERNEL = jnp.ones((3, 2))


@pytest.mark.parametrize(
  ('weights', 'kernels', 'match'),
  [
    ({'q': {'bias': jnp.ones(2)}}, None, r'shape \(3, 2\).*q/bias'),
    ({'k': {'kernel': KERNEL}}, None, 'none near it'),
    ({'q': {'a': KERNEL, 'b': KERNEL}}, None, r"'q/a'.*'q/b'.*kernels=\{'q'"),
    ({'q': {'kernel': KERNEL.astype(jnp.int8)}}, None, 'none near it'),
    ({'q': {'kernel': KERNEL}}, {'q': 'q/w'}, "No single leaf at 'q/w'"),
    ({'q': {'kernel': KERNEL}}, {'p': 'q/kernel'}, r"\['p'\], which are no"),
    ({'w': KERNEL.astype(jnp.int8)}, {'q': 'w'}, 'int8 does not fit'),
    ({'w': jnp.ones((2, 3))}, {'q': 'w'}, r'\(2, 3\).*not fit.*= \(3, 2\)'),
    ({'w': KERNEL}, {'q': ('w', (0, 0))}, 'does not fit'),
    ({'w': KERNEL}, {'q': ('w', (0,))}, 'does not fit'),
  ],
)  # fmt: skip
def test_refusals(weights, kernels, match):
  with pytest.raises(ValueError, match=match):
    lora.merge({'q': PAIR}, weights, kernels=kernels)


@pytest.mark.parametrize(
  ('a', 'b', 'weight'),
  [
    ('dense/lora_a', 'dense/lora_b', 'dense/kernel'),
    ('dense/lora/lora_a', 'dense/lora/lora_b', 'dense/kernel'),
    ('dense/kernel_lora_a', 'dense/kernel_lora_b', 'dense/kernel'),  # qwix
    ('dense/lora/a', 'dense/lora/b', 'dense/w'),  # gemma
    ('dense/lora_kernel_a', 'dense/lora_kernel_b', 'dense/kernel'),  # keras
  ],
)
def test_weights_where_libraries_put_them(a, b, weight):
  def tree(paths):
    return nnx.traversals.unflatten_mapping(
      {tuple(path.split('/')): x for path, x in paths.items()}
    )

  params = tree({a: jnp.ones((3, 1)), b: jnp.ones((1, 2))})
  weights = tree({weight: KERNEL, 'dense/bias': jnp.ones(2)})
  (merged,) = (
    x for x in jax.tree.leaves(lora.merge(params, weights)) if x.ndim == 2
  )
  np.testing.assert_array_equal(merged, 2)


def test_two_modules_for_one_weight_are_refused():
  params = {'p': PAIR, 'q': PAIR}
  with pytest.raises(ValueError, match=r"one module for each weight.*'p', 'q'"):
    lora.merge(params, {'w': KERNEL}, kernels={'p': 'w', 'q': 'w'})


def test_plain_pairs_and_adapters_in_one_tree_with_the_weights():
  merged = lora.merge(PAIR, {**PAIR, 'kernel': KERNEL})
  np.testing.assert_array_equal(merged['kernel'], 2)
  # A factor of the kernel's own shape is not taken for the kernel.
  square = {'lora_a': jnp.ones((3, 2)), 'lora_b': jnp.ones((2, 2))}
  merged = lora.merge({'q': square}, {'q': {**square, 'kernel': KERNEL}})
  np.testing.assert_array_equal(merged['q']['kernel'], 3)
