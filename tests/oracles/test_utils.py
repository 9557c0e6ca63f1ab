"""Small parameter trees and gradients that the tests share."""

import jax.numpy as jnp
import numpy as np

from tests.oracles import oracles


def tree_of(factors, extra=None, dtype=jnp.float64):
  """{'m0': {'lora_a', 'lora_b'}, ..., 'extra'} of a list of (left, right)."""
  tree = {
    f'm{i}': {
      'lora_a': jnp.asarray(right, dtype),
      'lora_b': jnp.asarray(np.swapaxes(left, -1, -2), dtype),
    }
    for i, (left, right) in enumerate(factors)
  }
  if extra is not None:
    tree['extra'] = jnp.asarray(extra, dtype)
  return tree


def factors_of(tree):
  """The inverse of :func:`tree_of`: [(left, right), ...] in NumPy."""
  return [
    (np.swapaxes(np.asarray(x['lora_b']), -1, -2), np.asarray(x['lora_a']))
    for name, x in sorted(tree.items())
    if name != 'extra'
  ]


def products_of(tree):
  """[Z, ...] in float64."""
  return [
    np.float64(left) @ np.swapaxes(np.float64(right), -1, -2)
    for left, right in factors_of(tree)
  ]


def factor_gradients(factors, dense, extra=None, dtype=jnp.float64):
  """The tree of gradients that gradients (..., m, n) in Z give."""
  pairs = [
    (g @ right, np.swapaxes(g, -1, -2) @ left)
    for (left, right), g in zip(factors, dense, strict=True)
  ]
  return tree_of(pairs, extra, dtype)


def random_problem(rng, shapes, batch, condition=1.0):
  """Factors and per-example dense gradients for modules (m, n, r)."""
  factors = [oracles.random_factors(rng, *s, condition) for s in shapes]
  dense = [rng.normal(size=(batch, m, n)) for m, n, _ in shapes]
  return factors, dense
