"""From a direction to new factors: decay, learning rate, retraction."""

import functools

import jax.numpy as jnp
import optax

from prism_optax import _validate, fixed_rank
from prism_optax._linalg._products import matmul
from prism_optax._modules import LayoutLike
from prism_optax._types import Scalar, ScalarOrSchedule
from prism_optax.fixed_rank._points import map_ranks
from prism_optax.fixed_rank._tangents import TangentSum, as_sum, scaled
from prism_optax.transforms._chain import (
  Stacked,
  TangentTransformation,
  no_state,
)


def add_decayed_factors(
  weight_decay: Scalar, *, layout: LayoutLike = None
) -> TangentTransformation:
  """Adds ``weight_decay * Z`` to steps in tangent coordinates.

  Z is a tangent vector at itself: ``X_R += weight_decay * R C_L^T``, exactly.
  So it decays the weight that the model uses, in any gauge; decaying the two
  factors would not. Place it between the preconditioner and the learning rate.
  Leaves that are no factors are not decayed. Ours; the identity is PRISM's
  projection (arXiv:2606.00944, Eq. 13) of ``G = Z``.

  **Privacy.** It reads the parameters, which are released already, so it is
  post-processing.

  =====================  ======================================================
  ``weight_decay=0.0``   updates pass unchanged
  one factor zero        Z is zero, nothing is added
  bfloat16 parameters    computed in float32
  =====================  ======================================================

  Args:
    weight_decay: Share of Z that a step of learning rate 1 takes away. It must
      not be negative and may be traced.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation without state; ``update`` needs ``params``.

  Raises:
    ValueError: If ``weight_decay`` is negative; in ``init`` if both factors of
      a module are zero; in ``update`` without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.array([[0.0, 2.0]])}
    >>> tx = prism_optax.add_decayed_factors(0.1)
    >>> updates, _ = tx.update(optax.tree.zeros_like(params), tx.init(params),
    ...                        params)
    >>> updates['lora_a'].ravel().round(3).tolist()  # 0.1 ||Z|| = 0.2
    [0.20000000298023224, 0.0, 0.0]
  """
  _validate.non_negative('weight_decay', weight_decay)

  def decayed(frame, tangent):
    # R C_L^T with R = Q_R C_R.
    core = matmul(frame.right_core, frame.left_core.mT)
    left, right = as_sum(frame, tangent)
    return TangentSum(left, right.shifted(weight_decay * core))

  def update(stacks, state, step, **extra_args):
    del extra_args
    pairs = map_ranks(decayed, step.frames, stacks.pairs)
    return stacks._replace(pairs=pairs), state

  return TangentTransformation(
    Stacked('add_decayed_factors', no_state, update), layout
  )


def scale_by_learning_rate(
  learning_rate: ScalarOrSchedule, *, layout: LayoutLike = None
) -> TangentTransformation:
  """Multiplies updates by minus the learning rate.

  ``optax.scale_by_learning_rate``, with a stacked form: in a chain it
  multiplies r x r matrices in place of dense coordinates.

  **Privacy.** It reads only noisy values, so it is post-processing.

  Args:
    learning_rate: A number, or a schedule: a function of the number of updates
      so far. May be traced.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation with the state of optax's.

  Raises:
    ValueError: In ``init`` if both factors of a module are zero; in ``update``
      without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.array([[0.0, 2.0]])}
    >>> tx = prism_optax.scale_by_learning_rate(0.5)
    >>> tx.update(params, tx.init(params), params)[0]['lora_b'].tolist()
    [[-0.0, -1.0]]
  """
  scale = optax.scale_by_learning_rate(learning_rate)

  def init(step):
    return scale.init(step.params)

  def update(stacks, state, step, **extra_args):
    del step, extra_args
    factor, state = scale.update(jnp.ones(()), state)
    return scaled(stacks, factor), state

  return TangentTransformation(
    Stacked('scale_by_learning_rate', init, update), layout
  )


def retract(
  *, align: bool = False, layout: LayoutLike = None
) -> TangentTransformation:
  """Turns steps in tangent coordinates into updates of the factors.

  Comes last in a chain and returns ``new_params - params``, so that
  ``optax.apply_updates`` lands on the best rank-r approximation of ``Z + T``
  (PRISM, arXiv:2606.00944, Eq. 22), in the balanced SVD gauge. It adds the
  incoming updates, so the learning rate before it must carry the minus. Leaves
  that are no factors pass unchanged.

  Between the clip and this transformation coordinates turn with the frames
  from step to step. Only transformations that commute with rotations of the
  rank index and keep no memory make sense there: scaling, schedules,
  ``optax.clip_by_global_norm``; not ``optax.scale_by_adam``, ``optax.trace`` or
  ``optax.add_decayed_weights`` (see :func:`scale_by_rank_preconditioner` and
  :func:`add_decayed_factors`).

  **Privacy.** It reads only noisy values, so it is post-processing.

  ============================  ===============================================
  step of exactly zero          the factors stay, up to rounding
  one factor zero               the step is one-sided: the other one keeps its
                                column space
  ``Z + T`` of rank below r     lost columns are zero on one side and keep old
                                directions on the other: they can be used again
  both factors zero             ValueError in ``init``, where values are known
  bfloat16 parameters           updates in float32; small ones are lost where
                                ``optax.apply_updates`` adds them
  NaN or Inf in the step        NaN in both factors of that module
  ============================  ===============================================

  Args:
    align: Turn the new factors towards the old ones. The new columns are then
      no longer orthogonal, and the next frames cost more.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation without state; ``update`` needs ``params``.

  Raises:
    ValueError: In ``init`` if both factors of a module are zero; in ``update``
      without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
    >>> step = {'lora_a': jnp.zeros((3, 1)), 'lora_b': jnp.array([[0.0, 4.0]])}
    >>> tx = prism_optax.retract()
    >>> updates, _ = tx.update(step, tx.init(params), params)
    >>> new = optax.apply_updates(params, updates)
    >>> print(abs(new['lora_a'] @ new['lora_b']).round(3))
    [[0. 4.]
     [0. 0.]
     [0. 0.]]
  """

  def update(stacks, state, step, **extra_args):
    del extra_args
    of_rank = functools.partial(fixed_rank.retraction, align=align)
    new = map_ranks(of_rank, step.frames, stacks.pairs)
    return step.tree.steps(stacks._replace(pairs=new), step.params), state

  return TangentTransformation(
    Stacked('retract', no_state, update, ('retraction',)), layout
  )
