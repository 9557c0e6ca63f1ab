"""Adapters of another rank.

Everything here reads adapters and no data: what it makes of adapters that were
trained privately is post-processing.
"""

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from prism_optax import _linalg, _modules, _randomness, _validate, fixed_rank
from prism_optax.fixed_rank import Factors

# Keys of new columns are far from those that a noise key is split into.
_NEW_COLUMNS = 0x434F4C53


def truncate(
  params: Any,
  rank: int | Mapping[str, int],
  *,
  layout: _modules.LayoutLike = None,
) -> Any:
  """The best approximation of each Z by a matrix of lower rank.

  In the balanced SVD gauge, see :func:`prism_optax.fixed_rank.truncate`. The
  LoRA scale stays what it was: a library that divides alpha by the rank must
  be given an alpha that is smaller in proportion.

  Computed in float32 at least, on the device. Factors in a gauge of a large
  condition number lose what float32 loses: ``canonicalize`` them first.

  Privacy: post-processing.

  =========================  ==================================================
  the rank as it is          a change of gauge alone
  Z of lower rank than that  lost columns are zero in one factor, the other
                             keeps what it has beyond Z
  one factor zero            Z stays zero, the other factor keeps the most
  rank above the module's    ValueError: see :func:`pad_rank`
  =========================  ==================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs. Other leaves pass.
    rank: The new rank of all modules; or a mapping from patterns of module
      names (``fnmatch``, the first that matches) to ranks, where modules that
      no pattern matches keep theirs.
    layout: See :func:`describe_pairs`.

  Returns:
    A tree like ``params`` with factors of the new ranks, in the same types.

  Raises:
    ValueError: If a rank is no integer >= 1 or larger than that of its module,
      or a pattern matches none.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> b = jnp.diag(jnp.array([4.0, 1.0]))
    >>> params = {'lora_a': jnp.eye(3, 2), 'lora_b': b}
    >>> new = lora.truncate(params, 1)
    >>> print(abs(new['lora_a'] @ new['lora_b']).round(3))
    [[4. 0.]
     [0. 0.]
     [0. 0.]]
  """
  ranks = _ranks(params, rank, layout)

  def change(module: _modules.Module, factors: Factors) -> Factors:
    new = ranks.get(module.name, module.rank)
    if new > module.rank:
      raise ValueError(
        f'Expected rank <= {module.rank}, that of {module.name!r}, got'
        f' rank={new}. For a larger one use lora.pad_rank.'
      )
    return fixed_rank.truncate(factors, new)

  return resized(params, layout, change)


def pad_rank(
  params: Any,
  rank: int | Mapping[str, int],
  prng_key: Any = None,
  *,
  method: str = 'one_sided',
  layout: _modules.LayoutLike = None,
) -> Any:
  """Adapters of a higher rank with the same Z, bit for bit.

  ``'one_sided'``: new columns of ``right`` are random, orthonormal, orthogonal
  to the old ones and as long as those are on average; new columns of ``left``
  are zero, as at the start of training. Frames see the new input directions at
  once, and the output directions after the first step: ``G Q_R`` has the new
  columns, ``G^T Q_L`` has not. Any optimizer can train them.

  ``'zero'``: new columns are zero on both sides. No gradient reaches them and
  frames leave them out, so the tangent space is that of the old rank; but
  :func:`prism_optax.retract` keeps the best approximation of the NEW rank of
  ``Z + T``, which fills them with the directions of the step. Optimizers that
  add to the factors never move them.

  The LoRA scale stays what it was: a library that divides alpha by the rank
  must be given a larger alpha in proportion. The state of an optimizer does not
  fit the new shapes: start it anew, with a fresh noise key.

  Privacy: post-processing. The new columns are random numbers and need not be
  secret; do not use a noise key for them.

  ========================  ===================================================
  the rank as it is         the factors as they are
  ``right`` is zero         its new columns have length one
  rank above min(in, out)   ValueError
  rank below the module's   ValueError: see :func:`truncate`
  ========================  ===================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs. Other leaves pass.
    rank: The new rank, or a mapping from patterns to ranks, as in
      :func:`truncate`.
    prng_key: An int or a typed key, for ``'one_sided'``; None for a seed from
      the operating system.
    method: ``'one_sided'`` or ``'zero'``.
    layout: See :func:`describe_pairs`.

  Returns:
    A tree like ``params`` with factors of the new ranks, in the same types.

  Raises:
    ValueError: If a rank is smaller than that of its module or larger than
      min(in, out), or a pattern matches none; for another method or key.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> new = lora.pad_rank(params, 2, 0)
    >>> new['lora_a'].shape, new['lora_b'].tolist()
    ((3, 2), [[1.0, 1.0], [0.0, 0.0]])
  """
  _validate.one_of('method', method, ('one_sided', 'zero'))
  ranks = _ranks(params, rank, layout)
  if method == 'one_sided':
    _randomness.check_key('prng_key', prng_key)
    key = _randomness.resolve_key('prng_key', prng_key, params)
    key = jax.random.fold_in(key, _NEW_COLUMNS)
  count = 0

  def change(module: _modules.Module, factors: Factors) -> Factors:
    nonlocal count
    count += 1
    new = ranks.get(module.name, module.rank)
    if not module.rank <= new <= min(module.m, module.n):
      raise ValueError(
        f'Expected {module.rank} <= rank <= {min(module.m, module.n)} for'
        f' {module.name!r}, got rank={new}. For a smaller one use'
        ' lora.truncate.'
      )
    more = new - module.rank
    left, right = (jnp.pad(x, ((0, 0), (0, 0), (0, more))) for x in factors)
    if method == 'zero' or not more:
      return Factors(left, right)
    columns = _orthogonal_columns(
      jax.random.fold_in(key, count), factors.right, more
    )
    return Factors(left, right.at[..., module.rank :].set(columns))

  return resized(params, layout, change)


