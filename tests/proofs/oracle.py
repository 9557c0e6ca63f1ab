"""What a proof is compared with: runs in which one example is changed."""

import jax
import jax.numpy as jnp
import numpy as np


def mixes(function, *args, in_axes=0):
  """Whether another example's output moves when one example is changed.

  Each example in turn becomes NaN, and then another number; whole numbers
  become other whole numbers below 3. No other row of an output may change.
  """
  axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
  function = jax.jit(function)
  args = jax.tree.map(np.asarray, args)
  batched = [x for x, axis in zip(args, axes, strict=True) if axis == 0]
  size = len(jax.tree.leaves(batched)[0])

  def changed(arg, axis, i, value):
    def change(x):
      x = x.copy()
      floats = jnp.issubdtype(x.dtype, jnp.floating)
      x[i] = value if floats else (x[i] + 1) % 3
      return x

    return arg if axis is None else jax.tree.map(change, arg)

  clean = jax.device_get(jax.tree.leaves(function(*args)))
  for i in range(size):
    others = np.arange(size) != i
    for value in (np.nan, 9.0):
      rows = [changed(*x, i, value) for x in zip(args, axes, strict=True)]
      found = jax.device_get(jax.tree.leaves(function(*rows)))
      for one, other in zip(clean, found, strict=True):
        same = np.array_equal(one[others], other[others], equal_nan=True)
        if one.shape[:1] != (size,) or not same:
          return True
  return False
