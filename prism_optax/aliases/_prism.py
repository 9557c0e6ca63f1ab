"""PRISM as one optimizer, in two forms."""

import optax

from prism_optax import _validate
from prism_optax._modules import LayoutLike
from prism_optax._types import PRNGKeyLike, Scalar, ScalarOrSchedule
from prism_optax.transforms import (
  adapt_step_size,
  add_decayed_factors,
  chain,
  intrinsic_clip,
  retract,
  scale_by_learning_rate,
  scale_by_rank_preconditioner,
  tangent_privatizer,
)
from prism_optax.transforms._chain import TangentTransformation
from prism_optax.transforms._published import scale_by_published_preconditioner


def _stddev(
  l2_clip_norm: Scalar, noise_multiplier: Scalar, expected_batch_size: Scalar
) -> Scalar:
  """The noise per coordinate of the clipped mean."""
  _validate.positive('l2_clip_norm', l2_clip_norm)
  _validate.non_negative('noise_multiplier', noise_multiplier)
  _validate.positive('expected_batch_size', expected_batch_size)
  return noise_multiplier * l2_clip_norm / expected_batch_size


def _optimizer(
  clip: TangentTransformation,
  *rest: TangentTransformation,
  per_example_gradients: bool,
  layout: LayoutLike,
) -> TangentTransformation:
  """The chain, without its clip where that is the caller's."""
  if per_example_gradients:
    return chain(clip, *rest, layout=layout)
  return TangentTransformation(
    chain(*rest, layout=layout).stacked, layout, clip.sensitivity
  )


# Without a learning rate: that of the first step, and the decay. Both were
# chosen on texts (benchmarks/accuracy/regret.py).
_RATE, _DECAY = 1e-2, 3.0


def prism(
  learning_rate: ScalarOrSchedule | None = None,
  *,
  l2_clip_norm: Scalar,
  noise_multiplier: Scalar,
  expected_batch_size: Scalar,
  prng_key: PRNGKeyLike = None,
  per_example_gradients: bool = True,
  weight_decay: Scalar | None = None,
  b1: Scalar = 0.9,
  b2: Scalar = 0.999,
  steps: int | None = None,
  layout: LayoutLike = None,
) -> TangentTransformation:
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

  Without a learning rate nothing has to be tuned on private data:
  :func:`prism_optax.transforms.adapt_step_size` lets the preconditioner's steps
  grow as far as the task wants, from a rate of 0.01 that falls linearly to
  zero over ``steps``.

  Clip: Eq. 13, 15 and 16 there; noise: Eq. 17 to 21; preconditioner: Eq. 24 to
  27; retraction: Eq. 22. Each part says where it departs from the paper. For
  further options of the parts, write the chain out: :func:`prism_optax.chain`
  of the lines above is this optimizer, bit for bit.

  **Privacy.** Each update is a Gaussian mechanism of the noise multiplier z for
  add-or-remove-one neighbours (Theorem 3.4 there); with Poisson sampling of
  the batches at rate b / N and T steps its epsilon is
  ``accounting.epsilon(accounting.dpsgd_event(z, b / N, T), delta)``. Not
  covered: batches drawn in another way, and a loss in which examples act on
  each other (``diagnostics.prove_independent``).

  ==========================  =================================================
  batch of no examples        noise alone, divided by b as ever
  NaN or Inf in an example    it counts as zero
  ``noise_multiplier=0.0``    no noise and no privacy, for tests
  ``learning_rate=0.0``       Z stays; the noise is drawn and the privacy spent
  one factor zero             the usual start: the first step keeps the column
                              space of the other, then both have full rank
  both factors zero           ValueError in ``init``, where values are known
  more than ``steps``         ValueError; under ``jit`` nothing is released
  rank above min(m, n)        ValueError
  leaves that are no factors  clipped and noised along, then Adam with the same
                              floor; no weight decay
  bfloat16 parameters         all in float32 up to the updates; keep factors in
                              float32, or small updates are lost
  a second ``init``           with ``prng_key=None`` another noise; with a key
                              the same noise again, which nobody may release
  ==========================  =================================================

  The defaults were set by experiments on digits and on text
  (``benchmarks/accuracy/digits.py``, ``benchmarks/accuracy/utility.py``): a
  little decay gains accuracy, and a first moment without bias correction
  tolerates larger rates; a clip norm of 10 cost four points on text and more on
  digits; ``b2`` made no difference.

  Args:
    learning_rate: A number or schedule; None for steps that adapt. The
      preconditioned direction has entries of order one in intrinsic
      coordinates, whatever the gauge, alpha or scale; begin with 3e-2 falling
      to zero for hundreds of steps, and with more for fewer.
    l2_clip_norm: C, of each example's intrinsic gradient, in total over all
      modules and leaves.
    noise_multiplier: The noise's standard deviation per coordinate over C / b
      (or, equally, the standard deviation of the noise of the sum over C).
    expected_batch_size: b, a public constant: sampling rate times declared
      size of the data set. Never the realised size of a batch.
    prng_key: Key of the noise. None takes a fresh secret seed from the
      operating system in ``init``, ``'chacha20'`` one for that generator; an
      int or a typed key gives noise that anybody who knows it can repeat. One
      ``init`` per privacy budget.
    per_example_gradients: True if ``update`` gets per-example factor gradients,
      leaves ``(B, *shape)``, and perhaps ``is_padding_example=``. False if it
      gets the clipped MEAN in tangent coordinates (clipped sum over b), as from
      ``jax_privacy.clipped_grad(..., l2_clip_norm=C, normalize_by=b,
      pre_clipping_transform=tangent_coordinates(params))``; then the clip is
      the caller's, and must be at this C and b.
    weight_decay: Share of Z that a step of learning rate 1 removes, see
      :func:`add_decayed_factors`; None for 0.1, and without a learning rate for
      3.0. It forgets the noise of old steps, which nothing else removes from Z.
      With a learning rate, more than 0.1 helps if the pretrained model is near
      the task (up to 1 for sentences), and harms if it is far.
    b1: Decay of the first moment.
    b2: Decay of the second moments.
    steps: The number of updates that were accounted for, as for
      :func:`tangent_privatizer`: none releases anything beyond it. Needed
      without a learning rate.
    layout: Which leaves are pairs, if names do not show it: see
      :func:`prism_optax.lora.describe_pairs`.

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
  stddev = _stddev(l2_clip_norm, noise_multiplier, expected_batch_size)
  direction = scale_by_rank_preconditioner(b1, b2, noise_stddev=stddev)
  usual_decay = 0.1
  if learning_rate is None:
    if steps is None:
      raise ValueError('Expected learning_rate, or steps to choose one for.')
    _validate.integer('steps', steps, 1)
    direction = adapt_step_size(direction, noise_stddev=stddev)
    learning_rate = optax.linear_schedule(_RATE, 0.0, steps)
    usual_decay = _DECAY
  return _optimizer(
    intrinsic_clip(l2_clip_norm, normalize_by=expected_batch_size),
    tangent_privatizer(stddev, prng_key=prng_key, steps=steps),
    direction,
    add_decayed_factors(usual_decay if weight_decay is None else weight_decay),
    scale_by_learning_rate(learning_rate),
    retract(),
    per_example_gradients=per_example_gradients,
    layout=layout,
  )