def difference(
  params: Any, initial: Any, *, layout: _modules.LayoutLike = None
) -> Any:
  """Adapters of ``Z - Z_initial``, of twice the rank.

  ``left = [L, L_0]`` and ``right = [R, -R_0]``: what training changed, relative
  to the weights that ``initial`` was added to. After
  :func:`spectral_residual`, that is relative to the ORIGINAL weights, which is
  what adapters are exchanged as. Where twice the rank is more than min(in, out)
  it is that. :func:`truncate` makes it smaller.

  Privacy: post-processing, of two trees that are public or private already.

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    initial: A tree of the same structure and shapes: before the training.
    layout: See :func:`describe_pairs`; the same for both.

  Returns:
    A tree like ``params`` with factors of the new ranks. Leaves that are no
    factors are those of ``params``.

  Raises:
    ValueError: If the trees do not have the same structure and shapes.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> initial = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.full((1, 2), 0.25)}
    >>> new = lora.difference(params, initial)
    >>> print((new['lora_a'] @ new['lora_b'])[0])
    [0.75 0.75]
  """
  leaves, treedef = jax.tree.flatten(initial)
  expected: Any = jax.tree.structure(params)
  shapes = [jnp.shape(x) for x in jax.tree.leaves(params)]
  if treedef != expected or [jnp.shape(x) for x in leaves] != shapes:
    raise ValueError(
      'Expected initial to have the structure and shapes of params, got'
      f' {treedef} {[jnp.shape(x) for x in leaves]} for {expected} {shapes}.'
    )

  def change(module: _modules.Module, factors: Factors) -> Factors:
    old = read_factors(module, leaves)
    both = Factors(
      jnp.concatenate([factors.left, old.left], -1),
      jnp.concatenate([factors.right, -old.right], -1),
    )
    most = min(module.m, module.n)
    return fixed_rank.truncate(both, most) if 2 * module.rank > most else both

  return resized(params, layout, change)


# Between leaves and matrices, module by module.


def read_factors(module: _modules.Module, leaves: list[Any]) -> Factors:
  """(k, m, r) and (k, n, r), float32 at least and without the scale."""

  def matrices(i: int, axes: _modules.LeafAxes) -> jax.Array:
    leaf = jnp.asarray(leaves[i])
    leaf = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    return axes.matrix.to_matrices(axes.to_stack(leaf))

  return Factors(
    matrices(module.b, module.b_axes), matrices(module.a, module.a_axes)
  )


def write_factors(
  module: _modules.Module, leaves: list[Any], factors: Factors
) -> None:
  """Puts (k, m, s) and (k, n, s) into ``leaves``, in the types these have."""
  for i, axes, x in (
    (module.b, module.b_axes, factors.left),
    (module.a, module.a_axes, factors.right),
  ):
    shape = list(axes.shape)
    shape[axes.rank] = x.shape[-1]
    axes = axes._replace(shape=tuple(shape))
    leaf = axes.from_stack(axes.matrix.from_matrices(x))
    leaves[i] = leaf.astype(leaves[i].dtype)


def resized(
  params: Any,
  layout: _modules.LayoutLike,
  change: Callable[[_modules.Module, Factors], Factors],
) -> Any:
  """``change(module, factors)`` of every module, which may change the rank."""
  modules = _modules.find_modules(params, layout)
  leaves, treedef = jax.tree.flatten(params)
  for module in modules:
    new = change(module, read_factors(module, leaves))
    write_factors(module, leaves, new)
  return jax.tree.unflatten(treedef, leaves)


def _ranks(
  params: Any, rank: int | Mapping[str, int], layout: _modules.LayoutLike
) -> dict[str, int]:
  """The rank of every module that gets one."""
  names = [x.name for x in _modules.find_modules(params, layout)]
  patterns = rank if isinstance(rank, Mapping) else {'*': rank}
  for value in patterns.values():
    _validate.integer('rank', value, 1)
  unused = [p for p in patterns if not fnmatch.filter(names, p)]
  if unused:
    raise ValueError(
      f'rank patterns {unused} match no module; the modules are {names}.'
    )
  return {
    name: next(patterns[p] for p in patterns if fnmatch.fnmatch(name, p))
    for name in names
    if any(fnmatch.fnmatch(name, p) for p in patterns)
  }


def _orthogonal_columns(
  key: jax.Array, right: jax.Array, more: int
) -> jax.Array:
  """(k, n, more) random columns, orthogonal to those of ``right``."""
  shape = (*right.shape[:-1], more)
  drawn = jax.random.normal(key, shape, right.dtype)
  # Householder's Q of [right, drawn]: its last columns are orthogonal to all
  # that come before, also where those of `right` are dependent or zero.
  basis, _ = _linalg.qr(jnp.concatenate([right, drawn], -1))
  lengths = jnp.mean(_linalg.column_norms(right), -1)[:, None, None]
  return basis[..., -more:] * jnp.where(lengths > 0, lengths, 1)
