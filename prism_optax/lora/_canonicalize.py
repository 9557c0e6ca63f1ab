"""The balanced SVD gauge, once before training."""

from typing import Any

import jax
import numpy as np

from prism_optax import _modules

# Relative to the largest singular value: below it is rounding of float64.
_TINY = 64 * np.finfo(np.float64).eps


def canonicalize(params: Any, *, layout: _modules.LayoutLike = None) -> Any:
  """The same matrices Z from factors in the balanced SVD gauge.

  ``left = U s^1/2`` and ``right = V s^1/2`` with orthogonal columns: there
  frames are exact at any condition number. Training keeps this gauge by
  itself; factors that come from elsewhere may be in any. Computed in float64
  on the host, whatever ``jax_enable_x64`` says. Ours. It reads parameters and
  no data: post-processing.

  ======================  ====================================================
  one factor zero         it stays zero; the columns of the other are made
                          orthogonal, with the same column space
  Z of rank below r       as above for the lost directions: the factor with the
                          higher rank keeps its own, the other is zero there
  both factors zero       both stay zero
  leaves without pair     pass
  ======================  ====================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs. Other leaves pass.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A tree like ``params``, same types.

  Raises:
    ValueError: Under ``jit`` (the values are needed), or as in
      :func:`describe_pairs`.

  Example:
    >>> import numpy as np
    >>> from prism_optax import lora
    >>> a, b = np.array([[3.0, 3], [0, 1]]), np.array([[1.0, 0], [0, 2]])
    >>> new = lora.canonicalize({'lora_a': a, 'lora_b': b})
    >>> bool(np.allclose(new['lora_a'] @ new['lora_b'], a @ b))
    True
  """
  modules = _modules.find_modules(params, layout)
  leaves, treedef = jax.tree.flatten(params)
  if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
    raise ValueError(
      'lora.canonicalize works on values: call it outside of jit, got traced'
      ' params.'
    )
  for module in modules:
    sides = (module.b, module.b_axes), (module.a, module.a_axes)
    left, right = (
      _to_matrices(axes, np.asarray(leaves[i], np.float64)) for i, axes in sides
    )
    balanced = [_balance(x, y) for x, y in zip(left, right, strict=True)]
    for (i, axes), matrices in zip(sides, zip(*balanced, strict=True),
                                   strict=True):  # fmt: skip
      new = np.transpose(
        np.stack(matrices).reshape(axes.sizes(axes.order)),
        np.argsort(axes.order),
      ).astype(leaves[i].dtype)
      leaves[i] = (
        jax.device_put(new, leaves[i].sharding)
        if isinstance(leaves[i], jax.Array)
        else new
      )
  return jax.tree.unflatten(treedef, leaves)


def _to_matrices(axes: Any, leaf: np.ndarray) -> np.ndarray:
  """As ``LeafAxes.to_matrices``, but NumPy: float64 without a global switch."""
  return np.transpose(leaf, axes.order).reshape(
    int(np.prod(axes.sizes(axes.stack))), -1, axes.shape[axes.rank]
  )


def _rank_of(singular_values: np.ndarray) -> int:
  return int(np.sum(singular_values > _TINY * singular_values[0]))


def _balance(left: np.ndarray, right: np.ndarray):
  """One pair (m, r), (n, r) -> the same product in the balanced SVD gauge."""
  rank = left.shape[-1]
  q_left, c_left = np.linalg.qr(left)
  q_right, c_right = np.linalg.qr(right)
  u, s, vt = np.linalg.svd(c_left @ c_right.T)
  kept = _rank_of(s)
  new_left = np.zeros_like(left)
  new_right = np.zeros_like(right)
  new_left[:, :kept] = q_left @ u[:, :kept] * np.sqrt(s[:kept])
  new_right[:, :kept] = q_right @ vt[:kept].T * np.sqrt(s[:kept])
  if kept < rank:
    sizes = [np.linalg.svd(c, compute_uv=False) for c in (c_left, c_right)]
    keep_right = _rank_of(sizes[1]) >= _rank_of(sizes[0])
    old, new = (right, new_right) if keep_right else (left, new_left)
    basis = (q_right @ vt[:kept].T) if keep_right else (q_left @ u[:, :kept])
    rest = old - basis @ (basis.T @ old)
    directions, lengths, _ = np.linalg.svd(rest, full_matrices=False)
    # Rounding errors are no directions: they would pass for observable ones.
    size = max(np.linalg.norm(old), np.finfo(np.float64).tiny)
    lengths = np.where(lengths > _TINY * size, lengths, 0.0)
    lost = rank - kept
    new[:, kept:] = directions[:, :lost] * lengths[:lost]
  return new_left, new_right
