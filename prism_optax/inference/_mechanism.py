"""Clip and noise on the device, and the LoRA delta of what comes out."""

from types import ModuleType
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from prism_optax import _clip, _lattice, _validate

# Vectors are clipped to C (1 - 1e-5): rounding of the norm and of the product
# must not carry them over C. Sums of 400,000 squares in float32 were off by up
# to 1e-6. Float64 would need less; one rule for all is worth more.
_MARGIN = 1e-5

Array = TypeVar('Array', jax.Array, np.ndarray)


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
  tokens. Together they cost as much as a single vector, and share its signal.
  Arithmetic is in float32 (float64 for float64 states), whatever the type.

  **Privacy.** Each vector (block) is released by the Gaussian mechanism, ``h
  min(1, C / ||h||) + N(0, stddev^2 I)``, whose exact privacy is known (Balle
  and Wang 2018, arXiv:1805.06530). C and ``stddev`` are in the unit of the
  states, ``stddev`` per coordinate. How far apart two neighbours are depends on
  the relation: 2 C where one state replaces another, C where a state replaces
  the zero vector (:func:`hidden_state_sensitivity`). T vectors are T releases
  (:func:`release_event`). State and noise are integers, in steps of about a
  millionth of the noise, so low bits reveal nothing. Not covered are the number
  of vectors, the mask, and a second use of the key (the difference of two
  states with the same noise has none). The generator, Threefry, is not
  cryptographic; if that matters, use :func:`privatize_on_host`.

  =============================  ==============================================
  coordinate with NaN or Inf     its vector (block) counts as zero
  norm that overflows            no norm does: it is clipped like any other
  zero vector                    noise alone
  masked vector                  zeros without noise, whatever stands there
  ``stddev=0.0``                 clips only: no privacy
  bfloat16 states                computed in float32, rounded after the noise
  =============================  ==============================================

  Args:
    hidden: States, shape ``(..., d)``, or ``(..., T, d)`` with blocks; any
      floating type.
    prng_key: A key of ``jax.random``, secret and used once.
    l2_clip_norm: C, positive, in the unit of the states; may be traced.
    stddev: Standard deviation of the noise on each coordinate, in the unit of
      the states (not of C): :func:`gaussian_stddev`. May be traced; 0.0 only
      clips.
    mask: Booleans, shape ``hidden.shape[:-1]``, True for vectors that are
      present. Others count for nothing and come out as zeros without noise: the
      mask is public.
    block_ndim: Number of trailing axes that are clipped together, 1 or more.

  Returns:
    States of the shape and type of ``hidden``; rounding to a narrow type comes
    after the noise.

  Raises:
    ValueError: If ``hidden`` is not a floating array or has fewer axes than a
      block, the mask has another shape, ``prng_key`` is not a key, or a number
      that is known while tracing is out of its range.

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
  hidden = jnp.asarray(hidden)
  if not jnp.issubdtype(hidden.dtype, jnp.floating):
    raise ValueError(
      f'Expected hidden to be a floating array, got {hidden.dtype=}.'
    )
  clipped = clip(hidden, l2_clip_norm, mask, block_ndim)
  _validate.non_negative('stddev', stddev)
  noised: jax.Array = _lattice.add_noise(prng_key, clipped, stddev)
  if mask is not None:
    noised = jnp.where(jnp.asarray(mask, bool)[..., None], noised, 0)
  return noised.astype(hidden.dtype)


def clip(
  states: Array,
  l2_clip_norm: float | Array,
  mask: npt.ArrayLike | None,
  block_ndim: int,
) -> Array:
  """Returns the states that the noise is added to.

  The only clip of hidden states: on the device, on the host and in measures.

  Args:
    states: Floating array, of any size; NumPy's are computed by NumPy.
    l2_clip_norm: C, the bound that no result exceeds.
    mask: True for vectors that are there, shape ``states.shape[:-1]``.
    block_ndim: Number of trailing axes that are clipped together.

  Returns:
    Finite states of the same shape, in float32 or wider.
  """
  xp: ModuleType = np if isinstance(states, np.ndarray) else jnp
  _validate.integer('block_ndim', block_ndim, 1)
  if states.ndim < block_ndim:
    raise ValueError(
      f'Expected hidden to have {block_ndim} axes or more, got {states.shape=}.'
    )
  _validate.positive('l2_clip_norm', l2_clip_norm)
  if mask is not None:
    if xp.shape(mask) != states.shape[:-1]:
      raise ValueError(
        f'Expected mask to have the shape {states.shape[:-1]}, got'
        f' {xp.shape(mask)}.'
      )
    # Before anything else: what is not there must not make others infinite.
    states = xp.where(xp.asarray(mask, bool)[..., None], states, 0)
  # The margin is for float32: sums in a narrower type are off by more.
  states = states.astype(xp.promote_types(states.dtype, xp.float32))
  axes = tuple(range(-block_ndim, 0))
  finite = xp.all(xp.isfinite(states), axis=axes, keepdims=True)
  states = xp.where(finite, states, 0)
  # In units of the largest entry no square overflows. Both are scaled by a
  # power of two before: devices divide by multiplying with the reciprocal, and
  # take it for zero where it is below the smallest normal number. The power
  # depends on the data, or compilers would cancel it.
  largest = xp.max(xp.abs(states), axis=axes, keepdims=True, initial=0)
  unit = xp.where(largest < xp.finfo(states.dtype).tiny, 1, largest)
  power = xp.where(unit > 1, 2.0**-64, 2.0**64).astype(states.dtype)
  direction = states * power / (unit * power)
  squares = xp.square(direction)
  if xp is np:  # Which adds in pairs.
    total = np.sum(squares, axis=axes)
  else:
    total = _clip.summed(squares, [squares.ndim + a for a in axes])
  norm = xp.sqrt(xp.expand_dims(total, axes))
  bound = xp.asarray(l2_clip_norm, states.dtype) * (1 - _MARGIN)
  clipped: Array = direction * xp.minimum(unit, bound / xp.maximum(norm, 1))
  return clipped


def lora_delta(
  hidden: jax.Array,
  left: jax.Array,
  right: jax.Array,
  *,
  scale: float | jax.Array = 1.0,
) -> jax.Array:
  """Returns the term that a LoRA module adds to a layer's output.

  Applied to privatised states this is post-processing and costs nothing more;
  if a trusted party computes the layer itself, the output is ``layer(hidden) +
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
  check_factors(left, right, hidden)
  return scale * ((hidden @ right) @ jnp.asarray(left).mT)


def check_factors(
  left: jax.Array | np.ndarray,
  right: jax.Array | np.ndarray,
  hidden: jax.Array | np.ndarray | None = None,
) -> None:
  """Raises ``ValueError`` unless factors, and states if given, fit together."""
  m_r, n_r = np.shape(left), np.shape(right)
  h_n = n_r[:1] if hidden is None else np.shape(hidden)
  fit = len(m_r) == len(n_r) == 2 and m_r[1] == n_r[1] and h_n[-1:] == n_r[:1]
  if not fit:
    raise ValueError(
      'Expected left (m, r), right (n, r) and hidden (..., n), got'
      f' {m_r}, {n_r} and {h_n}.'
    )


def _check_key(prng_key: jax.Array) -> None:
  try:
    # Flax still hands out keys of the old kind when it was given one.
    one = jax.random.key_data(prng_key).ndim == 1
  except (TypeError, ValueError):
    one = False
  if not one:
    raise ValueError(
      'Expected prng_key to be one key (jax.random.key), used for this call'
      f' only, got {type(prng_key).__name__} of shape {np.shape(prng_key)}.'
    )
