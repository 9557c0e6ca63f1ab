"""The transformation that orthogonalizes the matrices of a tree of updates."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax import _matrix_axes, _randomness, _validate, muon
from prism_optax._linalg import at_least_float32
from prism_optax._matrix_axes import DimensionNumbersLike
from prism_optax._types import ArrayTree, DTypeLike, PRNGKeyLike, Scalar
from prism_optax.muon._polynomials import Steps, check_options

Function = Callable[[jax.Array], jax.Array]


class BiasCorrection(NamedTuple):
  """What :func:`orthogonalize` must know to subtract the bias of the noise.

  Attributes:
    noise_stddev: Standard deviation per coordinate of the fresh, independent
      Gaussian noise in each step's gradient, before the momentum: a number, a
      prefix tree of numbers, or a callable from the updates to such a tree.
    momentum: beta of the heavy ball ``m <- beta m + g`` in front of
      :func:`orthogonalize`; 0.0 if there is none.
    prng_key: Key of the probes. None takes a seed from the operating system in
      ``init``; otherwise an int or a typed key. The probes may be public, but
      must be independent of the noise: never pass the key of the noise.
    num_probes: Number of antithetic pairs of probes at each step.
  """

  noise_stddev: Scalar | ArrayTree | Callable[[ArrayTree], ArrayTree]
  momentum: Scalar
  prng_key: PRNGKeyLike = None
  num_probes: int = 1


class OrthogonalizeState(NamedTuple):
  """State of :func:`orthogonalize` with a bias correction.

  Attributes:
    count: Updates so far, shape (), int32.
    prng_key: Typed key of the probes, shape (); split once per update.
  """

  count: jax.Array  # type: ignore[assignment]  # As in optax's states.
  prng_key: jax.Array


def noise_variance(
  noise_stddev: Scalar, momentum: Scalar, count: Scalar
) -> jax.Array:
  """Variance of the noise in a heavy ball after ``count`` steps.

  It is ``s^2 (1 - beta^(2t)) / (1 - beta^2)``, the sum of ``s^2 beta^(2j)``.
  """
  decay = jnp.square(momentum)
  return jnp.square(noise_stddev) * (1 - decay**count) / (1 - decay)


def _check_correction(correction: BiasCorrection) -> None:
  if not isinstance(correction, BiasCorrection):
    raise ValueError(
      f'Expected a BiasCorrection or None, got bias_correction={correction!r}.'
    )
  _validate.decay_rate('bias_correction.momentum', correction.momentum)
  _validate.integer('num_probes', correction.num_probes, 1)
  _randomness.check_key('bias_correction.prng_key', correction.prng_key)
  if not callable(correction.noise_stddev):
    for stddev in jax.tree.leaves(correction.noise_stddev):
      _validate.non_negative('bias_correction.noise_stddev', stddev)


def _corrected(
  function: Function,
  correction: BiasCorrection,
  updates: ArrayTree,
  count: jax.Array,
  probe_key: jax.Array,
) -> list[Function]:
  """For each leaf the function less its bias by the noise after ``count``."""
  stddevs = correction.noise_stddev
  if callable(stddevs):
    stddevs = stddevs(updates)
  stddevs = _matrix_axes.broadcast('noise_stddev', stddevs, updates)
  keys = jax.random.split(probe_key, len(stddevs))
  return [
    functools.partial(
      muon.subtract_bias,
      function,
      noise_stddev=jnp.sqrt(noise_variance(s, correction.momentum, count)),
      prng_key=key,
      num_probes=correction.num_probes,
    )
    for s, key in zip(stddevs, keys, strict=True)
  ]


def orthogonalize(
  *,
  degree: int = 2,
  steps: Steps = 5,
  normalize: str = 'max1',
  bias_correction: BiasCorrection | None = None,
  weight_dimension_numbers: DimensionNumbersLike = None,
  matmul_dtype: DTypeLike | None = None,
) -> optax.GradientTransformation:
  """Orthogonalizes the matrices of the updates by Newton-Schulz steps.

  Between ``optax.trace(beta)``, the heavy ball, and the learning rate it makes
  Muon with the iteration of DP-Muon (arXiv:2605.12994). The singular vectors of
  a matrix stay and its singular values move towards 1, see
  :mod:`prism_optax.muon`.

  **Privacy.** Behind the noise it is post-processing and costs nothing. It
  gives no privacy by itself: before the noise its output has no sensitivity
  that is known here.

  ==========================  =================================================
  zero matrix                 stays zero
  matrix of norm below one    keeps its size with ``'max1'``
  NaN or Inf in a matrix      this matrix is not finite, others are not affected
  ``noise_stddev=0.0``        the bias correction subtracts nothing
  bfloat16 updates            computed in float32, returned in bfloat16
  ==========================  =================================================

  Args:
    degree: Degree kappa of the polynomial, a Python int.
    steps: Number q of steps, a Python int, or the coefficients of each, from
      :func:`prism_optax.muon.minimax_coefficients`.
    normalize: ``'max1'`` (the source), ``'frobenius'`` (optax's Muon) or
      ``'none'``: see :func:`prism_optax.muon.newton_schulz`.
    bias_correction: ``None`` for no correction, or the numbers that
      :func:`prism_optax.muon.subtract_bias` needs. This library's own estimator
      lowers the bias that noise in the momentum gives to a nonlinear function
      of it, raises the variance, and multiplies the time by
      ``2 num_probes + 1``.
    weight_dimension_numbers: Which leaves are matrices, see
      :func:`per_matrix_clip`; with ``None`` those of two axes are. Batch axes
      stack matrices. All other leaves pass unchanged.
    matmul_dtype: Type of the factors of the products, for instance
      ``jnp.bfloat16``; sums stay in float32.

  Returns:
    A transformation that keeps shapes and types. Without a bias correction
    its state is empty.

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
  if bias_correction is not None:
    _check_correction(bias_correction)
  function: Function = functools.partial(
    muon.newton_schulz,
    degree=degree,
    steps=steps,
    normalize=normalize,
    matmul_dtype=matmul_dtype,
  )

  matrices_of = functools.partial(
    _matrix_axes.resolve, weight_dimension_numbers
  )

  def init_fn(params):
    matrices_of(params)  # What does not fit shall fail here, not in training.
    if bias_correction is None:
      return optax.EmptyState()
    key = _randomness.resolve_key(
      'bias_correction.prng_key', bias_correction.prng_key, params
    )
    return OrthogonalizeState(jnp.zeros((), jnp.int32), key)

  def update_fn(updates, state, params=None):
    del params
    leaves = jax.tree.leaves(updates)
    functions = [function] * len(leaves)
    if bias_correction is not None:
      next_key, probe_key = jax.random.split(state.prng_key)
      state = OrthogonalizeState(optax.safe_increment(state.count), next_key)
      functions = _corrected(
        function, bias_correction, updates, state.count, probe_key
      )

    def direction(x, matrices, fn):
      if matrices is None:
        return x
      out = fn(at_least_float32(matrices.to_matrices(x)))
      return matrices.from_matrices(out.astype(x.dtype))

    directions = map(direction, leaves, matrices_of(updates), functions)
    return _matrix_axes.with_leaves(updates, directions), state

  return optax.GradientTransformation(init_fn, update_fn)
