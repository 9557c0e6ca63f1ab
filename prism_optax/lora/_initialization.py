"""Factors to start training from: random, spectral, or in another gauge.

None of it reads private data: it is made of random numbers and of pretrained
weights, and what it returns is as public as those weights are. Its key need not
be secret, and must not be the key of any noise.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _modules, _validate
from prism_optax._linalg import _products
from prism_optax._linalg._products import at_least_float32, gram, matmul
from prism_optax._matrix_axes import with_leaves
from prism_optax._modules import LayoutLike, Module
from prism_optax._randomness import _keys
from prism_optax._types import Array, DTypeLike, PRNGKeyLike
from prism_optax.fixed_rank import Factors, _points
from prism_optax.lora import _merging

# Relative to the largest singular value: below it is rounding of float64.
_TINY = 64 * np.finfo(np.float64).eps
# What a key is for, also where the key of the noise was passed: far from the
# small numbers that it is split into elsewhere.
_FACTORS, _SKETCH = int.from_bytes(b'FACT'), int.from_bytes(b'SKET')
# Columns of a random sketch beyond the rank.
_OVERSAMPLING = 8


def initialize(
  params: optax.Params,
  prng_key: PRNGKeyLike,
  *,
  method: str = 'one_sided',
  size: float | None = None,
  layout: LayoutLike = None,
) -> optax.Params:
  """New factors for all LoRA pairs of a tree.

  =============  =============================================================
  one_sided      ``left`` is zero, ``right`` has orthonormal columns times
                 ``size``. Z is zero, the model is the pretrained one. The first
                 private step is one-sided: all of it goes to ``left``
  balanced       Z has r equal singular values ``size`` and random singular
                 vectors, and both factors have their roots: full rank from the
                 first step on, as noise that is correlated over steps needs it.
                 The model changes; with one factor negated :func:`merge` takes
                 Z out of its weights
  =============  =============================================================

  Both methods give orthogonal columns, the gauge in which frames are exact.
  Factors from a library's own initialisation work as well. One zero factor is
  LoRA's own start; orthonormal columns and ``'balanced'`` are ours. No data is
  read.

  Args:
    params: Tree of trainable arrays with LoRA pairs; only names, shapes and
      types are read. Other leaves pass.
    prng_key: An int or a typed key, another one than the key of the noise; None
      for a fresh one.
    method: ``'one_sided'`` or ``'balanced'``, see the table.
    size: For ``'one_sided'`` the length of the columns of ``right``, 1 if None.
      For ``'balanced'`` the singular values of ``Z = scale * left @ right.mT``,
      which you must give. They should be small beside the singular values of
      the weights, which Z changes.
    layout: See :func:`describe_pairs`.

  Returns:
    A tree like ``params``, same shapes and types.

  Raises:
    ValueError: For another method or key, a ``size`` that is not positive, or
      if no pair is found.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'lora_a': jnp.ones((4, 2)), 'lora_b': jnp.ones((2, 3))}
    >>> new = lora.initialize(params, 0, method='balanced', size=0.5)
    >>> jnp.linalg.svd(new['lora_a'] @ new['lora_b'])[1].round(4).tolist()
    [0.5, 0.5, 0.0]
  """
  _validate.one_of('method', method, ('one_sided', 'balanced'))
  if size is None and method == 'one_sided':
    size = 1.0
  size = _validate.known_positive('size', size)
  key = _keys.resolve_key('prng_key', prng_key, params)
  key = jax.random.fold_in(key, _FACTORS)
  index = itertools.count()

  def drawn(module: Module, old: Factors) -> Factors:
    keys = jax.random.split(jax.random.fold_in(key, next(index)))
    right = orthonormal(keys[0], old.right.shape, old.right.dtype)
    if method == 'one_sided':
      return Factors(jnp.zeros_like(old.left), size * right)
    root = (size / module.scale) ** 0.5
    left = orthonormal(keys[1], old.left.shape, old.left.dtype)
    return Factors(root * left, root * right)

  return _modules.map_factors(drawn, params, layout)


def spectral_residual(
  params: optax.Params,
  weights: optax.Params,
  prng_key: PRNGKeyLike,
  *,
  power_iterations: int = 4,
  kernels: _merging.KernelsLike = None,
  layout: LayoutLike = None,
) -> tuple[optax.Params, optax.Params]:
  """The largest singular directions of the weights become the adapters.

  ``Z = W_r``, the best approximation of ``W`` of rank r, in the balanced SVD
  gauge, and ``W - Z`` stays frozen (PiSSA, Meng et al. 2024,
  arXiv:2404.02948). The model is the same up to one rounding of the frozen
  weights to their type. ``W_r`` is found by a randomised range finder with
  power iterations (Halko et al. 2011, arXiv:0909.4061, Algorithms 4.4 and 5.1),
  in float32, without an SVD of W.

  To exchange the result, ``difference(trained, params)`` is an adapter of rank
  2r relative to the ORIGINAL weights; or :func:`merge` it with the weights
  returned here. The factors alone are of no use to others, who do not have your
  frozen weights.

  Privacy: this reads the pretrained weights and no data.

  Args:
    params: Tree of trainable arrays with LoRA pairs; only names, shapes and
      types are read. Other leaves pass.
    weights: Tree with the frozen weights; see :func:`merge`.
    prng_key: An int or a typed key, another one than the key of the noise; None
      for a fresh one.
    power_iterations: Products with ``W W^T``; each makes the error smaller.
    kernels: See :func:`merge`.
    layout: See :func:`describe_pairs`. Its scale counts: ``scale * left @
      right.mT`` is ``W_r``.

  Returns:
    ``(params, weights)``, trees like those that came in.

  Raises:
    ValueError: If a weight is not found, is not the only candidate, or does not
      fit; for another key, or negative numbers.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'q': {'lora_a': jnp.ones((4, 1)), 'lora_b': jnp.ones((1, 3))}}
    >>> weights = {'q': {'kernel': jnp.eye(4, 3) * jnp.array([3.0, 1.0, 1.0])}}
    >>> new, frozen = lora.spectral_residual(params, weights, 0)
    >>> z = new['q']['lora_a'] @ new['q']['lora_b']
    >>> bool(jnp.allclose(z[0], jnp.array([3.0, 0.0, 0.0]), atol=1e-5))
    True
    >>> bool(jnp.allclose(z + frozen['q']['kernel'], weights['q']['kernel']))
    True
  """
  _validate.integer('power_iterations', power_iterations, 0)
  key = _keys.resolve_key('prng_key', prng_key, params)
  key = jax.random.fold_in(key, _SKETCH)
  modules = _modules.find_modules(params, layout)
  adapters, leaves = jax.tree.leaves(params), jax.tree.leaves(weights)
  for i, place in enumerate(_merging.find_kernels(modules, weights, kernels)):
    module = place.module
    matrices = place.read(leaves)
    sketch = jax.random.fold_in(key, i)
    found = _largest(matrices, sketch, module.rank, power_iterations)
    root = module.scale**-0.5
    module.write(adapters, jax.tree.map(lambda x, c=root: c * x, found))
    # Of the factors as they are stored, so that their rounding is no change.
    left, right = module.read(adapters, at_least_float32)
    place.write(leaves, matrices - module.scale * matmul(left, right.mT))
  return with_leaves(params, adapters), with_leaves(weights, leaves)


def canonicalize(
  params: optax.Params, *, layout: LayoutLike = None
) -> optax.Params:
  """The same matrices Z from factors in the balanced SVD gauge.

  ``left = U s^1/2`` and ``right = V s^1/2`` have orthogonal columns: in this
  gauge frames are exact at any condition number. Training keeps the gauge by
  itself; factors that come from elsewhere may be in any gauge. The function
  computes in float64 on the host, whatever ``jax_enable_x64`` says. The method
  is ours. It reads parameters and no data, so it is post-processing.

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
    layout: See :func:`describe_pairs`.

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
  if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(params)):
    raise ValueError(
      'lora.canonicalize works on values: call it outside of jit, got traced'
      ' params.'
    )

  def placed(x: Array, old: Array) -> Array:
    if not isinstance(old, jax.Array):
      return x
    # Bound to a device only if it was: what is bound and what is not are two
    # programs, so that a step would be compiled twice.
    bound: jax.Array = jax.device_put(
      x, old.sharding if old.committed else None
    )
    return bound

  # NumPy: float64 without a global switch.
  double = functools.partial(np.asarray, dtype=np.float64)
  new = _modules.map_factors(
    lambda _, factors: _balance(*factors), params, layout, double
  )
  return jax.tree.map(placed, new, params)


