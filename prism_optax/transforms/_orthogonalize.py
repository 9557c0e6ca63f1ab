"""The transformation that orthogonalizes the matrices of a tree of updates."""

import functools

import jax
import optax

from prism_optax import _matrix_axes, muon
from prism_optax._linalg._products import at_least_float32
from prism_optax._matrix_axes import DimensionNumbersLike
from prism_optax._types import DTypeLike
from prism_optax.muon._polynomials import Steps, check_options


def orthogonalize(
  *,
  degree: int = 2,
  steps: Steps = 5,
  normalize: str = 'max1',
  weight_dimension_numbers: DimensionNumbersLike = None,
  matmul_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
  """Orthogonalizes the matrices of the updates by Newton-Schulz steps.

  Between ``optax.trace(beta)``, the heavy ball, and the learning rate it makes
  Muon with the iteration of DP-Muon (arXiv:2605.12994). The singular vectors of
  a matrix stay and its singular values move towards 1, see
  :mod:`prism_optax.muon`.

  **Privacy.** After the noise it is post-processing and costs nothing. It gives
  no privacy by itself: before the noise the sensitivity of its output is
  unknown.

  ==========================  =================================================
  zero matrix                 stays zero
  matrix of norm below one    keeps its size with ``'max1'``
  NaN or Inf in a matrix      this matrix is not finite, others are not affected
  bfloat16 updates            computed in float32, returned in bfloat16
  ==========================  =================================================

  Args:
    degree: Degree kappa of the polynomial, a Python int.
    steps: Number q of steps, a Python int, or the coefficients of each, from
      :func:`prism_optax.muon.minimax_coefficients`.
    normalize: ``'max1'`` (the source), ``'frobenius'`` (optax's Muon) or
      ``'none'``: see :func:`prism_optax.muon.newton_schulz`.
    weight_dimension_numbers: Which leaves are matrices, see
      :func:`per_matrix_clip`; with ``None`` leaves of two axes are. Batch axes
      stack matrices. All other leaves pass unchanged.
    matmul_dtype: Type of the factors of the products, for instance
      ``jnp.bfloat16``; sums stay in float32.

  Returns:
    A transformation that keeps shapes and types. Its state is empty.

  Raises:
    ValueError: For an option that is not allowed; in ``init`` and ``update`` if
      a prefix does not fit or axes do not exist.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import transforms
    >>> tx = transforms.orthogonalize(steps=8)
    >>> updates = {'w': jnp.array([[5.0, 0.0, 0.0], [0.0, 0.0, -4.0]])}
    >>> print(tx.update(updates, tx.init(updates))[0]['w'].round(4))
    [[ 1.  0.  0.]
     [ 0.  0. -1.]]
  """
  check_options(degree, steps, normalize)
  matrices_of = functools.partial(
    _matrix_axes.resolve, weight_dimension_numbers
  )

  def init_fn(params):
    matrices_of(params)  # What does not fit shall fail here, not in training.
    return optax.EmptyState()

  def direction(x, matrices):
    if matrices is None:
      return x
    out = muon.newton_schulz(
      at_least_float32(matrices.to_matrices(x)),
      degree=degree,
      steps=steps,
      normalize=normalize,
      matmul_dtype=matmul_dtype,
    )
    return matrices.from_matrices(out.astype(x.dtype))

  def update_fn(updates, state, params=None):
    del params
    directions = map(direction, jax.tree.leaves(updates), matrices_of(updates))
    return _matrix_axes.with_leaves(updates, directions), state

  return optax.GradientTransformation(init_fn, update_fn)
