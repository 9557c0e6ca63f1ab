"""Per-example gradients that are tangent coordinates from the start."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import fixed_rank
from prism_optax._linalg._products import matmul
from prism_optax._modules import LayoutLike, StepContext
from prism_optax._types import ArrayTree
from prism_optax.fixed_rank import Factors, Tangent
from prism_optax.fixed_rank._points import Frame


class TangentProbes(NamedTuple):
  """What :func:`tangent_probes` returns.

  Attributes:
    zeros: Tree in the shapes of the parameters: where to differentiate.
    attach: ``attach(probes)``, the parameters to run the model with: factors
      of twice the rank, in the types of the parameters.
    coordinates: ``coordinates(gradients)``, from one example's gradients with
      respect to the probes to tangent coordinates.
  """

  zeros: ArrayTree
  attach: Callable[[ArrayTree], ArrayTree]
  coordinates: Callable[[ArrayTree], ArrayTree]


def tangent_probes(
  params: ArrayTree, *, layout: LayoutLike = None
) -> TangentProbes:
  """Differentiates the loss in tangent coordinates themselves.

  ``left = [Q_L, U]`` and ``right = [R C_L^T + V, Q_R]`` have the product ``Z``
  at ``U = V = 0``, and there the gradients with respect to U and V are
  ``G Q_R`` and ``G^T Q_L``: the coordinates of
  :func:`prism_optax.tangent_coordinates` (PRISM, arXiv:2606.00944, Eq. 13)
  before the projection by ``I - P_L``, without ``C^-1`` anywhere. So they are
  exact at any condition of the factors, and in bfloat16, where whitening a
  rounded gradient costs three digits. The probes are ours.

  The model runs with factors of rank 2r and takes the rank from their shapes; a
  model that computes alpha / r from a shape must be told r. Other leaves are
  probed by an additive offset, in their own shape. As with
  :func:`prism_optax.tangent_coordinates` nothing is clipped or private here.

  ========================  ===================================================
  one factor zero           the gradient of what it hides is zero
  factor of lower rank      likewise, in the directions that it has lost
  bfloat16 parameters       probes and coordinates in float32, the model in
                            bfloat16
  alpha over a shape's r    half of Z: the factors have 2r columns
  NaN or Inf in a gradient  passes: the clip after it decides
  ========================  ===================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    ``zeros``, a tree in the shapes of the parameters, at which to
    differentiate. ``attach(probes)``, the parameters to run the model with:
    factors of twice the rank, in the types of the parameters.
    ``coordinates(gradients)``, from one example's gradients with respect to the
    probes to tangent coordinates, in the shapes of the parameters.

  Raises:
    ValueError: If pairs cannot be found, or the probes do not fit.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import contrib
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.ones((1, 2))}
    >>> loss = lambda p, x: jnp.sum((x @ p['lora_a'] @ p['lora_b']) ** 2)
    >>> probes = contrib.tangent_probes(params)
    >>> probed = lambda p, x: loss(probes.attach(p), x)
    >>> batch = jnp.ones((4, 3))
    >>> grads = jax.vmap(jax.grad(probed), (None, 0))(probes.zeros, batch)
    >>> coordinates = jax.vmap(probes.coordinates)(grads)
    >>> coordinates['lora_a'].shape
    (4, 3, 1)
  """
  step = StepContext(params, layout)
  tree, frames = step.tree, step.frames
  others = tree.coordinates(params).others
  types = jax.tree.map(lambda x: x.dtype, params)

  def attach(probes: ArrayTree) -> ArrayTree:
    stacks = tree.coordinates(probes, 'probes')

    def widen(probe: Tangent, frame: Frame) -> Factors:
      # Z = Q_L (R C_L^T)^T, and R = Q_R C_R.
      core = matmul(frame.right_core, frame.left_core.mT)
      balanced = jax.lax.stop_gradient(matmul(frame.right, core))
      return Factors(
        jnp.concatenate([frame.left, probe.left], -1),
        jnp.concatenate([balanced + probe.right, frame.right], -1),
      )

    offset = tuple(x + y for x, y in zip(others, stacks.others, strict=True))
    wide = stacks.map_pairs(widen, frames)._replace(others=offset)
    # The model multiplies by the scale again.
    attached = tree.tree(wide, -0.5)
    return jax.tree.map(lambda x, dtype: x.astype(dtype), attached, types)

  def coordinates(gradients: ArrayTree) -> ArrayTree:
    stacks = tree.coordinates(gradients, 'gradients')
    return tree.tree(
      stacks.map_pairs(lambda x, frame: fixed_rank.project(frame, x), frames)
    )

  zeros = tree.tree(jax.tree.map(jnp.zeros_like, tree.coordinates(params)))
  return TangentProbes(zeros, attach, coordinates)
