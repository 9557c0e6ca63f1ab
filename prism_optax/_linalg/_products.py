"""Small dense linear algebra, batched over leading axes.

Two rules of this file serve everything above it.

*   Factorisations (QR, SVD, eigh) of several matrices run one after the other
    on CPU (``_factorizations``). A user's ``vmap`` would turn the loop into a
    batched call, hence the ``custom_vmap``.
*   Products of factors ask for the highest matmul precision: the default on
    GPUs (TF32) and TPUs (bfloat16) would lose the orthogonality of frames.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax._linalg import _factorizations
from prism_optax._linalg._factorizations import map_matrices, no_infinity, svd
from prism_optax._types import ArrayTree, Scalar

Out = TypeVar('Out')
Args = ParamSpec('Args')


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tall:
  """Stacks of matrices of several heights and one width, worked on as one.

  The r x r matrices that belong to them are one array, in the order of the
  stacks. So a product with what is tall is one for each stack, and what is
  r x r, most of a program, is there once for all of them.

  Attributes:
    stacks: Arrays (k_i, m_i, r).
  """

  stacks: tuple[jax.Array, ...]

  @property
  def shape(self) -> tuple[int, np.ndarray, int]:
    """As of an array, but with the heights of all matrices, (k, 1, 1)."""
    counts, heights, ranks = zip(*(x.shape for x in self.stacks), strict=True)
    return sum(counts), np.repeat(heights, counts)[:, None, None], ranks[0]

  def shares(self, tree: ArrayTree) -> list[ArrayTree]:
    """For each stack its part of a tree of ``Tall`` and arrays (k, ...)."""
    leaves, treedef = jax.tree.flatten(tree, lambda x: isinstance(x, Tall))
    ends = np.cumsum([len(x) for x in self.stacks])[:-1].tolist()
    parts = [
      x.stacks if isinstance(x, Tall) else jnp.split(x, ends) for x in leaves
    ]
    return [jax.tree.unflatten(treedef, x) for x in zip(*parts, strict=True)]

  def __add__(self, other: 'Tall') -> 'Tall':
    return jax.tree.map(operator.add, self, other)


# Matrices (..., m, r), or several stacks of them.
Matrices = TypeVar('Matrices', jax.Array, Tall)


def matmul(a: Matrices, b: jax.Array) -> Matrices:
  """``a @ b`` at the highest precision the platform has."""
  if isinstance(a, Tall):
    # A TPU's compiler would form b anew in each of the products, and take twice
    # as long.
    b = jax.lax.platform_dependent(
      b, tpu=jax.lax.optimization_barrier, default=lambda b: b
    )
    return Tall(tuple(matmul(x, y) for x, y in a.shares((a, b))))
  return _factorizations.matmul(a, b)


def gram(a: Matrices, b: Matrices) -> jax.Array:
  """``a.mT @ b`` at the highest precision the platform has."""
  if isinstance(a, Tall):
    return jnp.concatenate([gram(x, y) for x, y in a.shares((a, b))])
  if a is not b or a.shape[-2] <= 2 * a.shape[-1]:
    return matmul(a.mT, b)
  out: jax.Array = jax.lax.platform_dependent(
    a, tpu=gram_tpu, default=lambda a: matmul(a.mT, a)
  )
  return out


def gram_tpu(a: jax.Array) -> jax.Array:
  """``a.mT @ a``, for a TPU.

  Its compiler takes four times as long over the product of one array with
  itself; no more than a tile of its registers is read either way.
  """
  product = matmul(a.mT, jnp.concatenate([a, a], -1))
  return product[..., : a.shape[-1]]


def at_least_float32(x: jax.typing.ArrayLike) -> jax.Array:
  """The array in float32 or wider: bfloat16 has no room for sums and steps."""
  x = jnp.asarray(x)
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def flat_batch(fn: Callable[Args, Out]) -> Callable[Args, Out]:
  """Lets ``fn``, written for matrices (b, ., .), take any leading axes.

  All arguments must be trees of arrays with the same leading axes and two
  trailing ones. The batching rule of the result under ``vmap`` is to call it
  with one more leading axis, so what ``fn`` decides for its whole batch (a
  loop, a branch) stays one decision. That axis comes last, because the first
  one holds the matrices of each stack of a ``Tall``, stack by stack.
  """

  of_flat: Callable[..., Out] = fn

  @jax.custom_batching.custom_vmap
  def mapped(*args):
    lead = jax.tree.leaves(args)[0].shape[:-2]
    flat = jax.tree.map(lambda a: a.reshape((-1, *a.shape[-2:])), args)
    # A `Tall` has more matrices than each of its stacks.
    lead = (-1, *lead[1:]) if lead else ()
    return jax.tree.map(lambda y: y.reshape(lead + y.shape[1:]), of_flat(*flat))

  @mapped.def_vmap
  def _rule(axis_size, in_batched, *args):
    def batched(a, is_batched):
      a = a if is_batched else jnp.broadcast_to(a, (axis_size, *a.shape))
      return jnp.moveaxis(a, 0, -3)

    args = jax.tree.map(batched, args, tuple(in_batched))
    axis = jax.tree.leaves(args)[0].ndim - 3
    out = jax.tree.map(lambda y: jnp.moveaxis(y, axis, 0), mapped(*args))
    return out, jax.tree.map(lambda _: True, out)

  # Compiled once for each shape also where nobody jits around it: branches and
  # loops are compiled anew at every eager call.
  compiled = jax.jit(mapped)

  def wrapped(*args):
    # Frames and spectra are never differentiated: the derivative of a
    # factorisation is infinite where singular values meet.
    return compiled(*jax.lax.stop_gradient(args))

  out: Callable[..., Out] = functools.wraps(fn)(wrapped)
  return out


def columns_times(x: Matrices, factors: jax.Array) -> Matrices:
  """Columns of (b, m, r) matrices times numbers (b, 1, r) or (b, 1, 1)."""
  if isinstance(x, Tall):
    return Tall(tuple(columns_times(*y) for y in x.shares((x, factors))))
  return x * factors


def safe_reciprocal(x: jax.Array, alive: jax.Array) -> jax.Array:
  return jnp.where(alive, 1 / jnp.where(alive, x, 1), 0)


def column_norms(x: Matrices) -> jax.Array:
  """Euclidean norms of the columns, (..., r), without overflow."""
  if isinstance(x, Tall):
    return jnp.concatenate([column_norms(y) for y in x.stacks])
  largest = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
  scale = jnp.where(largest > 0, largest, 1)
  return (scale * jnp.linalg.norm(x / scale, axis=-2, keepdims=True))[..., 0, :]


def qr(x: Matrices) -> tuple[Matrices, jax.Array]:
  """Thin QR of (b, m, r) matrices."""
  if isinstance(x, Tall):
    stacks, triangular = zip(*map(qr, x.stacks), strict=True)
    return Tall(stacks), jnp.concatenate(triangular)
  return map_matrices(lambda a: jnp.linalg.qr(a)[:2], x)


def inverse_cholesky(x: jax.Array) -> jax.Array:
  """``R^-1`` of (b, r, r) Gram matrices ``R^T R``, R upper triangular.

  NaN where a matrix is not positive definite: compare so that NaN is refused.
  """

  def one(a):
    lower = jnp.linalg.cholesky(a)
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    return jax.scipy.linalg.solve_triangular(lower, eye, lower=True).mT

  return map_matrices(one, x)


@flat_batch
def polar(x: jax.Array) -> jax.Array:
  """The polar factor of square matrices, a partial isometry on their range.

  Singular values below ``r`` times the machine epsilon count as zero (the
  matrices are overlaps of frames: their singular values are at most one).
  """
  eye = jnp.eye(x.shape[-1], dtype=x.dtype)

  def by_newton_schulz():
    # Each step turns I - X^T X = E into 5/8 E^3: below eps after three of them.
    y = x
    for _ in range(3):
      a = gram(y, y)
      y = matmul(y, 15 / 8 * eye - 10 / 8 * a + 3 / 8 * matmul(a, a))
    return y

  def by_svd():
    u, s, vt = svd(x)
    kept = s > x.shape[-1] * jnp.finfo(x.dtype).eps
    return matmul(u * kept[:, None, :], vt)

  distance = jnp.sum(jnp.square(eye - gram(x, x)), axis=(-2, -1))
  return jax.lax.cond(jnp.max(distance) <= 0.25**2, by_newton_schulz, by_svd)


@flat_batch
def orthogonal_polar(x: jax.Array) -> jax.Array:
  """An orthogonal polar factor of square matrices: also off their range."""
  u, _, vt = svd(x, complete=True)
  return matmul(u, vt)


@flat_batch
def eigh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Eigenvalues, ascending, and eigenvectors of symmetric matrices."""
  return map_matrices(lambda a: tuple(jnp.linalg.eigh(a)), no_infinity(x))


def inverse_sqrt(
  x: jax.Array,
  *,
  floor: jax.Array,
  max_condition_number: Scalar,
  eps: Scalar,
  added: Scalar = 0.0,
) -> jax.Array:
  """``U (sqrt(w) + eps)^-1 U^T`` of a symmetric matrix with floored spectrum.

  Eigenvalues are raised to ``floor`` and then to the largest of them over
  ``max_condition_number``. Where root and ``eps`` are both zero (nothing was
  ever seen) the result is zero.

  Args:
    x: (..., r, r), symmetric.
    floor: (...), not negative.
    max_condition_number: At least 1.
    eps: Added to the roots, as in Adam.
    added: Added to the eigenvalues, once negative ones are zero.

  Returns:
    (..., r, r).
  """
  w, v = eigh(x)
  w = jnp.maximum(jnp.maximum(w, 0) + added, floor[..., None])
  w = jnp.maximum(w, w[..., -1:] / max_condition_number)
  root = jnp.sqrt(w) + eps
  return matmul(v * safe_reciprocal(root, root > 0)[..., None, :], v.mT)
