"""PRISM as one optimizer."""

from typing import Any

import optax

from prism_optax import (
  _per_example,
  _validate,
  clipping,
  lora,
  noise_addition,
  orthogonal_tangents,
  preconditioning,
  retraction,
)
from prism_optax import weight_decay as decay


def prism(
  learning_rate: optax.ScalarOrSchedule,
  *,
  l2_clip_norm: Any,
  noise_multiplier: Any,
  expected_batch_size: Any,
  prng_key: Any = None,
  per_example_gradients: bool = True,
  weight_decay: Any = None,
  retraction_method: str = 'svd',
  orthogonalize: bool = False,
  b1: Any = 0.9,
  b2: Any = 0.999,
  eps: Any = 1e-8,
  floor_mode: str = 'geometry',
  floor_factor: Any = 1.0,
  debias: bool = False,
  bias_correction: bool | None = None,
  max_condition_number: Any = 1e4,
  basis: str = 'orthonormal',
  transport: bool = True,
  max_update_norm: Any = None,
  layout: Any = None,
) -> _per_example.BoundedSensitivityTransformation:
  """PRISM: differentially private training of LoRA adapters on the manifold.

  Gauge-invariant tangent-space DP (Wang and Zhang 2026, arXiv:2606.00944): one
  clip of each example's intrinsic gradient over all modules, isotropic noise in
  the tangent space, a preconditioner in rank space floored at the noise level,
  a retraction. The chain is::

    intrinsic_clip(C, normalize_by=b)
    tangent_privatizer(s)                       s = noise_multiplier * C / b
    scale_by_rank_preconditioner(noise_stddev=s)
    add_decayed_factors(weight_decay)
    scale_by_learning_rate(learning_rate)
    retract()

  Clip: Eq. 13, 15 and 16 there; noise: Eq. 17 to 21; preconditioner: Eq. 24 to
  27; retraction: Eq. 22. What departs from the paper is said at each part.

  Each update is a Gaussian mechanism of the given noise multiplier for
  add-or-remove-one neighbours (Theorem 3.4 there); with Poisson sampling of the
  batches at rate b / N and T steps its epsilon is
  ``accounting.epsilon(accounting.dpsgd_event(noise_multiplier, b / N, T),
  delta)``.

  ==========================  =================================================
  batch of no examples        noise alone, divided by b as ever
  NaN or Inf in an example    it counts as zero
  ``noise_multiplier=0.0``    no noise and no privacy, for tests
  ``learning_rate=0.0``       Z stays; the noise is drawn and the privacy spent
  one factor zero             the usual start: the first step keeps the column
                              space of the other, then both have full rank
  both factors zero           ValueError in ``init``, where values are known
  rank above min(m, n)        ValueError
  leaves that are no factors  clipped and noised along, then Adam with the same
                              floor; no weight decay
  bfloat16 parameters         all in float32 up to the updates; keep factors in
                              float32, or small updates are lost
  a second ``init``           with ``prng_key=None`` another noise; with a key
                              the same noise again, which nobody may release
  ==========================  =================================================

  The defaults were set by experiments on digits and on text
  (``benchmarks/accuracy/hyper_parameters.py``,
  ``benchmarks/accuracy/utility.py``): a first
  moment without bias correction and a little decay are worth points of accuracy
  and forgive a wrong rate; floor_factor, debias, b2 and the kind of retraction
  made no difference; ten times the usual clip norm cost four points.

  Args:
    learning_rate: A number or schedule. The preconditioned direction has
      entries of order one in intrinsic coordinates, whatever the gauge, alpha
      or scale; 3e-2 falling to zero is a good start for hundreds of steps, and
      more for fewer.
    l2_clip_norm: C, of each example's intrinsic gradient, in total over all
      modules and leaves.
    noise_multiplier: The noise's standard deviation per coordinate over C / b
      (or, the same, that of the noise of the sum over C).
    expected_batch_size: b, a public constant: sampling rate times declared
      size of the data set. Never the realised size of a batch.
    prng_key: See :func:`tangent_privatizer`. None takes a fresh secret seed.
    per_example_gradients: True if ``update`` gets per-example factor gradients,
      leaves ``(B, *shape)``, and perhaps ``is_padding_example=``. False if it
      gets the clipped MEAN in tangent coordinates (clipped sum over b), as from
      ``jax_privacy.clipped_grad(..., l2_clip_norm=C, normalize_by=b,
      pre_clipping_transform=tangent_coordinates(params))``; then the clip is
      the caller's, and must be at this C and b.
    weight_decay: Of Z, see :func:`add_decayed_factors`. It forgets the noise of
      old steps, which nothing else takes out of Z. None for 0.1, or 0.0, as
      published, with ``basis='factor'``. More helps where the pretrained model
      is near the task (up to 1 for sentences), and harms where it is far.
    retraction_method: See :func:`retract`.
    orthogonalize: Muon on the manifold: in place of the rank preconditioner the
      direction is :func:`orthogonalize_tangents` of a heavy ball with momentum
      b1, scaled to the same size. The options below b2 and eps then do nothing.
    b1: This and the next: see :func:`scale_by_rank_preconditioner`.
    b2: As there.
    eps: As there.
    floor_mode: As there.
    floor_factor: As there.
    debias: As there.
    bias_correction: As there.
    max_condition_number: As there.
    basis: As there; ``'factor'`` also aligns the retraction.
    transport: As there.
    max_update_norm: As there.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    An optimizer with ``.sensitivity(neighboring_relation)``, the bound C / b on
    how far one example moves the clipped mean.

  Raises:
    ValueError: For arguments out of range; in ``init`` if no pair is found,
      both factors of a module are zero, or it is traced with
      ``prng_key=None``; in ``update`` without ``params`` or if the gradients
      do not fit.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
    >>> loss = lambda p, x: jnp.sum((x @ p['lora_a'] @ p['lora_b'] - 1.0) ** 2)
    >>> tx = prism_optax.prism(
    ...   0.1, l2_clip_norm=1.0, noise_multiplier=0.5, expected_batch_size=8)
    >>> state = tx.init(params)
    >>> @jax.jit
    ... def step(params, state, batch):
    ...   grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    ...   updates, state = tx.update(grads, state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> params, state = step(params, state, jnp.ones((8, 3)))
    >>> params['lora_a'].shape, params['lora_b'].shape
    ((3, 1), (1, 2))
  """
  _validate.positive('l2_clip_norm', l2_clip_norm)
  _validate.non_negative('noise_multiplier', noise_multiplier)
  _validate.positive('expected_batch_size', expected_batch_size)
  if weight_decay is None:
    weight_decay = 0.0 if basis == 'factor' else 0.1
  _validate.non_negative('weight_decay', weight_decay)
  bound = l2_clip_norm / expected_batch_size
  stddev = noise_multiplier * bound
  if orthogonalize:
    adaptive = orthogonal_tangents.orthogonalize_tangents_part(
      b1,
      degree=2,
      steps=5,
      normalize='max1',
      coordinate_rms=1.0,
      b1=b1,
      b2=b2,
      eps=eps,
    )
  else:
    adaptive = preconditioning.rank_preconditioner_part(
      b1,
      b2,
      eps,
      noise_stddev=stddev,
      floor_mode=floor_mode,
      floor_factor=floor_factor,
      debias=debias,
      bias_correction=bias_correction,
      max_condition_number=max_condition_number,
      basis=basis,
      transport=transport,
      max_update_norm=max_update_norm,
    )
  # Parts rather than transformations: one tree in, one tree out, and the frames
  # of each step computed once.
  parts = [
    noise_addition.tangent_privatizer_part(stddev, prng_key),
    adaptive,
  ]
  if per_example_gradients:
    parts.insert(
      0, clipping.intrinsic_clip_part(l2_clip_norm, expected_batch_size)
    )
  # A traced decay (an injected hyper-parameter) is always in the chain.
  if not (isinstance(weight_decay, int | float) and weight_decay == 0):
    parts.append(decay.add_decayed_factors_part(weight_decay))
  parts += [
    lora.scaling_part(
      'scale_by_learning_rate', optax.scale_by_learning_rate(learning_rate)
    ),
    # The published optimizer turns the new factors towards the old ones.
    retraction.retract_part(retraction_method, align=basis == 'factor'),
  ]
  init, update = lora.chain_parts(*parts, layout=layout)
  return _per_example.BoundedSensitivityTransformation(
    init, update, _per_example.sensitivity_of_sum(bound)
  )
