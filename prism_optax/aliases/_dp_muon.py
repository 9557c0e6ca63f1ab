"""DP-Muon: private momentum, orthogonalized matrix by matrix."""

import math
from typing import Any, NamedTuple

import jax
import optax

from prism_optax import _matrix_axes, _per_example, _randomness, _validate
from prism_optax._linalg import at_least_float32
from prism_optax.transforms import (
  BiasCorrection,
  clip_groups,
  orthogonalize,
  per_matrix_clip,
)
from prism_optax.transforms._clip_groups import (
  NOISE_SPLITS,
  noise_units,
)

# Far from the two numbers that `split` consumes: a key of its own.
_PROBES = 0x50524F42


class GroupNoiseState(NamedTuple):
  """State of the Gaussian noise of :func:`dp_muon`.

  Attributes:
    prng_key: Typed key, shape (); split once per update. Secret.
  """

  prng_key: jax.Array


def _noise(stddevs_of: Any, prng_key: Any) -> optax.GradientTransformation:
  """Adds Gaussian noise of a standard deviation for each leaf."""

  def init_fn(params):
    return GroupNoiseState(
      _randomness.resolve_key('prng_key', prng_key, params)
    )

  def update_fn(updates, state, params=None):
    del params
    leaves, treedef = jax.tree.flatten(updates)
    next_key, key = jax.random.split(state.prng_key)
    leaves = [at_least_float32(x) for x in leaves]
    out = _randomness.add_normal(key, leaves, stddevs_of(updates))
    return jax.tree.unflatten(treedef, out), GroupNoiseState(next_key)

  return optax.GradientTransformation(init_fn, update_fn)


def _probe_key(prng_key: Any) -> Any:
  """A key for public probes, independent of all the noise key will give."""
  if prng_key is None:
    return None  # The operating system's entropy, once more.
  key = _randomness.resolve_key('prng_key', prng_key, ())
  return jax.random.fold_in(key, _PROBES)


