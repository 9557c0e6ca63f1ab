"""Points of the manifold: factors, their frames, and their truncation."""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax._linalg import _factorizations, _frames, _products
from prism_optax._linalg._products import Tall, matmul
from prism_optax._types import ArrayTree


class Factors(NamedTuple):
  """A rank-r matrix ``Z = left @ right.mT``, or a step or gradient of the pair.

  Attributes:
    left: (..., m, r), the output side.
    right: (..., n, r), the input side.
  """

  left: jax.Array
  right: jax.Array


class Frame(NamedTuple):
  """Orthonormal bases of the two factors and their r x r cores.

  ``factors.left = left @ left_core``, ``factors.right = right @ right_core``.

  Attributes:
    left: ``Q_L`` (..., m, r).
    right: ``Q_R`` (..., n, r).
    left_core: ``C_L`` (..., r, r).
    right_core: ``C_R`` (..., r, r).
    left_inverse: ``C_L^-1``, or with ``C_L C_L^-1 = Q_L^T Q_L`` (..., r, r).
    right_inverse: ``C_R^-1``, likewise.
    left_mask: ``Q_L^T Q_L`` (..., r, r), the projector on the observed
      directions: the identity, or less where the factor has lost rank.
    right_mask: ``Q_R^T Q_R``, likewise.
  """

  left: jax.Array
  right: jax.Array
  left_core: jax.Array
  right_core: jax.Array
  left_inverse: jax.Array
  right_inverse: jax.Array
  left_mask: jax.Array
  right_mask: jax.Array


def check_pair(name: str, left: jax.Array, right: jax.Array) -> None:
  """Raises ``ValueError`` unless the shapes are (..., m, r) and (..., n, r)."""
  batches_and_rank = [(x.shape[:-2], x.shape[-1:]) for x in (left, right)]
  if min(left.ndim, right.ndim) < 2 or len(set(batches_and_rank)) > 1:
    raise ValueError(
      f'Expected {name} of shapes (..., m, r) and (..., n, r), got'
      f' {name}.left.shape={left.shape}, {name}.right.shape={right.shape}.'
    )


def frame(factors: Factors) -> Frame:
  """Orthonormal frames of the two factors.

  ``left = Q_L C_L`` and ``right = Q_R C_R``, so that ``Q_L Q_L^T`` and ``Q_R
  Q_R^T`` are the projectors of PRISM (arXiv:2606.00944, Eq. 12). Each is the
  polar factor of the column-normalised factor (ours), a continuous function of
  the factors alone. Factors with orthogonal columns (what :func:`retraction`
  returns) need no factorisation.

  ========================  ===================================================
  zero factor               its frame is zero, and so is the mask
  zero column               left out: the frame is a partial isometry
  lost rank                 directions below r machine epsilons of the
                            column-normalised factor are left out
  columns of any length     harmless: normalised first
  NaN or Inf in a factor    NaN in its frame
  ========================  ===================================================

  Args:
    factors: (..., m, r) and (..., n, r), float32 or float64.

  Returns:
    The frame, in the type of the factors. It is not differentiated, and has the
    fields ``left`` Q_L (..., m, r) and ``right`` Q_R (..., n, r); ``left_core``
    C_L and ``right_core`` C_R; ``left_inverse`` and ``right_inverse`` of them;
    ``left_mask`` Q_L^T Q_L and ``right_mask`` Q_R^T Q_R, (..., r, r).

  Raises:
    ValueError: If the shapes do not match or ``r > min(m, n)``.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank
    >>> left, right = jnp.array([[3.0], [4.0]]), jnp.array([[0.0], [2.0]])
    >>> f = fixed_rank.frame(fixed_rank.Factors(left, right))
    >>> print(f.left.ravel().round(3), f.left_core.ravel(), f.right.ravel())
    [0.6 0.8] [5.] [0. 1.]
  """
  left, right = factors
  check_pair('factors', left, right)
  rank = left.shape[-1]
  if rank < 1 or rank > min(left.shape[-2], right.shape[-2]):
    raise ValueError(
      'Expected 1 <= rank <= min(m, n), got'
      f' factors.left.shape={left.shape}, factors.right.shape={right.shape}.'
    )
  return frame_of(factors)


@_products.flat_batch
def frame_of(factors: Factors) -> Frame:
  """:func:`frame` without its checks, of arrays or of ``Tall``."""
  both = _frames.orthonormal_frame(Tall(tuple(jax.tree.leaves(factors))))
  stacks = len(both[0].stacks) // 2

  def sides(x):
    if not isinstance(x, Tall):
      return jnp.split(x, 2)
    halves = x.stacks[:stacks], x.stacks[stacks:]
    return [Tall(y) if stacks > 1 else y[0] for y in halves]

  return Frame(*(side for x in both for side in sides(x)))


