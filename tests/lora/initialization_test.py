"""Initial factors: their spectra, their gauge, and the model they leave."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import lora
from tests import cases
from tests.oracles import oracles

PARAMS = cases.adapters([(6, 5, 3), (6, 5, 3), (4, 7, 2)])
# Compiled: the many small operations take longer one by one.
_initialize = jax.jit(
  lora.initialize, static_argnames=('method', 'size', 'layout')
)
_spectral_residual = jax.jit(
  lora.spectral_residual, static_argnames=('layout', 'power_iterations')
)
KEY = jax.random.key(1)


def test_one_sided_factors_are_orthonormal_and_z_is_zero():
  new = _initialize(PARAMS, KEY)
  for left, a in cases.factors_of(new):
    np.testing.assert_allclose(a.T @ a, np.eye(a.shape[1]), atol=1e-6)
    assert not left.any()
  np.testing.assert_array_equal(new['extra'], 1)
  wide = _initialize(PARAMS, KEY, size=4.0)
  np.testing.assert_allclose(
    wide['m0']['lora_a'], 4 * new['m0']['lora_a'], rtol=1e-6
  )


def test_balanced_factors_have_the_singular_values_asked_for():
  """Of Z as the model sees it, whatever the scale."""
  scale = 16.0
  layout = lora.Layout(scale=scale)
  new = _initialize(PARAMS, KEY, method='balanced', size=0.3, layout=layout)
  for z, rank in zip(cases.products_of(new), (3, 3, 2), strict=True):
    s = np.linalg.svd(scale * z, compute_uv=False)
    np.testing.assert_allclose(s, [0.3] * rank + [0] * (len(s) - rank),
                               atol=1e-6)  # fmt: skip
  a, b = new['m2']['lora_a'], new['m2']['lora_b']
  np.testing.assert_allclose(a.T @ a, b @ b.T, atol=1e-6)


@pytest.mark.slow
def test_the_key_decides():
  """The same for the same key; another for each module, side and purpose."""

  @jax.jit
  def initialized(params):
    return [
      lora.initialize(params, key, method='balanced', size=1.0)
      for key in (1, jax.random.key(1), 2)
    ]

  square = cases.adapters([(6, 6, 3)] * 2)
  new, again, other = jax.device_get(initialized(square))
  jax.tree.map(np.testing.assert_array_equal, new, again)
  one = new['m0']['lora_a']
  for a in (other['m0']['lora_a'], new['m1']['lora_a'], new['m0']['lora_b'].T):
    assert np.abs(one - a).max() > 0.1


def test_initial_factors_in_bfloat16_and_stacks():
  params = {
    'lora_a': np.zeros((3, 6, 2), jnp.bfloat16),
    'lora_b': np.zeros((3, 2, 5), jnp.bfloat16),
  }
  new = _initialize(params, KEY, method='balanced', size=1.0)
  assert new['lora_a'].dtype == jnp.bfloat16
  for z in np.float32(new['lora_a']) @ np.float32(new['lora_b']):
    s = np.linalg.svd(z, compute_uv=False)
    np.testing.assert_allclose(s[:2], 1, atol=0.02)


# Spectral residual.


def _decaying(rng, shape, rate=0.5):
  """Matrices with singular values rate^i, as trained weights rather have."""
  stack, (rows, columns) = shape[:-2], shape[-2:]
  out = []
  for _ in range(int(np.prod(stack))):
    u = oracles.random_orthonormal(rng, rows, min(rows, columns))
    v = oracles.random_orthonormal(rng, columns, min(rows, columns))
    out.append((u * rate ** np.arange(u.shape[1])) @ v.T)
  return np.reshape(out, shape).astype(np.float32)


def test_the_best_approximation_goes_to_the_factors():
  rng = np.random.default_rng(0)
  weights = {
    'p': {'kernel': _decaying(rng, (30, 20))},
    's': {'kernel': _decaying(rng, (2, 15, 25))},
    'other': np.arange(3),
  }
  params = {
    'p': {'lora_a': jnp.ones((30, 3)), 'lora_b': jnp.ones((3, 20))},
    's': {'lora_a': jnp.ones((2, 15, 4)), 'lora_b': jnp.ones((2, 4, 25))},
  }
  layout = lora.Layout(scale=4.0)
  new, frozen = _spectral_residual(params, weights, KEY, layout=layout)
  for name, rank in (('p', 3), ('s', 4)):
    a, b = np.float64(new[name]['lora_a']), np.float64(new[name]['lora_b'])
    old = np.float64(weights[name]['kernel'])
    for z, w, rest in zip(
      np.reshape(4 * a @ b, (-1, *old.shape[-2:])),
      np.reshape(old, (-1, *old.shape[-2:])),
      np.reshape(frozen[name]['kernel'], (-1, *old.shape[-2:])),
      strict=True,
    ):
      want = oracles.best_approximation(w, rank)
      # Float32; the sketch adds (s_9 / s_3)^9 or so, far below.
      assert oracles.relative_error(z, want) < 2e-5
      np.testing.assert_allclose(rest + z, w, atol=1e-7)
  gram_a = new['p']['lora_a'].T @ new['p']['lora_a']
  np.testing.assert_allclose(
    gram_a, new['p']['lora_b'] @ new['p']['lora_b'].T, atol=1e-6
  )
  np.testing.assert_allclose(gram_a, np.diag(np.diag(gram_a)), atol=1e-6)
  np.testing.assert_array_equal(frozen['other'], [0, 1, 2])
  again, _ = _spectral_residual(params, weights, KEY, layout=layout)
  jax.tree.map(np.testing.assert_array_equal, new, again)


@pytest.mark.slow
def test_power_iterations_help_on_a_flat_spectrum():
  rng = np.random.default_rng(1)
  w = _decaying(rng, (60, 50), 0.97)
  params = {'p': {'lora_a': jnp.ones((60, 4)), 'lora_b': jnp.ones((4, 50))}}
  left = {}
  for iterations in (0, 8):
    _, frozen = _spectral_residual(
      params, {'p': {'kernel': w}}, KEY, power_iterations=iterations
    )
    left[iterations] = np.linalg.norm(frozen['p']['kernel'])
  best = np.linalg.norm(w - oracles.best_approximation(np.float64(w), 4))
  assert best <= left[8] < best * 1.005
  assert left[0] > best * 1.01