@functools.partial(jax.jit, static_argnums=(1, 2))
def orthonormal(
  key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike
) -> jax.Array:
  """(k, m, r) with orthonormal columns, uniformly distributed."""
  q, r = _products.qr(jax.random.normal(key, shape, dtype))
  diagonal = jnp.diagonal(r, axis1=-2, axis2=-1)
  return q * jnp.where(diagonal < 0, -1, 1)[:, None, :]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _largest(
  w: jax.Array, key: jax.Array, rank: int, power_iterations: int
) -> Factors:
  """Balanced factors of the best approximation of (k, m, n) matrices."""
  columns = min(rank + _OVERSAMPLING, *w.shape[1:])
  basis = jax.random.normal(key, (w.shape[0], w.shape[2], columns), w.dtype)
  for _ in range(power_iterations):
    # Orthonormal after each product: powers would lose the small directions.
    basis, _ = _products.qr(matmul(w, basis))
    basis, _ = _products.qr(gram(w, basis))
  basis, _ = _products.qr(matmul(w, basis))
  # W = basis (W^T basis)^T on the range found.
  return _points.nearest_of_rank(Factors(basis, gram(w, basis)), rank)


@np.vectorize(signature='(m,r),(n,r)->(m,r),(n,r)')
def _balance(
  left: np.ndarray, right: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  """One pair (m, r), (n, r) -> the same product in the balanced SVD gauge."""
  q_left, c_left = np.linalg.qr(left)
  q_right, c_right = np.linalg.qr(right)
  u, s, vt = np.linalg.svd(c_left @ c_right.T)
  root = np.sqrt(np.where(s > _TINY * s[0], s, 0))
  new_left, new_right = u * root, vt.T * root
  kept = np.count_nonzero(root)
  if kept < len(s):
    # Of the factor of higher rank (ties: the right one): what it has outside.
    old, basis, new = max(
      (c_right, vt.T[:, :kept], new_right),
      (c_left, u[:, :kept], new_left),
      key=lambda side: np.linalg.matrix_rank(side[0], rtol=_TINY),
    )
    directions, lengths, _ = np.linalg.svd(old - basis @ (basis.T @ old))
    # Rounding errors are no directions: they would pass for observable ones.
    lengths[lengths <= _TINY * np.linalg.norm(old)] = 0
    new[:, kept:] = (directions * lengths)[:, : len(s) - kept]
  return q_left @ new_left, q_right @ new_right
