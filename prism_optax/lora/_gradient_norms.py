"""Intrinsic norms of per-example gradients that are read where they lie.

In general the norm of ``X_L = (I - P_L) g_L C_R^-1`` is known once X_L is
there: written and read again, for every example. Between two retractions the
columns of the factors are orthogonal, ``C`` is diagonal, and column norms and
one thin product say the same.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prism_optax._linalg import gram
from prism_optax.fixed_rank import Frame
from prism_optax.lora._blocks import ModuleArrays
from prism_optax.lora._layout import Unit, to_matrices

# In place of the scale of columns that a zero direction hides: too little to
# matter, and enough to shorten an example whose hidden entries might overflow
# in a sum. Zero times infinity would be a release.
_HIDDEN = 1e-30
# How far a core may be from diagonal. Norms are taken too large by this share.
_ALMOST_DIAGONAL = 1e-5


class _ColumnScales(NamedTuple):
  """What whitening does to columns, where it is almost that alone.

  Attributes:
    left: Diagonal of ``C_R^-1``, (k, r): for the columns of ``g_L``.
    right: Diagonal of ``C_L^-1``, (k, r): for those of ``g_R``.
    slack: (k,), at least one: the true norms are at most ``slack`` times those
      with the diagonals alone.
  """

  left: jax.Array
  right: jax.Array
  slack: jax.Array


def _column_scales(frame: Frame) -> _ColumnScales:
  def side(inverse):
    # inverse = diag (I + F), so ||y inverse|| <= ||y diag|| (1 + ||F||).
    diagonal = jnp.diagonal(inverse, axis1=-2, axis2=-1)
    beside = inverse * (1 - jnp.eye(diagonal.shape[-1], dtype=inverse.dtype))
    alive = diagonal != 0
    ratios = beside / jnp.where(alive, diagonal, 1)[..., None]
    rows = jnp.sum(jnp.square(ratios), -1)
    # Nothing is known of a row whose diagonal is zero, unless all of it is.
    rows = jnp.where(alive | (rows == 0), rows, jnp.inf)
    return diagonal, jnp.sqrt(jnp.sum(rows, -1))

  left, left_excess = side(frame.right_inverse)
  right, right_excess = side(frame.left_inverse)
  return _ColumnScales(left, right, 1 + jnp.maximum(left_excess, right_excess))


def columns_are_orthogonal(frames: Sequence[Frame]) -> jax.Array:
  """Whether whitening is a scaling of columns, in all modules.

  It is behind :func:`prism_optax.retract` and :func:`canonicalize`.

  Args:
    frames: From :meth:`Adapters.frames`.

  Returns:
    A boolean scalar: True where :func:`squared_gradient_norms` takes no norm
    too large by more than 1e-5 of itself. False for NaN.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> skew = {'lora_a': jnp.array([[1.0, 1.0], [0.0, 1.0], [0.0, 0.0]]),
    ...         'lora_b': jnp.eye(2)}
    >>> for params in (skew, lora.canonicalize(skew)):
    ...   frames = lora.Adapters(params).frames(params)
    ...   print(lora.columns_are_orthogonal(frames))
    False
    True
  """
  slack = [jnp.max(_column_scales(frame).slack) for frame in frames]
  return jnp.max(jnp.stack(slack)) <= 1 + _ALMOST_DIAGONAL


def squared_gradient_norms(
  frames: Sequence[Frame],
  groups: Sequence[Sequence[ModuleArrays]],
  *,
  unit: Any = 1.0,
) -> jax.Array:
  """Squares of the examples' intrinsic norms, where columns are orthogonal.

  ``sum ||X_L||^2 + ||X_R||^2`` over all modules (PRISM, arXiv:2606.00944,
  Eq. 15) as ``||y_L||^2 - ||Q_L^T y_L||^2 + ||y_R||^2`` with the scaled columns
  ``y`` of the factor gradients: no example's gradient is whitened or copied.

  ==========================  =================================================
  gradients of one matrix     ``||y_R||`` is at least ``||Q_L^T y_L||``: little
                              cancels
  others (one side stopped)   a hundredth of what cancels is added: more than
                              rounding can hide
  hidden by a zero factor     counts only above 1e27
  columns not orthogonal      too large, see :func:`columns_are_orthogonal`
  NaN, Inf, huge entries      not finite
  ==========================  =================================================

  Args:
    frames: From :meth:`Adapters.frames`.
    groups: Gradients from :meth:`Adapters.in_place`, with one batch axis.
    unit: The norms are divided by it.

  Returns:
    (B,), never too small.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'lora_a': 2 * jnp.eye(3, 1), 'lora_b': 4 * jnp.eye(1, 2)}
    >>> adapters = lora.Adapters(params)
    >>> grads = {
    ...   'lora_a': jnp.eye(3, 1)[None], 'lora_b': jnp.array([[[0.0, 6.0]]])}
    >>> groups, _ = adapters.in_place(grads, 1)
    >>> frames = adapters.frames(params)
    >>> lora.squared_gradient_norms(frames, groups).tolist()
    [9.0625]
  """
  total: Any = 0.0
  for frame, modules in zip(frames, groups, strict=True):
    scales = _column_scales(frame)
    energies = [_energies(frame.left, scales, x, unit) for x in modules]
    # (B, k) each: what follows is computed once for all of them.
    left, inside, right = (
      jnp.concatenate(x, -1) for x in zip(*energies, strict=True)
    )
    squares = jnp.maximum(left - inside, 0) + right
    squares = squares + 0.01 * jnp.maximum(left - squares, 0)
    total = total + jnp.sum(squares * jnp.square(scales.slack), -1)
  return total


def _energies(
  left_basis: jax.Array, scales: _ColumnScales, x: ModuleArrays, unit: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """``||y_L||^2``, ``||Q_L^T y_L||^2`` and ``||y_R||^2`` of one module."""
  share = unit * x.scale**0.5
  left, right = (
    jnp.where(scale == 0, _HIDDEN, scale / share)
    for scale in (scales.left[x.place], scales.right[x.place])
  )
  inside = gram(to_matrices(x.left_unit, x.left), left_basis[x.place])
  return (
    _energy(x.left, x.left_unit, left),
    jnp.sum(jnp.square(inside * left[:, :, None]), (-2, -1)),
    _energy(x.right, x.right_unit, right),
  )


def _energy(stacked: jax.Array, unit: Unit, scale: jax.Array) -> jax.Array:
  """Squared norms (*lead, s) of (*lead, s, *unit), columns times (s, r).

  Scaled before it is squared: a square of what is tiny in another unit would
  vanish. In the order of the leaf, because a transposition would be written.
  """
  shape, rank = unit
  across = [len(scale)] + [1] * len(shape)
  across[1 + rank] = shape[rank]
  axes = tuple(range(-len(shape), 0))
  return jnp.sum(jnp.square(stacked * scale.reshape(across)), axes)