def published_prism(
  learning_rate: ScalarOrSchedule,
  *,
  l2_clip_norm: Scalar,
  noise_multiplier: Scalar,
  expected_batch_size: Scalar,
  prng_key: PRNGKeyLike = None,
  per_example_gradients: bool = True,
  b1: Scalar = 0.9,
  b2: Scalar = 0.999,
  floor_mode: str = 'geometry',
  floor_factor: Scalar = 1.0,
  steps: int | None = None,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """PRISM as it was published, for comparisons.

  The optimizer of the authors' code (Wang and Zhang 2026, arXiv:2606.00944). It
  differs from :func:`prism`, which we recommend, in three things: its moments
  are moments of the factors, without transport and divided by ``1 - b^t`` (Eq.
  24 to 27 there), so that its trajectory depends on the gauge; ``retract``
  turns the new factors towards the old ones (``align=True``); and Z does not
  decay. Arguments that are not listed are the same as in :func:`prism`, and so
  are clip, noise and edge cases.

  **Privacy.** As in :func:`prism`, each update is a Gaussian mechanism of the
  given noise multiplier for add-or-remove-one neighbours. (The authors' code
  adds less noise where factors are small or in other gauges.)

  Args:
    floor_mode: The least eigenvalue of the second moments: ``'geometry'`` for
      the floor of Eq. 26, the mean of the noise over rank space, read off the
      Gram matrices of the factors, and s^2 at least; ``'scalar'`` for s^2;
      ``'none'`` for no floor.
    floor_factor: Factor of either floor.

  Returns:
    An optimizer with ``.sensitivity(neighboring_relation)``, the bound C / b.

  Raises:
    ValueError: In the cases in which :func:`prism` does.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
    >>> tx = prism_optax.published_prism(
    ...   0.1, l2_clip_norm=1.0, noise_multiplier=0.5, expected_batch_size=8)
    >>> grads = {'lora_a': jnp.ones((6, 3, 1)), 'lora_b': jnp.ones((6, 1, 2))}
    >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    >>> updates['lora_a'].shape, tx.sensitivity()
    ((3, 1), 0.125)
  """
  stddev = _stddev(l2_clip_norm, noise_multiplier, expected_batch_size)
  return _optimizer(
    intrinsic_clip(l2_clip_norm, normalize_by=expected_batch_size),
    tangent_privatizer(stddev, prng_key=prng_key, steps=steps),
    scale_by_published_preconditioner(
      b1,
      b2,
      noise_stddev=stddev,
      floor_mode=floor_mode,
      floor_factor=floor_factor,
    ),
    scale_by_learning_rate(learning_rate),
    retract(align=True),
    per_example_gradients=per_example_gradients,
    layout=layout,
  )
