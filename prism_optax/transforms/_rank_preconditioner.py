"""Adaptive steps in rank space with a floor at the known noise level."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _validate
from prism_optax._modules import LayoutLike, Stacks, map_pairs
from prism_optax._types import ArrayTree, Scalar
from prism_optax.fixed_rank._points import map_ranks
from prism_optax.transforms import _moments
from prism_optax.transforms._chain import Stacked, TangentTransformation
from prism_optax.transforms._moments import Options

# A number, or one number per step.
StddevLike = Scalar | np.ndarray


class RankPreconditionerState(NamedTuple):
  """State of the rank preconditioner, also of the published one.

  Attributes:
    count: Updates so far, shape (), int32.
    pairs: For each stack of same-shape modules its moments.
    others: Adam's moments of each other leaf.
  """

  count: jax.Array  # type: ignore[assignment]  # As in optax's states.
  pairs: tuple[ArrayTree, ...]
  others: tuple[_moments.ElementwiseMoments, ...]


def check_stddev(noise_stddev: StddevLike) -> None:
  """A number >= 0, or an array of them, shape (steps,)."""
  if np.ndim(noise_stddev) == 0:
    _validate.non_negative('noise_stddev', noise_stddev)
  elif np.ndim(noise_stddev) > 1 or np.size(noise_stddev) == 0:
    raise ValueError(
      'Expected noise_stddev to be a number or one number per step, got shape'
      f' {np.shape(noise_stddev)}.'
    )
  elif not isinstance(noise_stddev, jax.core.Tracer):
    values = np.asarray(noise_stddev)
    if not (np.isfinite(values).all() and (values >= 0).all()):
      raise ValueError(
        f'Expected finite noise_stddev >= 0, got {noise_stddev=}.'
      )


def variance_at(noise_stddev: StddevLike, count: jax.Array) -> jax.Array:
  """s_t^2. Beyond the last entry of an array the last one holds."""
  stddev = jnp.asarray(noise_stddev)
  if stddev.ndim:
    stddev = stddev[jnp.minimum(count, stddev.shape[0] - 1)]
  return jnp.square(stddev)


def _one_minus_power(decay: Scalar, count: jax.Array) -> jax.Array:
  """``1 - decay^count`` without cancellation for decays close to one."""
  return -jnp.expm1(count * jnp.log(jnp.asarray(decay)))


def preconditioner(
  name: str,
  init_pair: Callable[..., ArrayTree],
  step_pair: Callable[..., tuple[ArrayTree, ArrayTree]],
  options: Options,
  *,
  noise_stddev: StddevLike,
  bias_correction: bool,
  layout: LayoutLike,
) -> TangentTransformation:
  """Moments of stacks by ``step_pair``, Adam's with a floor for the rest."""
  b1, b2 = options.b1, options.b2
  _validate.decay_rate('b1', b1)
  _validate.decay_rate('b2', b2)
  _validate.non_negative('eps', options.eps)
  check_stddev(noise_stddev)
  _validate.non_negative('floor_factor', options.floor_factor)
  _validate.at_least('max_condition_number', options.max_condition_number, 1)

  def init(step):
    stacks = step.tree.coordinates(step.params)
    return RankPreconditionerState(
      jnp.zeros((), jnp.int32),
      map_pairs(init_pair, stacks.pairs),
      map_pairs(_moments.init_elementwise, stacks.others),
    )

  def update(stacks, state, step, **extra_args):
    del extra_args
    count = optax.safe_increment(state.count)
    numbers = (
      variance_at(noise_stddev, state.count),
      _one_minus_power(b1, count) if bias_correction else 1.0,
      _one_minus_power(b2, count),
    )

    def of_pair(frame, moments, tangent):
      now = options.of_step(frame.left_core.dtype, *numbers)
      return step_pair(moments, frame, tangent, now)

    def of_leaf(moments, gradient):
      now = options.of_step(gradient.dtype, *numbers)
      return _moments.elementwise_step(moments, gradient, now)

    pairs = map_ranks(of_pair, step.frames, state.pairs, stacks.pairs)
    others = map_pairs(of_leaf, state.others, stacks.others)
    out = Stacks(tuple(d for _, d in pairs), tuple(d for _, d in others))
    state = RankPreconditionerState(
      count, tuple(m for m, _ in pairs), tuple(m for m, _ in others)
    )
    return out, state

  return TangentTransformation(Stacked(name, init, update), layout)


