"""PRISM with Muon's direction, as one optimizer."""

from prism_optax._modules import LayoutLike
from prism_optax._types import PRNGKeyLike, Scalar, ScalarOrSchedule
from prism_optax.aliases._prism import _optimizer, _stddev
from prism_optax.contrib._orthogonalize_tangents import orthogonalize_tangents
from prism_optax.transforms import (
  add_decayed_factors,
  intrinsic_clip,
  retract,
  scale_by_learning_rate,
  tangent_privatizer,
)
from prism_optax.transforms._chain import TangentTransformation


def prism_muon(
  learning_rate: ScalarOrSchedule,
  *,
  l2_clip_norm: Scalar,
  noise_multiplier: Scalar,
  expected_batch_size: Scalar,
  prng_key: PRNGKeyLike = None,
  per_example_gradients: bool = True,
  weight_decay: Scalar = 0.1,
  momentum: Scalar = 0.9,
  b2: Scalar = 0.999,
  eps: Scalar = 1e-8,
  steps: int | None = None,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """PRISM with Muon's direction on the manifold.

  :func:`prism_optax.prism` with :func:`orthogonalize_tangents` (DP-Muon's
  iteration, arXiv:2605.12994) in place of the preconditioner, and with Adam for
  leaves that are no factors. Learning rates are comparable. The combination is
  ours. Arguments that are not listed are the same as in
  :func:`prism_optax.prism`, and so are clip, noise, decay and edge cases.

  **Privacy.** As in ``prism``, each update is a Gaussian mechanism of the given
  noise multiplier for add-or-remove-one neighbours, followed by
  post-processing.

  Args:
    momentum: Decay of the heavy ball, and of Adam's first moment for the leaves
      that are no factors.
    b2: Adam's decay of the second moment, for the leaves that are no factors.
    eps: Adam's constant under the fraction, likewise.

  Returns:
    An optimizer with ``.sensitivity(neighboring_relation)``, the bound C / b.

  Raises:
    ValueError: In the cases in which :func:`prism_optax.prism` does.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import contrib
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
    >>> tx = contrib.prism_muon(
    ...   0.1, l2_clip_norm=1.0, noise_multiplier=0.5, expected_batch_size=8)
    >>> grads = {'lora_a': jnp.ones((6, 3, 1)), 'lora_b': jnp.ones((6, 1, 2))}
    >>> updates, state = tx.update(grads, tx.init(params), params)
    >>> updates['lora_a'].shape, tx.sensitivity()
    ((3, 1), 0.125)
  """
  stddev = _stddev(l2_clip_norm, noise_multiplier, expected_batch_size)
  return _optimizer(
    intrinsic_clip(l2_clip_norm, normalize_by=expected_batch_size),
    tangent_privatizer(stddev, prng_key=prng_key, steps=steps),
    orthogonalize_tangents(
      momentum, coordinate_rms=1.0, b1=momentum, b2=b2, eps=eps
    ),
    add_decayed_factors(weight_decay),
    scale_by_learning_rate(learning_rate),
    retract(),
    per_example_gradients=per_example_gradients,
    layout=layout,
  )
