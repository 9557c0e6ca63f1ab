"""Clip and noise on the device, and the LoRA delta of what comes out."""

from typing import Any

import jax
import jax.numpy as jnp

from prism_optax import _randomness, _validate

# Rounding of the norm and of the product must not carry a clipped vector over
# the bound: sums of 400,000 squares in float32 were off by up to 1e-6.
_MARGIN = 1e-5


def privatize_hidden_states(
  hidden: jax.Array,
  prng_key: jax.Array,
  *,
  l2_clip_norm: float | jax.Array,
  stddev: float | jax.Array,
  mask: jax.Array | None = None,
  block_ndim: int = 1,
) -> jax.Array:
  """Clips each vector to a norm and adds Gaussian noise to it.

  Each vector along the last axis is one release: scaled down to
  ``l2_clip_norm`` (C) if it is longer, then noised on every coordinate. With
  ``block_ndim=2`` each (T, d) block is one release: one norm for all its
  tokens, which cost together what a single vector costs and share its signal.
  Arithmetic is in float32 (float64 for float64 states), whatever the type.

  ``h min(1, C / ||h||) + N(0, stddev^2 I)``, the Gaussian mechanism (exact
  privacy: Balle and Wang 2018, arXiv:1805.06530). How far apart two neighbours
  are depends on the relation, 2 C where one state stands in the place of
  another: :func:`hidden_state_sensitivity`, :func:`release_event`.

  The noise is drawn for every call: with the same key it would be the same, and
  subtract out.

  =============================  ==============================================
  coordinate with NaN or Inf     its vector (block) counts as zero
  norm that overflows            no norm does: it is clipped like any other
  zero vector                    noise alone
  masked vector                  zeros without noise, whatever stands there
  ``stddev=0.0``                 clips only: no privacy
  bfloat16 states                computed in float32, rounded behind the noise
  =============================  ==============================================

  The generator of JAX is not a cryptographic one, and sums of floating-point
  numbers have gaps that tell something about the summands. Where an adversary
  may look at the last bits, or the key's 64 bits of entropy are too few, use
  :func:`privatize_on_host`.

  Args:
    hidden: States, shape ``(..., d)``, or ``(..., T, d)`` with blocks; any
      floating type.
    prng_key: A key of ``jax.random``, secret and used once.
    l2_clip_norm: C, positive, in the unit of the states; may be traced.
    stddev: Of the noise on each coordinate, in the unit of the states (not of
      C): :func:`gaussian_stddev`. May be traced; 0.0 only clips.
    mask: Booleans, shape ``hidden.shape[:-1]``, True for vectors that are
      there. Others count for nothing and come out as zeros without noise: the
      mask is public.
    block_ndim: Number of trailing axes that are clipped together, 1 or more.

  Returns:
    States of the shape and type of ``hidden``; rounding to a narrow type comes
    after the noise.

  Raises:
    ValueError: If ``hidden`` is no floating array or has fewer axes than a
      block, the mask has another shape, the key is none, or a number that is
      known while tracing is out of its range.

  Examples:
    >>> import jax, jax.numpy as jnp
    >>> from prism_optax import inference
    >>> hidden = 170.0 * jnp.ones((2, 5, 16))
    >>> inference.privatize_hidden_states(
    ...   hidden, jax.random.key(0), l2_clip_norm=1.0, stddev=4.8
    ... ).shape
    (2, 5, 16)
  """
  _check_key(prng_key)
  dtype = jnp.promote_types(jnp.asarray(hidden).dtype, jnp.float32)
  clipped = clip(
    hidden, l2_clip_norm=l2_clip_norm, mask=mask, block_ndim=block_ndim
  )
  _validate.non_negative('stddev', stddev)
  noised = _randomness.add_normal(prng_key, clipped.astype(dtype), stddev)
  if mask is not None:
    noised = jnp.where(jnp.asarray(mask, bool)[..., None], noised, 0)
  return noised.astype(jnp.asarray(hidden).dtype)


