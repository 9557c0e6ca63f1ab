"""Every library's names and shapes, and refusal wherever two readings fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_optax import lora
from tests import cases

# Names and shapes of a and b, an einsum for the change of the weight, and how
# the weight becomes (*stack, inputs, outputs). Every one is of 12 inputs and 20
# outputs: they share a stack, so that one program does them all.
CASES = {
  'nnx': ('m/lora_{}', (12, 2), (2, 20), 'ir,ro->io', 'm'),
  'nnx stacked': ('m/lora_{}', (3, 12, 2), (3, 2, 20), 'lir,lro->lio', 'm'),
  'MaxText': ('layers.q.lora_{}', (12, 2), (2, 20), 'ir,ro->io', 'layers.q'),
  'qwix dot': ('m/kernel_lora_{}', (12, 2), (2, 20), 'ir,ro->io', 'm/kernel'),
  'qwix einsum': ('w_lora_{}', (12, 2), (2, 4, 5), 'ir,rhk->ihk', 'w'),
  'qwix conv': (
    'c/kernel_lora_{}', (3, 1, 4, 2), (2, 20), 'xyir,ro->xyio', 'c/kernel',
  ),
  'qwix batched or scanned': (
    'w_lora_{}', (7, 12, 2), (7, 2, 20), 'lir,lro->lio', 'w',
  ),
  'flax, of another': ('d/lora_{}', (12, 3), (3, 3, 5), 'ir,rhk->ihk', 'd'),
  'gemma q': ('q/lora/{}', (12, 2), (2, 4, 5), 'ir,rhk->ihk', 'q'),
  'gemma kv': ('kv/lora/{}', (12, 2), (2, 4, 1, 5), 'ir,rckh->ickh', 'kv'),
  'gemma attn_vec': ('o/lora/{}', (3, 4, 2), (2, 20), 'hkr,ro->hko', 'o'),
  'keras dense': ('d/lora_kernel_{}', (12, 2), (2, 20), 'ir,ro->io', 'd'),
  'keras einsum': ('d/lora_kernel_{}', (4, 3, 2), (2, 20), 'ihr,rk->ihk', 'd'),
  'keras embedding': (
    'e/lora_embeddings_{}', (12, 2), (2, 20), 'ir,ro->io', 'e',
  ),
  'PEFT': (
    'x.q_proj.lora_{}.weight', (2, 12), (20, 2), 'ri,or->io', 'x.q_proj',
  ),
  'PEFT with an adapter name': (
    'q/lora_{}/default/weight', (2, 12), (20, 2), 'ri,or->io', 'q',
  ),
  'PEFT conv': (
    'c.lora_{}.weight', (2, 4, 3, 1), (20, 2, 1, 1), 'rcxy,orzw->cxyo', 'c',
  ),
}  # fmt: skip


_deltas = jax.jit(lambda params: lora.deltas(params, dense=True))


@pytest.mark.parametrize('name', CASES)
def test_deltas_are_the_changes_of_the_weight(name):
  names, *shapes, einsum, module = CASES[name]
  a, b = map(names.format, 'AB' if 'PEFT' in name else 'ab')
  zeros = (np.zeros(x, np.float32) for x in shapes)
  params = cases.normal(dict(zip((a, b), zeros, strict=True)), 0)
  found = _deltas(params)
  assert list(found) == [module]
  z = np.asarray(found[module])
  change = np.einsum(einsum, params[a], params[b])
  # Our rows are outputs; the einsums above put inputs first.
  exact = change.reshape(*z.shape[:-2], z.shape[-1], z.shape[-2])
  np.testing.assert_allclose(z, np.swapaxes(exact, -1, -2), atol=1e-5)


def _shapes(params, layout=None):
  """(left, right) of the one module: (*stack, m, r) and (*stack, n, r)."""
  ((name, pair),) = jax.eval_shape(
    lambda x: lora.deltas(x, layout=layout), params
  ).items()
  return name, pair.left.shape, pair.right.shape


def test_keras_lists_take_their_names_from_beside():
  params = [jnp.ones((6, 2)), jnp.ones(5), jnp.ones((2, 5))]
  names = ['d/lora_kernel_a', 'd/bias', 'd/lora_kernel_b']
  layout = lora.pairs_by_name(names, params)
  assert _shapes(params, layout) == ('d', (5, 2), (6, 2))
  with pytest.raises(ValueError, match='3 names and 2 arrays'):
    lora.pairs_by_name(names, params[:2])
  with pytest.raises(ValueError, match='distinct names'):
    lora.pairs_by_name(['x', 'x'], params[:2])


# Pairs that are made in a known way: of sizes inside and outside, the rank, and
# layers, which often coincide.
MADE = [
  lambda i, o, r, n: ((*i, r), (r, *o), lora.Layout(-1, 0, (), ())),
  lambda i, o, r, n: ((n, *i, r), (n, r, *o), lora.Layout(-1, 1, (0,), (0,))),
  lambda i, o, r, n: (
    (i[0], n, r),
    (r, n, o[0]),
    lora.Layout(-1, 0, (1,), (1,)),
  ),
]
SIZES = st.sampled_from([2, 3, 4])
FEATURES = st.lists(SIZES, min_size=1, max_size=2)
NAMES = st.sampled_from(['w_lora_{}', 'w/lora/{}'])


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.sampled_from(MADE), FEATURES, FEATURES, SIZES, SIZES, NAMES)
def test_no_coincidence_of_sizes_is_ever_read_wrongly(
  make, inside, outside, rank, layers, names
):
  """Either what made the tree, or an error that asks."""
  a, b, truth = make(inside, outside, rank, layers)
  params = {
    names.format('a'): jax.ShapeDtypeStruct(a, jnp.float32),
    names.format('b'): jax.ShapeDtypeStruct(b, jnp.float32),
  }

  def read(layout):
    try:
      return _shapes(params, layout)
    except ValueError as error:
      return str(error)

  expected, found = read({'*': truth}), read(None)
  if isinstance(expected, str):  # No pair in any reading.
    assert 'rank <= min' in expected
  elif isinstance(found, str):
    assert all(x in found for x in ('in several ways', str(truth)))
  else:
    assert found == expected
