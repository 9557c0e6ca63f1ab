"""Laws of tangent probes: the same gradients without any inverse."""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import prism_optax
from benchmarks.geometry import probe_accuracy
from prism_optax import contrib
from tests.oracles import oracles
from tests.properties import cases


def _model(name, tree):
  """What a model computes with: the changes of its weights, other leaves."""
  if name == 'file':
    return [2.0 * tree['w']['lora_B'] @ tree['w']['lora_A']], []
  modules = [tree] if 'lora_a' in tree else list(tree.values())
  others = [
    x for key, x in tree.items() if key not in ('lora_a', 'lora_b', 'x', 'y')
  ]
  return [x['lora_a'] @ x['lora_b'] for x in modules], others


@functools.cache
def _probed(name):
  layout = cases.layout_of(name)

  @jax.jit
  def run(params, weights):
    def loss(tree):
      return sum(
        jnp.vdot(w, x)
        for w, x in zip(
          weights, itertools.chain(*_model(name, tree)), strict=True
        )
      )

    probes = contrib.tangent_probes(params, layout=layout)
    grads = jax.grad(lambda z: loss(probes.attach(z)))(probes.zeros)
    whitened = prism_optax.tangent_coordinates(params, layout=layout)
    return (
      _model(name, probes.attach(probes.zeros)),
      probes.coordinates(grads),
      whitened(jax.grad(loss)(params)),
      probes.attach(probes.zeros),
    )

  return run


@pytest.mark.usefixtures('x64')
@cases.few
@given(
  st.sampled_from(['file', 'stacked', 'two shapes']), cases.seeds,
  st.sampled_from([1e-4, 1.0, 1e4]), st.sampled_from([None, 'a', 'b']),
)  # fmt: skip
def test_probes_show_the_gradient_in_tangent_coordinates(
  name, seed, size, zero
):
  """The route with whitening, the one without, and the dense projection."""
  params = cases.draw_tree(name, seed, scale=size, dtype=jnp.float64)
  params = jax.tree_util.tree_map_with_path(
    lambda path, x: 0 * x if path[-1].key[-1].lower() == zero else x, params
  )
  zs, others = _model(name, params)
  rng = np.random.default_rng(seed)
  weights = [jnp.asarray(rng.normal(size=x.shape)) for x in zs + others]
  (same, rest), probed, whitened, wide = _probed(name)(params, weights)
  for x, y in zip(same + rest, zs + others, strict=True):
    np.testing.assert_allclose(x, y, atol=1e-9 * size**2)
  assert cases.shapes_of(probed) == cases.shapes_of(params)
  assert [x.dtype for x in jax.tree.leaves(wide)] == [
    x.dtype for x in jax.tree.leaves(params)
  ]
  # Whitening costs the condition of the factors.
  difference = cases.norm(jax.tree.map(jnp.subtract, probed, whitened))
  assert difference <= 1e-7 * cases.norm(whitened)
  if zero:  # Where Z is zero it does not tell what is observed.
    return
  square = sum(np.sum(np.square(w)) for w in weights[len(zs) :])
  for z, w in zip(zs, weights, strict=False):
    for one, gradient in zip(
      z.reshape(-1, *z.shape[-2:]), w.reshape(-1, *w.shape[-2:]), strict=True
    ):
      u, s, vt = np.linalg.svd(one)
      rank = int(np.sum(s > 1e-10 * s[0]))
      point = oracles.Point(
        one, u[:, :rank] @ u[:, :rank].T, vt[:rank].T @ vt[:rank]
      )
      # Relative to scale * left @ right.T, so w itself whatever the scale.
      square += np.sum(point.project(np.asarray(gradient)) ** 2)
  assert cases.norm(probed) == pytest.approx(np.sqrt(square), rel=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('condition', 'dtype', 'bound'),
  [
    (1e4, jnp.float32, 3e-6),  # A few float32 roundings, at any condition.
    (1e2, jnp.bfloat16, 2e-2),  # The probes' gradients are bfloat16.
  ],
)
def test_probes_are_exact_where_whitening_is_not(condition, dtype, bound):
  """Whitening multiplies the rounding of a factor gradient by the condition."""
  general, probed = probe_accuracy.errors(condition, dtype)
  assert probed < bound
  assert general > 3 * probed