def clip(
  hidden: jax.Array,
  *,
  l2_clip_norm: float | jax.Array,
  mask: jax.Array | None = None,
  block_ndim: int = 1,
) -> jax.Array:
  """Returns the states that the noise is added to, in float32 or wider."""
  hidden = jnp.asarray(hidden)
  if not jnp.issubdtype(hidden.dtype, jnp.floating):
    raise ValueError(
      f'Expected hidden to be a floating array, got {hidden.dtype=}.'
    )
  _validate.integer('block_ndim', block_ndim, 1)
  if hidden.ndim < block_ndim:
    raise ValueError(
      f'Expected hidden to have {block_ndim} axes or more, got {hidden.shape=}.'
    )
  _validate.positive('l2_clip_norm', l2_clip_norm)
  dtype = jnp.promote_types(hidden.dtype, jnp.float32)
  states = hidden.astype(dtype)
  if mask is not None:
    if jnp.shape(mask) != hidden.shape[:-1]:
      raise ValueError(
        f'Expected mask to have the shape {hidden.shape[:-1]}, got'
        f' {jnp.shape(mask)}.'
      )
    # Before anything else: what is not there must not make others infinite.
    states = jnp.where(jnp.asarray(mask, bool)[..., None], states, 0)
  axes = tuple(range(-block_ndim, 0))
  finite = jnp.all(jnp.isfinite(states), axis=axes, keepdims=True)
  states = jnp.where(finite, states, 0)
  # In units of the largest entry no square overflows. Both are scaled by a
  # power of two before: devices divide by multiplying with the reciprocal, and
  # take it for zero where it is below the smallest normal number.
  largest = jnp.max(jnp.abs(states), axis=axes, keepdims=True)
  tiny = largest < jnp.finfo(dtype).tiny * 2**10
  unit = jnp.where(tiny, 1, largest)
  direction = jnp.where(tiny, 0, states * 2**-8 / (unit * 2**-8))
  norm = jnp.sqrt(jnp.sum(jnp.square(direction), axis=axes, keepdims=True))
  bound = jnp.asarray(l2_clip_norm, dtype) * (1 - _MARGIN)
  return direction * jnp.minimum(unit, bound / jnp.maximum(norm, 1))


def lora_delta(
  hidden: jax.Array,
  left: jax.Array,
  right: jax.Array,
  *,
  scale: float | jax.Array = 1.0,
) -> jax.Array:
  """Returns what a LoRA module adds to a layer's output.

  Of privatised states it is post-processing and costs nothing more; where the
  layer itself is computed by a trusted party, the output is ``layer(hidden) +
  lora_delta(noised, ...)``.

  Args:
    hidden: States, shape ``(..., n)``.
    left: Output side, shape ``(m, r)``; the transpose of nnx's ``lora_b``.
    right: Input side, shape ``(n, r)``; nnx's ``lora_a``.
    scale: The module's LoRA scale, alpha / r.

  Returns:
    ``scale * hidden @ right @ left.T``, shape ``(..., m)``; the rank-r product
    first.

  Raises:
    ValueError: If the shapes do not fit.

  Examples:
    >>> import jax.numpy as jnp
    >>> from prism_optax import inference
    >>> left, right = jnp.ones((5, 2)), jnp.ones((7, 2))
    >>> inference.lora_delta(jnp.ones((4, 7)), left, right).shape
    (4, 5)
  """
  if jnp.ndim(left) != 2 or jnp.ndim(right) != 2:
    raise ValueError(
      'Expected left (m, r) and right (n, r), got'
      f' {jnp.shape(left)} and {jnp.shape(right)}.'
    )
  if jnp.shape(left)[1] != jnp.shape(right)[1]:
    raise ValueError(
      'Expected left (m, r) and right (n, r) of the same rank, got'
      f' {jnp.shape(left)} and {jnp.shape(right)}.'
    )
  if jnp.shape(hidden)[-1:] != jnp.shape(right)[:1]:
    raise ValueError(
      'Expected hidden (..., n) and right (n, r), got'
      f' {jnp.shape(hidden)} and {jnp.shape(right)}.'
    )
  _validate.real('scale', scale)
  return scale * ((hidden @ right) @ jnp.asarray(left).mT)


def _check_key(prng_key: Any) -> None:
  dtype = getattr(prng_key, 'dtype', None)
  typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
  # Flax still hands out keys of the old kind when it was given one.
  if (typed and not prng_key.shape) or (
    dtype == jnp.uint32 and len(prng_key.shape) == 1
  ):
    return
  raise ValueError(
    'Expected prng_key to be one key (jax.random.key), used for this call only,'
    f' got {type(prng_key).__name__} of dtype {dtype} and shape'
    f' {getattr(prng_key, "shape", None)}.'
  )
