"""What the adapters add to the weights: the variable that is trained."""

from typing import Any

import jax

from prism_optax import _modules
from prism_optax._linalg import matmul
from prism_optax._modules import ModuleTree
from prism_optax.fixed_rank import Factors


def intrinsic(
  params: Any, *, layout: _modules.LayoutLike = None, dense: bool = False
) -> dict[str, Any]:
  """``Z = scale * left @ right.mT`` of each module, by name.

  The same for all gauges of the factors; what clip, noise and learning rate
  act on. It reads parameters and no data: post-processing.

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    layout: See :func:`prism_optax.lora.describe_pairs`. Without it the scale
      is 1.
    dense: Multiply the factors out: arrays ``(*stack, m, n)`` in place of
      ``fixed_rank.Factors`` of ``(*stack, m, r)`` and ``(*stack, n, r)``.

  Returns:
    Outputs m come first and inputs n last, whatever the library's orientation
    is; several output or input axes are flattened in their order. The scale is
    shared out as its square root on either factor. In float32 at least.

  Raises:
    ValueError: If pairs cannot be found.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'dense': {'lora_a': jnp.ones((6, 2)),
    ...                     'lora_b': jnp.ones((2, 5))}}
    >>> lora.intrinsic(params)['dense'].left.shape
    (5, 2)
    >>> layout = {'dense': lora.Layout(scale=4.0)}
    >>> z = lora.intrinsic(params, layout=layout, dense=True)
    >>> z['dense'].shape, float(z['dense'][0, 0])
    ((5, 6), 8.0)
  """
  adapters = ModuleTree(params, layout)
  pairs = adapters.factors(params).pairs
  left, right = (
    adapters.by_module([getattr(pair, side) for pair in pairs])
    for side in ('left', 'right')
  )
  factors = {name: Factors(left[name], right[name]) for name in left}
  if not dense:
    return factors
  return jax.tree.map(
    lambda pair: matmul(pair.left, pair.right.mT),
    factors,
    is_leaf=lambda x: isinstance(x, Factors),
  )
