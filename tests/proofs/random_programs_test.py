"""Programs at random: none that is proved mixes.

Each is a chain of operations with random axes on arrays whose sizes are B or
divide it, so that a batch axis cannot be told by its size.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from prism_optax import diagnostics
from tests import cases
from tests.proofs import oracle

B = 4


def _reshaped(rng, a):
  """Two axes as one, or one as two."""
  k = int(rng.integers(0, a.ndim))
  if rng.integers(0, 2) and k + 1 < a.ndim:
    return a.reshape(*a.shape[:k], -1, *a.shape[k + 2 :])
  for size in (B, 2):
    if a.shape[k] % size == 0 and a.shape[k] > 2:
      return a.reshape(*a.shape[:k], size, -1, *a.shape[k + 1 :])
  return a


def _product(rng, a, b, axis, other):
  batched = ((other,), (other,)) if other != axis else ((), ())
  return lax.dot_general(a, b, (((axis,), (axis,)), batched))


def _scanned(rng, a, b, axis):
  rows = jnp.moveaxis(a, axis, 0), jnp.moveaxis(b, axis, 0)
  kind = rng.integers(0, 3)
  if kind == 0:
    return lax.map(lambda r: r[0] * jnp.sum(r[1]), rows)
  first = rows[0][0] if kind == 1 else jnp.zeros_like(rows[0][0])
  carry, ys = lax.scan(lambda c, r: (c + r[0], jnp.sin(r[1])), first, rows)
  return ys if kind == 1 else carry


def _cut(rng, a, b, axis):
  cut = a.shape[axis] // 2
  parts = [
    lax.slice_in_dim(x, *x_range, axis=axis)
    for x, x_range in ((a, (0, cut)), (b, (cut, b.shape[axis])))
  ]
  return jnp.concatenate(parts[:: 1 if rng.integers(0, 3) else -1], axis)


# Of a generator, two arrays of one shape and two axes.
OPERATIONS = [
  lambda rng, a, b, i, j: a * 0.5 + jnp.sin(b),
  lambda rng, a, b, i, j: jnp.where(b > 0, a, -a),
  lambda rng, a, b, i, j: jnp.swapaxes(a, i, j),
  lambda rng, a, b, i, j: jnp.sum(a, i, keepdims=True) + b,
  lambda rng, a, b, i, j: jnp.max(a, i),
  lambda rng, a, b, i, j: _reshaped(rng, a),
  lambda rng, a, b, i, j: _reshaped(rng, b),
  lambda rng, a, b, i, j: jnp.cumsum(a, i),
  lambda rng, a, b, i, j: jnp.sort(a, i),
  lambda rng, a, b, i, j: jnp.flip(a, i),
  lambda rng, a, b, i, j: jnp.roll(a, 1, i),
  lambda rng, a, b, i, j: jnp.concatenate([a, b], i),
  lambda rng, a, b, i, j: _cut(rng, a, b, i),
  lambda rng, a, b, i, j: _product(rng, a, b, i, j),
  lambda rng, a, b, i, j: jnp.take_along_axis(a, (b > 0).astype(int), i),
  lambda rng, a, b, i, j: jnp.tile(a, 2),
  lambda rng, a, b, i, j: jnp.repeat(a, 2, i),
  lambda rng, a, b, i, j: jax.nn.softmax(a, i),
  lambda rng, a, b, i, j: _scanned(rng, a, b, i),
  lambda rng, a, b, i, j: jnp.stack(list(jnp.moveaxis(a, i, 0))),
  lambda rng, a, b, i, j: a.at[:, 0].set(b[:, 0]),
  lambda rng, a, b, i, j: lax.dynamic_update_slice_in_dim(
    a, lax.slice_in_dim(b, 0, 1, axis=i), 0, i
  ),
  lambda rng, a, b, i, j: a[
    jnp.arange(len(a)), (b.reshape(len(b), -1)[:, 0] > 0).astype(int)
  ],
  lambda rng, a, b, i, j: jax.vmap(jnp.multiply, i, i)(a, b),
]  # fmt: skip


def program(seed):
  """A function of two arrays (B, 2, B) that returns one array."""

  def function(x, y):
    rng = np.random.default_rng(seed)
    pool = [x, y, jnp.arange(float(B * 2 * B)).reshape(B, 2, B) / 9]
    for _ in range(rng.integers(3, 12)):
      recent = pool[-4:] if rng.integers(0, 3) else pool
      a = recent[rng.integers(0, len(recent))]
      same = [z for z in pool if z.shape == a.shape]
      b = same[rng.integers(0, len(same))]
      axis, other = (int(k) for k in rng.integers(0, a.ndim, 2))
      operation = OPERATIONS[rng.integers(0, len(OPERATIONS))]
      try:
        z = operation(rng, a, b, axis, other)
      except (IndexError, TypeError, ValueError):
        continue  # These shapes do not go together.
      if 1 <= z.ndim <= 5 and 0 < z.size <= 600:
        pool.append(jnp.tanh(z))
    rows = [z for z in pool[3:] if z.shape[0] == B][-2:]
    return sum(z.reshape(B, -1).mean(1) for z in rows) if rows else x

  if seed % 3 == 0:
    return jax.grad(lambda x, y: jnp.sum(function(x, y)), (0, 1))
  return function


@cases.fast_first('first', [0], [0, *range(100, 196, 16)])
def test_no_program_that_is_proved_mixes(first):
  """Enough are proved, and enough mix; few are refused for nothing."""
  found = {'proved': 0, 'mixing': 0, 'refused for nothing': 0}
  for seed in range(first, first + 16):
    function, rng = program(seed), np.random.default_rng(seed)
    x, y = rng.normal(size=(2, B, 2, B)).astype(np.float32)
    proof = diagnostics.prove_independent(function, x, y)
    mixing = oracle.mixes(function, x, y)
    assert not (proof and mixing), f'{seed}: {proof}'
    kind = 'mixing' if mixing else 'refused for nothing'
    found['proved' if proof else kind] += 1
  assert found['proved'] >= 3, found
  assert found['mixing'] >= 3, found
