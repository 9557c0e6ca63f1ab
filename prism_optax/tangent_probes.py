"""Gradients in tangent coordinates without whitening."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import fixed_rank, lora
from prism_optax._linalg import matmul
from prism_optax.fixed_rank import Factors, Tangent
from prism_optax.lora import Blocks


class TangentProbes(NamedTuple):
  """What :func:`tangent_probes` returns.

  Attributes:
    zeros: Tree in the shapes of the parameters: where to differentiate.
    attach: ``attach(probes)``, the parameters to run the model with: factors
      of twice the rank, in the types of the parameters.
    coordinates: ``coordinates(gradients)``, from one example's gradients with
      respect to the probes to tangent coordinates.
  """

  zeros: Any
  attach: Callable[[Any], Any]
  coordinates: Callable[[Any], Any]


def tangent_probes(params: Any, *, layout: Any = None) -> TangentProbes:
  """Differentiates the loss in tangent coordinates themselves.

  ``left = [Q_L, U]`` and ``right = [R C_L^T + V, Q_R]`` have the product ``Z``
  at ``U = V = 0``, and there the gradients with respect to U and V are
  ``G Q_R`` and ``G^T Q_L``: the coordinates of :func:`tangent_coordinates`
  (PRISM, arXiv:2606.00944, Eq. 13) before the projection by ``I - P_L``,
  without ``C^-1`` anywhere. So they are exact at any condition of the factors,
  and in bfloat16, where whitening a rounded gradient costs three digits. The
  probes are ours.

  The model runs with factors of rank 2r and takes the rank from their shapes; a
  model that computes alpha / r from a shape must be told r. Other leaves are
  probed by an additive offset, in their own shape. As with
  :func:`tangent_coordinates` nothing is clipped or private here.

  ========================  ===================================================
  one factor zero           the gradient of what it hides is zero
  factor of lower rank      likewise, in the directions that it has lost
  bfloat16 parameters       probes and coordinates in float32, the model in
                            bfloat16
  alpha over a shape's r    half of Z: the factors have 2r columns
  NaN or Inf in a gradient  passes: the clip behind decides
  ========================  ===================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    Zeros, the map to model parameters, and the map from gradients, in the
    shapes of the parameters, (m, r) and (n, r) in the library's own layout.

  Raises:
    ValueError: If pairs cannot be found, or the probes do not fit.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.ones((1, 2))}
    >>> loss = lambda p, x: jnp.sum((x @ p['lora_a'] @ p['lora_b']) ** 2)
    >>> probes = prism_optax.tangent_probes(params)
    >>> probed = lambda p, x: loss(probes.attach(p), x)
    >>> batch = jnp.ones((4, 3))
    >>> grads = jax.vmap(jax.grad(probed), (None, 0))(probes.zeros, batch)
    >>> coordinates = jax.vmap(probes.coordinates)(grads)
    >>> coordinates['lora_a'].shape
    (4, 3, 1)
  """
  adapters = lora.Adapters(params, layout)
  frames = adapters.frames(params)
  others = adapters.coordinates(params).others
  types = jax.tree.map(lambda x: x.dtype, params)

  def attach(probes: Any) -> Any:
    blocks = adapters.coordinates(probes, 'probes')

    def widen(frame: fixed_rank.Frame, probe: Tangent) -> Factors:
      # Z = Q_L (R C_L^T)^T, and R = Q_R C_R.
      core = matmul(frame.right_core, frame.left_core.mT)
      balanced = jax.lax.stop_gradient(matmul(frame.right, core))
      return Factors(
        jnp.concatenate([frame.left, probe.left], -1),
        jnp.concatenate([balanced + probe.right, frame.right], -1),
      )

    pairs = lora.map_pairs(widen, frames, blocks.pairs)
    offset = tuple(x + y for x, y in zip(others, blocks.others, strict=True))
    # The model multiplies by the scale again.
    tree = adapters.tree(Blocks(pairs, offset), -0.5, rank_multiple=2)
    return jax.tree.map(lambda x, dtype: x.astype(dtype), tree, types)

  def coordinates(gradients: Any) -> Any:
    blocks = adapters.coordinates(gradients, 'gradients')
    pairs = lora.map_pairs(fixed_rank.project, frames, blocks.pairs)
    return adapters.tree(Blocks(pairs, blocks.others))

  zeros = adapters.tree(
    jax.tree.map(jnp.zeros_like, adapters.coordinates(params))
  )
  return TangentProbes(zeros, attach, coordinates)