def map_ranks(
  fn: Callable[..., ArrayTree],
  pairs: Sequence[Factors | Frame],
  *others: Sequence[ArrayTree],
) -> tuple[ArrayTree, ...]:
  """``fn`` of one entry of each, called once for all groups of one rank.

  A group of modules of the same shapes has one entry in each sequence. ``fn``
  gets and makes tall arrays as ``Tall``, the r x r matrices of all groups as
  one array, and decides once for all. A group with m = r or n = r goes alone:
  its tall arrays look like r x r matrices.

  Args:
    fn: Of a frame or factors, and of one entry of each of ``others``.
    pairs: Frames or factors, of arrays (k, m, r) and (k, n, r).
    *others: Trees of arrays (k, m, r), (k, n, r) and (k, r, r).

  Returns:
    For each group what ``fn`` returns.
  """
  entries = list(zip(pairs, *others, strict=True))
  alike = collections.defaultdict(list)
  for i, entry in enumerate(entries):
    left, right = entry[0][:2]
    rank = left.shape[-1]
    alone = rank in (left.shape[-2], right.shape[-2]) and i + 1
    alike[rank, alone, left.dtype, jax.tree.structure(entry)].append(i)
  out = {}
  for (rank, *_), group in alike.items():

    def together(*xs: jax.Array, rank: int = rank) -> jax.Array | Tall:
      return jnp.concatenate(xs) if xs[0].shape[-2] == rank else Tall(xs)

    if len(group) == 1:
      out[group[0]] = fn(*entries[group[0]])
      continue
    args = jax.tree.map(together, *(entries[i] for i in group))
    out |= zip(group, args[0][0].shares(fn(*args)), strict=True)
  return tuple(out[i] for i in range(len(entries)))


def nearest_of_rank(factors: Factors, rank: int) -> Factors:
  """The best approximation of rank ``rank``, in the balanced SVD gauge.

  ``(U s^1/2, V s^1/2)`` of the largest singular values (Eckart and Young;
  PRISM, arXiv:2606.00944, Lemma A.25), from two QR factorisations and the SVD
  of a k x k core (k columns come in). The factors may have more columns than
  rows, as two pairs side by side have. With as many columns as came in it is a
  change of gauge alone.

  ============================  ==============================================
  Z of rank below ``rank``      the lost columns are zero in one factor and in
                                the other what it has beyond those of Z, the
                                largest first: training can use them again
  one factor zero               as above: Z stays zero, the other factor keeps
                                the columns that say most about it
  both factors zero             both stay zero
  NaN or Inf in a factor        NaN in both factors of this module
  ============================  ==============================================

  Args:
    factors: (..., m, k) and (..., n, k).
    rank: At least 1, at most min(m, n, k).

  Returns:
    (..., m, rank) and (..., n, rank), in the type of the arguments. Columns
    come in the order of the singular values, largest first, so that the first
    ones are the best approximation of a lower rank still. Signs of pairs of
    columns are arbitrary.

  Raises:
    ValueError: If ``rank`` is too large.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax.fixed_rank import Factors, _points
    >>> left = jnp.array([[4.0, 0.0], [0.0, 1.0]])
    >>> new = _points.nearest_of_rank(Factors(left, jnp.eye(3, 2)), 1)
    >>> print(abs(new.left @ new.right.mT).round(3))
    [[4. 0. 0.]
     [0. 0. 0.]]
  """
  left, right = factors
  if rank > min(left.shape[-2], right.shape[-2], left.shape[-1]):
    raise ValueError(
      f'Expected rank <= min(m, n, columns), got {rank=} for'
      f' factors.left.shape={left.shape}, factors.right.shape={right.shape}.'
    )
  return Factors(*(x[..., :rank] for x in _in_svd_gauge(factors)))


@_products.flat_batch
def _in_svd_gauge(factors: Factors) -> Factors:
  """:func:`nearest_of_rank` of (b, ., k) arrays, to rank min(m, n, k)."""
  left, right = factors
  q_left, c_left = _products.qr(left)
  q_right, c_right = _products.qr(right)
  u, s, vt = _factorizations.svd(matmul(c_left, c_right.mT))
  lost = _factorizations.negligible(s, left.shape[-1])
  alive = ~lost[:, None, :]
  root = jnp.sqrt(s)[:, None, :]
  u, v = u * alive, vt.mT * alive
  *_, left_mask = _frames.orthonormal_frame(c_left)
  *_, right_mask = _frames.orthonormal_frame(c_right)
  keep_right = right_has_rank(left_mask, right_mask)
  more_u, more_v = _complement(u, c_left, lost), _complement(v, c_right, lost)
  return Factors(
    matmul(q_left, u * root + jnp.where(keep_right, 0, more_u)),
    matmul(q_right, v * root + jnp.where(keep_right, more_v, 0)),
  )


def right_has_rank(left_mask: jax.Array, right_mask: jax.Array) -> jax.Array:
  """Whether the right projector has at least the rank of the left, (b, 1, 1).

  That side keeps its directions where both cannot.
  """
  left, right = (
    jnp.trace(mask, axis1=-2, axis2=-1) for mask in (left_mask, right_mask)
  )
  # Both are integers up to rounding; half a unit keeps ties stable.
  return (right > left - 0.5)[:, None, None]


def _complement(
  basis: jax.Array, core: jax.Array, lost: jax.Array
) -> jax.Array:
  """In the lost columns: what ``core`` has outside of the span of ``basis``.

  ``basis`` (b, p, rank) has orthonormal columns, zero where lost.
  """
  rank = basis.shape[-1]
  rest = core - matmul(basis, matmul(basis.mT, core))
  fresh, sizes, _ = _factorizations.svd(rest)
  # Rounding errors are no directions: they would pass for observable ones.
  eps = core.shape[-1] * jnp.finfo(core.dtype).eps
  size = jnp.linalg.norm(core, axis=(-2, -1))[:, None]
  sizes = jnp.where(sizes > eps * size, sizes, 0)
  fresh = fresh[..., :rank] * sizes[:, None, :rank]
  # Lost columns are the last ones; the largest of the fresh comes first.
  order = jnp.arange(rank) - jnp.sum(~lost, -1, keepdims=True)
  fresh = jnp.take_along_axis(fresh, jnp.maximum(order, 0)[:, None, :], -1)
  return fresh * lost[:, None, :]
