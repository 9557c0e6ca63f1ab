"""The last step of a chain: back to the manifold."""

from typing import Any

import optax

from prism_optax import _validate, fixed_rank, lora
from prism_optax.lora import Blocks


def retract(
  *, method: str = 'svd', align: bool = False, layout: Any = None
) -> optax.GradientTransformation:
  """Turns steps in tangent coordinates into updates of the factors.

  Comes last in a chain and returns ``new_params - params``, so that
  ``optax.apply_updates`` lands on the best rank-r approximation of ``Z + T``
  (PRISM, arXiv:2606.00944, Eq. 22), in the balanced SVD gauge. The incoming
  updates are added: the learning rate before it carries the minus. Leaves that
  are no factors pass unchanged.

  Between the clip and this transformation coordinates turn with the frames
  from step to step. Only transformations that commute with rotations of the
  rank index and keep no memory make sense there: scaling, schedules,
  ``optax.clip_by_global_norm``; not ``optax.scale_by_adam``, ``optax.trace`` or
  ``optax.add_decayed_weights`` (see :func:`scale_by_rank_preconditioner` and
  :func:`add_decayed_factors`).

  It only reads what is already private: post-processing.

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
    method: ``'svd'``, or ``'second_order'``: no SVD, the same to third order in
      the step, with the SVD as a fallback for large steps.
    align: Turn the new factors towards the old ones. It costs orthogonal
      columns, and with them the cheap frames.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation without state; ``update`` needs ``params``.

  Raises:
    ValueError: For an unknown ``method``; in ``init`` if both factors of a
      module are zero; in ``update`` without ``params``.

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
  return lora.chain_parts(retract_part(method, align), layout=layout)


def retract_part(method: str, align: bool = False) -> lora.Part:
  """:func:`retract` on blocks: from coordinates to new factors."""
  _validate.one_of('method', method, ('svd', 'second_order'))

  def update(blocks, state, point, **extra_args):
    del extra_args
    pairs = lora.map_pairs(
      lambda frame, tangent: fixed_rank.retract(
        frame, tangent, method=method, align=align
      ),
      point.frames,
      blocks.pairs,
    )
    return Blocks(pairs, blocks.others), state

  def write(adapters, blocks, params):
    return adapters.steps(blocks.pairs, params, blocks.others)

  return lora.Part('retract', lora.stateless, update, write=write, lazy=True)