def scale_by_rank_preconditioner(
  b1: Scalar = 0.9,
  b2: Scalar = 0.999,
  eps: Scalar = 1e-8,
  *,
  noise_stddev: StddevLike,
  floor_factor: Scalar = 1.0,
  bias_correction: bool = False,
  max_condition_number: Scalar = 1e4,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """Scales tangent coordinates by the inverse root of r x r second moments.

  Adam's idea in the rank space of each LoRA module (PRISM, arXiv:2606.00944,
  Eq. 24-27), written in orthonormal tangent coordinates, where the trajectory
  of ``Z`` has the same law in every gauge and the covariance of the noise in a
  private gradient is exactly ``s^2 I``. The state keeps the covariance of the
  noise in its second moments. This is a floor for their eigenvalues, so that
  the noise is never amplified by more than ``1 / (sqrt(floor_factor) s)`` (Eq.
  27: ``||U||_F^2 <= ||mu||_F^2 / floor``). Moments are carried from one tangent
  space to the next by vector transport. Leaves that are no factors get Adam
  with the same floor.

  With the core ``D = Q_L^T G Q_R`` and all of X noisy, for a module (m, n)::

    mu  <- b1 mu + (1 - b1) X
    V_L <- b2 V_L + (1 - b2) (X_L^T X_L + D^T D) / m     acts on X_L
    V_R <- b2 V_R + (1 - b2) X_R^T X_R / n               acts on X_R
    P    = (V / (1 - b2^t), its eigenvalues >= floor_factor * s^2)^(-1/2)

  and the direction is ``mu_L P_L`` and ``mu_R P_R``, for the core (it belongs
  to both sides) the mean of the two. Counting the core on both sides, the
  transport and the stored covariance are ours.

  **Privacy.** It reads only noisy values, so it is post-processing.

  =============================  ==============================================
  ``noise_stddev=0.0``           only the floor of ``max_condition_number``
  zero gradients from the start  zero direction, no 0 / 0, also for ``eps=0.0``
  factor zero or of lower rank   its hidden directions stay zero and count in no
                                 floor
  more steps than entries        the last entry of ``noise_stddev`` holds
  NaN or Inf comes in            the moments keep it: clip at the start of the
                                 chain
  bfloat16 parameters            moments and direction in float32
  =============================  ==============================================

  Args:
    b1: Decay of the first moment.
    b2: Decay of the second moments.
    eps: Added to the roots of the eigenvalues.
    noise_stddev: s, the standard deviation per coordinate of the noise in the
      incoming updates, in their unit (after a mean, ``noise_multiplier *
      l2_clip_norm / expected_batch_size``); a number, or one per step for
      correlated noise (after the last step its last entry holds). 0.0 for
      training without noise.
    floor_factor: The floor in units of the mean noise eigenvalue; 0 for none.
      Below 1 noise is amplified; 1 to 4 made no difference in our experiments.
    bias_correction: Divide the first moment by ``1 - b1^t``, as Adam does. This
      gives the first gradients, which are mostly noise, the weight of several
      later ones. Without it the steps grow over the first ``1 / (1 - b1)``,
      which acts as a warm-up.
    max_condition_number: Eigenvalues are raised to the largest over this.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation on trees in the shapes of the parameters; ``update``
    needs ``params``. The direction has entries of order one, whatever the unit
    of the input.

  Raises:
    ValueError: For arguments out of range; in ``init`` if both factors of a
      module are zero; in ``update`` without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = prism_optax.scale_by_rank_preconditioner(
    ...   noise_stddev=0.0, bias_correction=True)
    >>> grads = {'lora_a': jnp.array([[0.0], [3.0], [0.0]]),
    ...          'lora_b': jnp.array([[0.0, 2.0]])}
    >>> updates, _ = tx.update(grads, tx.init(params), params)
    >>> [round(float(jnp.linalg.norm(u)), 3) for u in updates.values()]
    [1.732, 1.414]
  """
  return preconditioner(
    'scale_by_rank_preconditioner',
    _moments.init_moments,
    _moments.step,
    Options(b1, b2, eps, floor_factor, max_condition_number),
    noise_stddev=noise_stddev,
    bias_correction=bias_correction,
    layout=layout,
  )
