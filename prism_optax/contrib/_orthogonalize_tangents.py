"""Muon for LoRA adapters, on the manifold of rank-r matrices."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax import _validate, fixed_rank
from prism_optax._modules import LayoutLike, Stacks, StepContext, map_pairs
from prism_optax._types import Scalar
from prism_optax.contrib._tangent_newton_schulz import tangent_newton_schulz
from prism_optax.fixed_rank import Factors, Tangent
from prism_optax.fixed_rank._points import Frame
from prism_optax.fixed_rank._tangents import transport_sum
from prism_optax.muon._polynomials import Steps, check_options
from prism_optax.transforms._chain import Stacked, TangentTransformation


class TangentMomentum(NamedTuple):
  """Momentum of one stack of modules, with the bases of its coordinates.

  Attributes:
    bases: ``Q_L`` (k, m, r) and ``Q_R`` (k, n, r).
    trace: The heavy ball, as tangent coordinates in these bases.
  """

  bases: Factors
  trace: Tangent


class OrthogonalTangentsState(NamedTuple):
  """State of :func:`orthogonalize_tangents`.

  Attributes:
    pairs: The momentum of each stack of same-shape modules.
    others: Adam's state for the other leaves.
  """

  pairs: tuple[TangentMomentum, ...]
  others: optax.OptState


def orthogonalize_tangents(
  momentum: Scalar = 0.95,
  *,
  degree: int = 2,
  steps: Steps = 5,
  normalize: str = 'max1',
  coordinate_rms: float | None = None,
  b1: Scalar = 0.9,
  b2: Scalar = 0.999,
  eps: Scalar = 1e-8,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """Muon's direction in the tangent space of each LoRA module.

  The momentum ``m <- momentum m + X`` is kept in tangent coordinates and is
  carried to each new tangent space by projection. The direction is
  ``P_Z(F(m))``: F is the Newton-Schulz iteration of DP-Muon (arXiv:2605.12994),
  whose result has rank 2r and is not tangent, and ``P_Z`` is the projection of
  PRISM (arXiv:2606.00944, Eq. 13). The combination of the two is ours.
  The direction does not depend on the gauge of the factors. Adam updates the
  leaves that are no factors.

  It takes the place of :func:`prism_optax.scale_by_rank_preconditioner`, after
  ``tangent_privatizer`` and before the learning rate and the retraction.

  **Privacy.** It reads only noisy gradients and is post-processing. It gives no
  privacy by itself.

  =============================  ==============================================
  zero momentum                  zero direction
  momentum of norm below one     keeps its size with ``'max1'``: the step then
                                 scales with the gradient
  factor zero or of lower rank   coordinates that cannot be observed stay zero
  ``momentum=0.0``               the noisy gradient alone is orthogonalized
  NaN or Inf comes in            it stays in the momentum: clip at the start of
                                 the chain
  bfloat16 parameters            momentum and direction in float32
  =============================  ==============================================

  Args:
    momentum: beta of the heavy ball, in [0, 1).
    degree: Degree kappa of the Newton-Schulz polynomial.
    steps: Number q of its steps, or the coefficients of each, from
      :func:`prism_optax.muon.minimax_coefficients`.
    normalize: ``'max1'``, ``'frobenius'`` or ``'none'``: see
      :func:`prism_optax.muon.newton_schulz`; the norm is the intrinsic one.
    coordinate_rms: A number multiplies the directions by itself times ``sqrt((m
      + n - r) / 2)``. Then a direction whose 2r singular values are all one has
      this root mean square over its ``r (m + n - r)`` coordinates, and with 1.0
      the learning rates of the preconditioner carry over. ``None`` leaves the
      singular values at about one, as in Muon.
    b1: Adam's decay of the first moment, for the other leaves.
    b2: Adam's decay of the second moment, for the other leaves.
    eps: Adam's constant under the fraction, for the other leaves.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation on trees in the shapes of the parameters; ``update`` needs
    ``params``. Without ``coordinate_rms`` the direction of a module has a
    spectral norm of at most 2, unless ``normalize='none'``.

  Raises:
    ValueError: For arguments out of range; in ``init`` if both factors of a
      module are zero; in ``update`` without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import contrib
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = contrib.orthogonalize_tangents(steps=8)
    >>> grads = {'lora_a': jnp.array([[0.0], [3.0], [0.0]]),
    ...          'lora_b': jnp.array([[0.0, 2.0]])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> [round(float(jnp.linalg.norm(u)), 3) for u in updates.values()]
    [1.0, 1.0]
  """
  _validate.decay_rate('momentum', momentum)
  _validate.decay_rate('b1', b1)
  _validate.decay_rate('b2', b2)
  _validate.non_negative('eps', eps)
  check_options(degree, steps, normalize)
  if coordinate_rms is not None:
    _validate.positive('coordinate_rms', coordinate_rms)
  adam = optax.scale_by_adam(b1=b1, b2=b2, eps=eps)

  def init_pair(tangent: Tangent) -> TangentMomentum:
    # Separate arrays: a state may be donated, but no buffer may occur twice.
    return TangentMomentum(
      Factors(*map(jnp.zeros_like, tangent)),
      Tangent(*map(jnp.zeros_like, tangent)),
    )

  def scale_of(tangent: Tangent) -> float:
    if coordinate_rms is None:
      return 1.0
    rank = tangent.left.shape[-1]
    sides = tangent.left.shape[-2] + tangent.right.shape[-2]
    return coordinate_rms * math.sqrt((sides - rank) / 2)

  def of_pair(
    old: TangentMomentum, frame: Frame, tangent: Tangent
  ) -> tuple[TangentMomentum, Tangent]:
    moved, _ = transport_sum(old.bases, frame, old.trace)
    trace = jax.tree.map(
      lambda m, x: momentum * m + x, fixed_rank.multiply_out(moved), tangent
    )
    direction = tangent_newton_schulz(
      frame,
      trace,
      degree=degree,
      steps=steps,
      normalize=normalize,
      scale=scale_of(tangent),
    )
    return TangentMomentum(Factors(frame.left, frame.right), trace), direction

  def init(step: StepContext) -> OrthogonalTangentsState:
    stacks = step.tree.coordinates(step.params)
    return OrthogonalTangentsState(
      map_pairs(init_pair, stacks.pairs), adam.init(stacks.others)
    )

  def update(
    stacks: Stacks,
    state: OrthogonalTangentsState,
    step: StepContext,
    **extra_args: object,
  ) -> tuple[Stacks, OrthogonalTangentsState]:
    del extra_args
    explicit = map_pairs(fixed_rank.multiply_out, stacks.pairs)
    pairs = map_pairs(of_pair, state.pairs, step.frames, explicit)
    others, adam_state = adam.update(stacks.others, state.others)
    state = OrthogonalTangentsState(tuple(m for m, _ in pairs), adam_state)
    return Stacks(tuple(d for _, d in pairs), others), state

  return TangentTransformation(
    Stacked('orthogonalize_tangents', init, update), layout
  )