def _at_least_float32(
  tx: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Keeps the moments of bfloat16 parameters in the type of the updates."""

  def init_fn(params):
    return tx.init(jax.tree.map(at_least_float32, params))

  return optax.GradientTransformation(init_fn, tx.update)


def _larger_sides(weight_dimension_numbers: Any, tree: Any) -> list[int | None]:
  """max(rows, columns) of every matrix, None for other leaves."""
  return [
    None if spec is None else max(_matrix_axes.sides(x.shape, spec))
    for x, spec in zip(
      jax.tree.leaves(tree),
      _matrix_axes.resolve(weight_dimension_numbers, tree),
      strict=True,
    )
  ]


def _scale_leaves(factors_of: Any) -> optax.GradientTransformation:
  return optax.stateless(
    lambda updates, params: jax.tree.unflatten(
      jax.tree.structure(updates),
      [
        x * f
        for x, f in zip(
          jax.tree.leaves(updates), factors_of(updates), strict=True
        )
      ],
    )
  )


def dp_muon(
  learning_rate: Any,
  *,
  l2_clip_norms: Any,
  noise_multiplier: Any = None,
  expected_batch_size: Any,
  prng_key: Any = None,
  momentum: Any = 0.95,
  degree: int = 2,
  steps: int = 5,
  normalize: str = 'max1',
  noise_split: str = 'equal',
  weight_dimension_numbers: Any = None,
  per_example_gradients: bool = True,
  privatizer: optax.GradientTransformation | None = None,
  bias_correction_probes: int = 0,
  consistent_rms: float | None = None,
  matmul_dtype: Any = None,
  weight_decay: Any = 0.0,
  adam_learning_rate: Any = None,
  adam_b1: Any = 0.9,
  adam_b2: Any = 0.999,
  adam_eps: Any = 1e-8,
) -> _per_example.BoundedSensitivityTransformation:
  """DP-Muon (arXiv:2605.12994) for trees with matrices and other leaves.

  Every matrix W of every example's gradient is clipped to C_W, the sum is
  divided by the expected batch size B, noise ``N(0, (sigma_W C_W / B)^2)``
  is added, and the step is ``-learning_rate`` times the orthogonalized heavy
  ball ``m <- momentum m + g``. Leaves that are no matrices are clipped
  together as one more group, noised likewise, and go to Adam. Clip and noise
  come before the branches part: nothing is left out of them.

  ``noise_multiplier`` is the JOINT one, what an accountant must be told
  (:func:`prism_optax.accounting.dpsgd_event`): the K groups see the same
  batch, so their own multipliers are larger, ``sigma sqrt(K)`` in the equal
  split. In the source sigma is that of a single matrix; accounting with it for
  all of them understates epsilon. Each update is one Gaussian mechanism of the
  joint multiplier for add-or-remove-one neighbours.

  ==========================  =================================================
  batch of no examples        noise alone, divided by B as ever
  NaN or Inf in an example    it counts as zero, in all groups
  ``noise_multiplier=0.0``    no noise and no privacy, for tests
  ``learning_rate=0.0``       zero updates; noise is drawn, privacy is spent
  ``momentum=0.0``            the noisy gradient itself is orthogonalized
  no leaf is a matrix         one clip group, and Adam for all
  bfloat16 parameters         clip, sum, noise and moments in float32
  ==========================  =================================================

  Args:
    learning_rate: A number or a schedule; of the orthogonal direction, whose
      entries are about ``1 / sqrt(max(rows, columns))``.
    l2_clip_norms: C_W, of one example's contribution to the sum: a number for
      every group, or a prefix tree of numbers.
    noise_multiplier: sigma, of the whole: the noise's standard deviation per
      coordinate where all groups together have the clip norm one. Zero is
      allowed and private for nobody.
    expected_batch_size: B, a public constant: sampling probability times the
      size of the data set, not the size of the batch at hand.
    prng_key: Of the noise. None for a seed from the operating system, taken in
      ``init`` (outside of ``jit``); an int or a typed key for noise that can
      be reproduced, by anybody who knows it. One ``init`` per privacy budget.
    momentum: beta of the heavy ball, in [0, 1).
    degree: Degree kappa of the Newton-Schulz polynomial.
    steps: Number q of its steps.
    normalize: ``'max1'``, ``'frobenius'`` or ``'none'``: see
      :func:`prism_optax.muon.newton_schulz`.
    noise_split: ``'equal'`` multipliers for all groups, or ``'least_energy'``:
      see :func:`prism_optax.transforms.split_noise_multiplier`.
    weight_dimension_numbers: ``None``: leaves with two axes are matrices,
      also embedding tables and stacked biases, which are better sent to Adam.
      Or a tree of ``optax.contrib.MuonDimensionNumbers`` and ``None`` (for
      Adam), a prefix of the parameters or a callable that makes one. Matrices
      stacked along batch axes are groups of their own.
    per_example_gradients: If False, ``update`` takes the clipped MEAN instead:
      what ``jax_privacy.clipped_grad`` makes with ``clip_each_matrix``.
    privatizer: In place of ``noise_multiplier``: a privatizer in the manner of
      optax. The leaves reach it in units in which all groups together have the
      clip norm one, as a mean: its stddev is sigma / expected_batch_size.
    bias_correction_probes: Number of antithetic probes of
      :func:`prism_optax.muon.subtract_bias`; 0 is off. Not with a
      ``privatizer``, whose noise is not known here.
    consistent_rms: If a number, directions of matrices are scaled by it times
      ``sqrt(max(rows, columns))``, so that their entries have this size
      whatever the shape (0.2 is like Adam's).
    matmul_dtype: Of the products in the orthogonalization.
    weight_decay: Decoupled, of all leaves; multiplied by the learning rate.
    adam_learning_rate: Of the other leaves; ``learning_rate`` if None.
    adam_b1: As in Adam.
    adam_b2: As in Adam.
    adam_eps: As in Adam.

  Returns:
    A transformation with ``update(per_example_grads, state, params,
    is_padding_example=None)``, leaves ``(B, *shape)`` in and ``(*shape)`` out,
    float32 at least; it has ``.sensitivity(neighboring_relation,
    params=params)``, that of the clipped mean of all groups together.

  Raises:
    ValueError: For options outside of what is said above; unless exactly one
      of ``noise_multiplier`` and ``privatizer`` is given; in ``init`` if it is
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
  if (noise_multiplier is None) == (privatizer is None):
    raise ValueError(
      'Expected exactly one of noise_multiplier and privatizer, got'
      f' {noise_multiplier=} and {privatizer=}.'
    )
  if privatizer is not None and prng_key is not None:
    raise ValueError(
      'prng_key is for the noise of noise_multiplier; a privatizer has its own.'
    )
  if noise_multiplier is not None:
    _validate.non_negative('noise_multiplier', noise_multiplier)
  _validate.positive('expected_batch_size', expected_batch_size)
  _validate.decay_rate('momentum', momentum)
  _validate.one_of('noise_split', noise_split, NOISE_SPLITS)
  _validate.integer('bias_correction_probes', bias_correction_probes, 0)
  _validate.non_negative('weight_decay', weight_decay)
  if consistent_rms is not None:
    _validate.positive('consistent_rms', consistent_rms)
  if bias_correction_probes and privatizer is not None:
    raise ValueError(
      'A bias correction needs the variance of independent noise: give'
      f' noise_multiplier, not privatizer, with {bias_correction_probes=}.'
    )
  _randomness.check_key('prng_key', prng_key)

  def specs_of(tree):
    specs = _matrix_axes.resolve(weight_dimension_numbers, tree)
    return jax.tree.unflatten(jax.tree.structure(tree), specs)

  def labels_of(tree):
    specs = _matrix_axes.resolve(weight_dimension_numbers, tree)
    return jax.tree.unflatten(
      jax.tree.structure(tree),
      ['other' if spec is None else 'matrix' for spec in specs],
    )

  def noise_units_of(tree):
    """Each leaf's ``sigma_W C_W / sigma``: its noise in units of the whole."""
    groups = clip_groups(l2_clip_norms, tree, specs_of)
    return noise_units(
      groups, len(jax.tree.leaves(tree)), noise_split=noise_split
    )

  def stddevs_of(tree):
    stddev = noise_multiplier / expected_batch_size
    return [stddev * unit for unit in noise_units_of(tree)]

  clip = per_matrix_clip(
    l2_clip_norms,
    normalize_by=expected_batch_size,
    weight_dimension_numbers=specs_of,
  )
  parts: list[Any] = [clip] if per_example_gradients else []
  if privatizer is None:
    parts.append(_noise(stddevs_of, prng_key))
  else:
    parts += [
      _scale_leaves(lambda tree: [1 / u for u in noise_units_of(tree)]),
      privatizer,
      _scale_leaves(noise_units_of),
    ]
  branches = {
    'matrix': _at_least_float32(optax.trace(momentum)),
    'other': _at_least_float32(
      optax.scale_by_adam(b1=adam_b1, b2=adam_b2, eps=adam_eps)
    ),
  }
  bias_correction = None
  if bias_correction_probes:
    bias_correction = BiasCorrection(
      noise_stddev=lambda tree: jax.tree.unflatten(
        jax.tree.structure(tree), stddevs_of(tree)
      ),
      momentum=momentum,
      prng_key=_probe_key(prng_key),
      num_probes=bias_correction_probes,
    )
  parts += [
    optax.partition(branches, labels_of),
    # On the whole tree: the noise of a leaf depends on how many groups it has.
    orthogonalize(
      degree=degree,
      steps=steps,
      normalize=normalize,
      bias_correction=bias_correction,
      weight_dimension_numbers=specs_of,
      matmul_dtype=matmul_dtype,
    ),
  ]
  if consistent_rms is not None:
    rms: float = consistent_rms
    parts.append(
      _scale_leaves(
        lambda tree: [
          1.0 if larger is None else rms * math.sqrt(larger)
          for larger in _larger_sides(weight_dimension_numbers, tree)
        ]
      )
    )
  parts.append(optax.add_decayed_weights(weight_decay))
  if adam_learning_rate is None:
    parts.append(optax.scale_by_learning_rate(learning_rate))
  else:
    rates = {'matrix': learning_rate, 'other': adam_learning_rate}
    parts.append(
      optax.partition(
        {k: optax.scale_by_learning_rate(v) for k, v in rates.items()},
        labels_of,
      )
    )
  chained = optax.with_extra_args_support(optax.chain(*parts))
  return _per_example.BoundedSensitivityTransformation(
    chained.init, chained.update, clip.sensitivity
  )
