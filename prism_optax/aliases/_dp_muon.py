"""DP-Muon: private momentum, orthogonalized matrix by matrix."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from prism_optax import _matrix_axes, _validate
from prism_optax._clip import Clip
from prism_optax._linalg._products import at_least_float32
from prism_optax._matrix_axes import DimensionNumbersLike, MatrixStack
from prism_optax._types import (
  ArrayTree,
  DTypeLike,
  PRNGKeyLike,
  Scalar,
  ScalarOrSchedule,
  StepsLike,
)
from prism_optax.muon._polynomials import Steps
from prism_optax.transforms import _matrix_clip, _privatizer
from prism_optax.transforms._declared import noised_elsewhere
from prism_optax.transforms._matrix_clip import NormsLike
from prism_optax.transforms._orthogonalize import orthogonalize


def _wide(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """Keeps the moments of bfloat16 parameters in the type of the updates."""

  def init_fn(params):
    return tx.init(jax.tree.map(at_least_float32, params))

  return optax.GradientTransformation(init_fn, tx.update)


def _in_units(
  units_of: Callable[[ArrayTree], ArrayTree],
  tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """``tx`` on leaves that are divided by their units, float32 at least."""
  tx = optax.with_extra_args_support(tx)

  def update_fn(updates, state, params=None, **extra_args):
    units = units_of(updates)
    scaled = jax.tree.map(lambda x, u: at_least_float32(x) / u, updates, units)
    out, state = tx.update(scaled, state, params, **extra_args)
    return jax.tree.map(jnp.multiply, out, units), state

  return optax.GradientTransformationExtraArgs(_wide(tx).init, update_fn)


def _consistent_rms(
  rms: float, matrices_of: Callable[[ArrayTree], list[MatrixStack | None]]
) -> optax.GradientTransformation:
  """Scales orthogonal matrices so that their entries are about ``rms``."""

  def scaled(x: jax.Array, matrices: MatrixStack | None) -> jax.Array:
    if matrices is None:
      return x
    return x * (rms * math.sqrt(max(matrices.sides)))

  return optax.stateless(
    lambda updates, params: _matrix_axes.with_leaves(
      updates, map(scaled, jax.tree.leaves(updates), matrices_of(updates))
    )
  )


def dp_muon(
  learning_rate: ScalarOrSchedule,
  *,
  l2_clip_norms: NormsLike,
  noise_multiplier: Scalar | None = None,
  expected_batch_size: Scalar,
  prng_key: PRNGKeyLike = None,
  momentum: Scalar = 0.95,
  degree: int = 2,
  ns_steps: Steps = 5,
  normalize: str = 'max1',
  noise_split: str = 'equal',
  weight_dimension_numbers: DimensionNumbersLike = None,
  per_example_gradients: bool = True,
  privatizer: optax.GradientTransformation | None = None,
  consistent_rms: float | None = None,
  matmul_dtype: DTypeLike | None = None,
  weight_decay: Scalar = 0.0,
  adam_learning_rate: ScalarOrSchedule | None = None,
  adam_b1: Scalar = 0.9,
  adam_b2: Scalar = 0.999,
  adam_eps: Scalar = 1e-8,
  steps: StepsLike = None,
) -> _matrix_clip.BoundedSensitivityTransformation:
  """DP-Muon (arXiv:2605.12994) for trees with matrices and other leaves.

  Every matrix W of every example's gradient is clipped to C_W, the sum is
  divided by the expected batch size B, noise ``N(0, (sigma_W C_W / B)^2)`` is
  added, and the step is ``-learning_rate`` times the orthogonalized heavy ball
  ``m <- momentum m + g``. Leaves that are no matrices are clipped together as
  one more group, noised likewise, and go to Adam. Clip and noise come before
  the two branches and cover every leaf.

  **Privacy.** Each update is one Gaussian mechanism of the JOINT
  ``noise_multiplier`` for add-or-remove-one neighbours. Give this number to an
  accountant (:func:`prism_optax.accounting.dpsgd_event`). The K groups are
  computed from the same batch, so their own multipliers are larger, ``sigma
  sqrt(K)`` in the equal split. In the source sigma belongs to a single matrix;
  if you account for all matrices with it, you understate epsilon. Everything
  after the noise is post-processing. Not covered: several updates and the
  sampling of batches, which the accountant composes; with ``privatizer``, noise
  of another size than the one you account for; with
  ``per_example_gradients=False``, a mean that was not clipped to the same
  thresholds.

  ==========================  =================================================
  batch of no examples        noise alone, of the same size as ever
  NaN or Inf in an example    the example counts as zero, in all groups
  ``noise_multiplier=0.0``    no noise and no privacy, for tests
  ``learning_rate=0.0``       zero updates; noise is drawn, privacy is spent
  ``momentum=0.0``            the noisy gradient itself is orthogonalized
  no leaf is a matrix         one clip group, and Adam for all
  bfloat16 parameters         clip, sum, noise and moments in float32
  ==========================  =================================================

  Args:
    learning_rate: A number or a schedule. It multiplies orthogonal directions,
      whose entries are about ``1 / sqrt(max(rows, columns))``.
    l2_clip_norms: C_W, the largest norm of one example's contribution to the
      sum: a number for every group, or a prefix tree of numbers.
    noise_multiplier: sigma of all groups together: the standard deviation of
      the noise per coordinate, in units in which all groups together have the
      clip norm one. Zero is allowed and gives no privacy.
    expected_batch_size: B, a public constant: sampling probability times the
      size of the data set, not the size of the batch at hand.
    prng_key: Key of the noise. None takes a seed from the operating system in
      ``init`` (outside of ``jit``), ``'chacha20'`` one for that generator. An
      int or a typed key makes noise that
      anybody who knows it can repeat. Call ``init`` once per privacy budget: a
      second call with the same key repeats the noise.
    momentum: beta of the heavy ball, in [0, 1).
    degree: Degree kappa of the Newton-Schulz polynomial.
    ns_steps: Number q of its steps, or the coefficients of each, from
      :func:`prism_optax.muon.minimax_coefficients`.
    normalize: ``'max1'``, ``'frobenius'`` or ``'none'``: see
      :func:`prism_optax.muon.newton_schulz`.
    noise_split: ``'equal'`` multipliers for all groups, or ``'least_energy'``:
      see :func:`prism_optax.transforms.split_noise_multiplier`.
    weight_dimension_numbers: ``None``: leaves with two axes are matrices. These
      include embedding tables and stacked biases, which are better left to
      Adam. Otherwise a tree of ``optax.contrib.MuonDimensionNumbers`` and
      ``None`` (for Adam), a prefix of the parameters, or a callable that makes
      one of these. Matrices stacked along batch axes are groups of their own.
    per_example_gradients: If False, ``update`` takes the clipped MEAN that
      ``jax_privacy.clipped_grad`` makes as shown below.
    privatizer: Replaces ``noise_multiplier``: a privatizer in the manner of
      optax. It gets the mean in units in which all groups together have the
      clip norm one, so its stddev is sigma / expected_batch_size.
    consistent_rms: A number multiplies the directions of matrices by itself
      times ``sqrt(max(rows, columns))``, so that their entries have this size
      whatever the shape (0.2 is like Adam's).
    matmul_dtype: Type of the factors of the products in the orthogonalization.
    weight_decay: Decoupled weight decay of all leaves; it is multiplied by the
      learning rate.
    adam_learning_rate: Learning rate of the other leaves; ``learning_rate`` if
      None.
    adam_b1: Adam's decay of the first moment.
    adam_b2: Adam's decay of the second moment.
    adam_eps: Adam's constant under the fraction.
    steps: The number of updates that were accounted for. Beyond it nothing is
      released: an update raises where the step count is known, and under
      ``jit`` the noisy mean is zero. A ``privatizer`` needs it, or
      ``'unlimited'``: see :func:`prism_optax.tangent_privatizer`.

  Returns:
    A transformation with ``update(per_example_grads, state, params,
    is_padding_example=None)``, leaves ``(B, *shape)`` in and ``(*shape)`` out,
    float32 at least. ``.sensitivity(neighboring_relation, params=params)`` is
    the sensitivity of the clipped mean of all groups together, and
    ``.pre_clipping_transform`` the term of one example in that mean, clipped
    and divided by B. With both, clip and divisor fit the noise::

      jax_privacy.clipped_grad(
        loss, l2_clip_norm=tx.sensitivity(params=params),
        pre_clipping_transform=tx.pre_clipping_transform)

    Leave out ``normalize_by``: it would divide a second time, which weakens the
    signal and costs no privacy.

  Raises:
    ValueError: For an option that is not allowed; unless exactly one of
      ``noise_multiplier`` and ``privatizer`` is given; in ``init`` if it is
      traced with ``prng_key=None``; in ``update`` without ``params`` or if the
      gradients do not fit.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> params = {'w': jnp.zeros((3, 4)), 'bias': jnp.zeros(4)}
    >>> tx = prism_optax.dp_muon(
    ...   0.1, l2_clip_norms=1.0, noise_multiplier=1.0, expected_batch_size=8)
    >>> grads = {'w': jnp.ones((6, 3, 4)), 'bias': jnp.ones((6, 4))}
    >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    >>> updates['w'].shape, updates['bias'].shape
    ((3, 4), (4,))
  """
  last = _privatizer.check_source(
    'noise_multiplier', noise_multiplier, prng_key, privatizer, steps
  )
  _validate.positive('expected_batch_size', expected_batch_size)
  _validate.decay_rate('momentum', momentum)
  _validate.one_of('noise_split', noise_split, _matrix_clip.NOISE_SPLITS)
  _validate.non_negative('weight_decay', weight_decay)
  if consistent_rms is not None:
    _validate.positive('consistent_rms', consistent_rms)

  matrices_of = functools.partial(
    _matrix_axes.resolve, weight_dimension_numbers
  )

  def labels_of(tree):
    labels = ['other' if m is None else 'matrix' for m in matrices_of(tree)]
    return _matrix_axes.with_leaves(tree, labels)

  def units_of(tree):
    """Each leaf's ``sigma_W C_W / sigma``: its noise in units of the whole."""
    groups = _matrix_clip.clip_groups(
      l2_clip_norms, tree, weight_dimension_numbers
    )
    units = _matrix_clip.noise_units(
      groups, len(jax.tree.leaves(tree)), noise_split=noise_split
    )
    return _matrix_axes.with_leaves(tree, units)

  clip = _matrix_clip.per_matrix_clip(
    l2_clip_norms,
    normalize_by=expected_batch_size,
    weight_dimension_numbers=weight_dimension_numbers,
  )
  parts: list[optax.GradientTransformation] = []
  if privatizer is not None:
    parts += [clip] * per_example_gradients
    noise = _privatizer.limited(noised_elsewhere(privatizer), last)
    parts.append(_in_units(units_of, noise))
  else:
    assert noise_multiplier is not None  # As `check_source` has seen.
    stddev = noise_multiplier / expected_batch_size

    def stddevs_of(params):
      return [stddev * unit for unit in jax.tree.leaves(units_of(params))]

    rule = _matrix_clip.EachMatrix(l2_clip_norms, weight_dimension_numbers)
    sums = Clip(rule, normalize_by=expected_batch_size)
    parts = [
      # Its sum, for the noise to take it on its lattice.
      _matrix_clip.dense_clip('per_matrix_clip', sums)
      if per_example_gradients
      else optax.stateless(lambda x, _: jax.tree.map(at_least_float32, x)),
      _privatizer.gaussian(stddevs_of, prng_key, last),
    ]
  branches = {
    'matrix': optax.trace(momentum),
    'other': optax.scale_by_adam(b1=adam_b1, b2=adam_b2, eps=adam_eps),
  }
  rate = optax.scale_by_learning_rate(learning_rate)
  if adam_learning_rate is not None:
    other = optax.scale_by_learning_rate(adam_learning_rate)
    rate = optax.partition({'matrix': rate, 'other': other}, labels_of)
  parts += [
    _wide(optax.partition(branches, labels_of)),
    # On the whole tree: the noise of a leaf depends on how many groups it has.
    orthogonalize(
      degree=degree,
      steps=ns_steps,
      normalize=normalize,
      weight_dimension_numbers=weight_dimension_numbers,
      matmul_dtype=matmul_dtype,
    ),
    optax.add_decayed_weights(weight_decay),
    rate,
  ]
  if consistent_rms is not None:
    parts.insert(-2, _consistent_rms(consistent_rms, matrices_of))
  chained = optax.with_extra_args_support(optax.chain(*parts))
  return _matrix_clip.BoundedSensitivityTransformation(
    chained.init,
    chained.update,
    clip.sensitivity,
    clip.pre_clipping_transform,
  )
