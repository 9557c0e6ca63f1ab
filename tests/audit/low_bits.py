"""Who was in a sum, read from the low bits of what is released.

The attacker knows the two sums that a release may come from. He inverts the
public post-processing, and asks for each entry whether any float n leads from a
sum to the noisy number: from the wrong one ``x + s n`` in floats never does so
for all of a thousand entries (Mironov 2012). Each route is played with the
library's noise, and with noise that is added as floats, against which the
attack must succeed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tests.core import seams

RECORDS = 32


def noise_as_floats(key, tree, stddev):
  """The former release: normal numbers, scaled and added in floats."""
  leaves, treedef = jax.tree.flatten(seams.as_floats(tree))
  keys = jax.random.split(key, len(leaves))
  stddevs = stddev if isinstance(stddev, list) else [stddev] * len(leaves)

  def whole(x):  # No part of a fused product: a compiler does not see it.
    return jnp.where(jnp.isfinite(x), x, 0)

  noisy = [
    whole(x) + whole(jax.random.normal(k, x.shape)) * jnp.asarray(s, x.dtype)
    for k, x, s in zip(keys, leaves, stddevs, strict=True)
  ]
  return jax.tree.unflatten(treedef, noisy)


class Route(NamedTuple):
  """A way from records to what is released, on d noised entries.

  Attributes:
    release: ``release(key, rows)``, (d,); rows of zeros are nobody.
    sums: From the tree that the noise is added to, to the same d entries.
    stddev: Of the noise of an entry. A power of two: products with it are
      exact, so that no compiler's fused multiplication changes the noise that
      is added as floats.
    width: Entries of a record's row.
    after: Public post-processing of noisy entries, (..., d), monotone; None
      where they are released as they are.
    before: Its inverse, roughly; infinite where it cannot be inverted.
  """

  release: Callable[[jax.Array, jax.Array], jax.Array]
  sums: Callable[[Any], jax.Array]
  stddev: float
  width: int
  after: Callable[[np.ndarray], np.ndarray] | None = None
  before: Callable[[np.ndarray], np.ndarray] | None = None


def played(route, noise=seams.add_noise):
  """``play(keys, rows)``: what is released, (keys, d), and the sum, (d,).

  One program gives both, so that the attacker has every bit of the sum.
  """

  def one(key, rows):
    seen = []

    def add_noise(key, tree, stddev, **_):
      seen.append(seams.as_floats(tree))
      return noise(key, tree, stddev)

    with seams.noise_replaced(add_noise):
      out = route.release(key, rows)
    return out, route.sums(seen[0])

  return jax.jit(jax.vmap(one, (0, None), (0, None)))


def records(width, others, seed=0):
  """Rows with and without the canary, all of them three clip norms long."""
  rng = np.random.default_rng(seed)
  rows = rng.normal(size=(RECORDS, width))
  rows *= 3 / np.linalg.norm(rows, axis=1, keepdims=True)
  rows[1:] *= others
  without = rows.copy()
  without[0] = 0
  return [np.float32(rows), np.float32(without)]


# The attack.


def _near(x, step):
  return (x.view(np.int32) + np.int32(step)).view(np.float32)


def preimages(route, out):
  """The least and the largest noisy numbers that lead to what is released.

  Where none is found the least is infinite and the largest minus infinity.
  """
  if route.after is None:
    return out, out
  guess = np.float32(route.before(out))
  low, high = np.full_like(guess, np.inf), np.full_like(guess, -np.inf)
  for step in range(-2, 3):
    near = _near(guess, step)
    fits = np.isfinite(guess) & (route.after(near) == out)
    low = np.where(fits, np.minimum(low, near), low)
    high = np.where(fits, np.maximum(high, near), high)
  return low, high


def unexplained(low, high, x, stddev):
  """For how many entries no float n leads from ``x`` to the noisy number.

  Args:
    low: The least noisy numbers in question, (runs, d).
    high: The largest ones.
    x: The sum, (d,).
    stddev: Of the noise, a power of two.

  Returns:
    Counts, (runs,).
  """
  counts, stddev = [], np.float32(stddev)
  rows = max(1, 2**16 // x.size)  # What is at work at once fits a cache.
  for i in range(0, len(low), rows):
    a, b = low[i : i + rows], high[i : i + rows]
    possible = np.isfinite(a)
    middle = np.where(possible, a, 0)
    n = ((np.float64(middle) - x) / stddev).astype(np.float32)
    y = x + stddev * n
    left = np.flatnonzero(possible & ~((a <= y) & (y <= b)))
    a, b, n = a.ravel(), b.ravel(), n.ravel()
    for step in (-1, 1, -2, 2, -3, 3, -4, 4):
      y = x[left % x.size] + stddev * _near(n[left], step)
      left = left[~((a[left] <= y) & (y <= b[left]))]
    missed = np.bincount(left // x.size, minlength=len(possible))
    counts.append(missed + np.sum(~possible, -1))
  return np.concatenate(counts)


def favours(route, out, sums):
  """By how many entries the first of two sums explains more, (runs,).

  Args:
    route: How ``out`` was released.
    out: What was released, (runs, d).
    sums: The two sums, (d,) each.
  """
  with np.errstate(invalid='ignore', over='ignore'):
    low, high = preimages(route, out)
    first, second = (unexplained(low, high, x, route.stddev) for x in sums)
  return second - first


def advantage(yes, wrongly):
  """True minus false positive rate of answers, and its standard error."""
  p, q = np.mean(yes), np.mean(wrongly)
  variance = p * (1 - p) / len(yes) + q * (1 - q) / len(wrongly)
  return float(p - q), float(np.sqrt(variance))
