"""The transformation: layouts of weights."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import transforms
from tests.oracles import muon_oracle

Dims = optax.contrib.MuonDimensionNumbers


def _apply(updates, **options):
  tx = transforms.orthogonalize(**options)
  return jax.jit(tx.update)(updates, tx.init(updates))[0]


def _random(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.standard_normal(shape).astype(np.float32)


def test_plain_matrices():
  updates = {'tall': _random(7, 3), 'wide': _random(2, 5, seed=1)}
  out = _apply(updates, degree=3, steps=4, normalize='frobenius')
  for k, x in updates.items():
    np.testing.assert_allclose(
      out[k], muon_oracle.orthogonalize(x, 3, 4, 'frobenius'), atol=1e-6
    )


def test_attention_kernels():
  """(D, N, H) in: one matrix D x (N H), or one for each head."""
  x = _random(6, 2, 4)
  out = _apply(x, weight_dimension_numbers=Dims(0, (1, 2)))
  expected = muon_oracle.orthogonalize(x.reshape(6, 8), 2, 5)
  np.testing.assert_allclose(out.reshape(6, 8), expected, atol=1e-6)
  out = _apply(x, weight_dimension_numbers=Dims(0, 2))
  for head in range(2):
    expected = muon_oracle.orthogonalize(x[:, head], 2, 5)
    np.testing.assert_allclose(out[:, head], expected, atol=1e-6)
  x = _random(2, 4, 6)  # The way out, (N, H, D).
  out = _apply(x, weight_dimension_numbers=Dims((0, 1), -1))
  expected = muon_oracle.orthogonalize(x.reshape(8, 6), 2, 5)
  np.testing.assert_allclose(out.reshape(8, 6), expected, atol=1e-6)


def test_conv_kernels_and_scanned_layers():
  x = _random(3, 2, 5, 7)  # (height, width, in, out)
  out = _apply(x, weight_dimension_numbers=Dims((0, 1, 2), 3))
  expected = muon_oracle.orthogonalize(x.reshape(30, 7), 2, 5)
  np.testing.assert_allclose(out.reshape(30, 7), expected, atol=1e-6)
  x = _random(4, 3, 5) * np.array([1e-2, 1.0, 10.0, 1e3])[:, None, None]
  out = _apply(x, weight_dimension_numbers=Dims(1, 2))
  for layer in range(4):
    expected = muon_oracle.orthogonalize(x[layer], 2, 5)
    np.testing.assert_allclose(out[layer], expected, atol=1e-6)
  x = _random(5, 4, 3)  # Output, layers, input: axes in any order.
  out = _apply(x, weight_dimension_numbers=Dims(2, 0))
  for layer in range(4):
    expected = muon_oracle.orthogonalize(x[:, layer], 2, 5)
    np.testing.assert_allclose(out[:, layer], expected, atol=1e-6)


def test_agrees_with_optax_on_what_a_layout_means():
  """Same matrices as optax's Muon takes: equal up to the iteration."""
  x = jnp.asarray(_random(3, 6, 2, 4))
  dims = Dims(reduction_axis=1, output_axis=(3, 2))
  ours = _apply(
    x, weight_dimension_numbers=dims, normalize='frobenius', steps=20
  )
  theirs = jax.jit(
    lambda x: optax.contrib._muon.orthogonalize_via_newton_schulz(
      x, jnp.array([1.5, -0.5, 0.0]), 40, dimension_numbers=dims
    )
  )(x)
  np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_leaves_marked_none_pass_unchanged():
  updates = {'w': _random(3, 4), 'norm': _random(5), 'table': _random(9, 2)}
  specs = {'w': Dims(), 'norm': None, 'table': None}
  for given in (specs, lambda _: specs):
    out = _apply(updates, weight_dimension_numbers=given)
    np.testing.assert_array_equal(out['norm'], updates['norm'])
    np.testing.assert_array_equal(out['table'], updates['table'])
    expected = muon_oracle.orthogonalize(updates['w'], 2, 5)
    np.testing.assert_allclose(out['w'], expected, atol=1e-6)


def test_masked_leaves_and_types_are_kept():
  updates = {
    'w': jnp.asarray(_random(3, 4), jnp.bfloat16),
    'x': optax.MaskedNode(),
    'y': None,
  }
  out = _apply(updates)
  assert out['w'].dtype == jnp.bfloat16
  assert jax.tree.structure(out) == jax.tree.structure(updates)
  assert jax.tree.leaves(transforms.orthogonalize().init(updates)) == []


def test_leaves_of_two_axes_are_matrices_by_default():
  """And no others: the groups of clip and noise."""
  updates = {'w': _random(3, 4), 'x': _random(3), 'y': _random(2, 3, 4)}
  out = _apply(updates)
  expected = muon_oracle.orthogonalize(updates['w'], 2, 5)
  np.testing.assert_allclose(out['w'], expected, atol=1e-6)
  for name in 'xy':
    np.testing.assert_array_equal(out[name], updates[name])


def test_without_nesterov_or_noise_it_is_one_step_of_the_source(x64):
  """optax.trace is the heavy ball m <- beta m + g, not an average."""
  rng = np.random.default_rng(2)
  gradients = rng.standard_normal((4, 5, 3))
  tx = optax.chain(optax.trace(0.9), transforms.orthogonalize())
  state, m = tx.init(jnp.zeros((5, 3))), np.zeros((5, 3))
  update = jax.jit(tx.update)
  for g in gradients:
    out, state = update(g, state)
    m = 0.9 * m + g
    expected = muon_oracle.orthogonalize(m, 2, 5)
    np.testing.assert_allclose(out, expected, atol=1e-13)
