"""Weight decay of the matrix that a pair of factors stands for."""

from typing import Any

import optax

from prism_optax import _validate, fixed_rank, lora
from prism_optax._linalg import matmul
from prism_optax.lora import Blocks


def add_decayed_factors(
  weight_decay: Any, *, layout: Any = None
) -> optax.GradientTransformation:
  """Adds ``weight_decay * Z`` to steps in tangent coordinates.

  Z is a tangent vector at itself: ``X_R += weight_decay * R C_L^T``, exactly.
  So it decays the weight that the model sees, in any gauge; decaying the two
  factors would not. Place it between the preconditioner and the learning rate.
  Leaves that are no factors are not decayed. Ours; the identity is PRISM's
  projection (arXiv:2606.00944, Eq. 13) of ``G = Z``. It reads the parameters,
  which are released already: post-processing.

  =====================  ======================================================
  ``weight_decay=0.0``   updates pass unchanged
  one factor zero        Z is zero, nothing is added
  bfloat16 parameters    computed in float32
  =====================  ======================================================

  Args:
    weight_decay: Share of Z that a step of learning rate 1 takes away. Not
      negative. May be traced.
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
  part = add_decayed_factors_part(weight_decay)
  return lora.chain_parts(part, layout=layout)


def add_decayed_factors_part(weight_decay: Any) -> lora.Part:
  """:func:`add_decayed_factors` on blocks."""
  _validate.non_negative('weight_decay', weight_decay)

  def decayed(frame, tangent):
    # R C_L^T with R = Q_R C_R.
    core = matmul(frame.right_core, frame.left_core.mT)
    x = fixed_rank.combination(frame, tangent)
    shift = x.shift.right
    z = weight_decay * core
    z = z if shift is None else shift + z
    return x._replace(shift=x.shift._replace(right=z))

  def update(blocks, state, point, **extra_args):
    del extra_args
    pairs = lora.map_pairs(decayed, point.frames, blocks.pairs)
    return Blocks(pairs, blocks.others), state

  return lora.Part('add_decayed_factors', lora.stateless, update, lazy=True)
