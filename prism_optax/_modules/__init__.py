"""LoRA pairs in trees of parameters: finding them, and stacking their arrays.

A tree of trainable parameters holds pairs of low-rank factors and perhaps
other leaves (a classification head). This package finds the pairs from names
and shapes, or takes them from a ``layout``, and moves between the tree and
stacked arrays on which :mod:`prism_optax.fixed_rank` works. Users meet it
through :mod:`prism_optax.lora`.
"""

from prism_optax._modules._finding import (
  LayoutLike,
  Module,
  describe_pairs,
  find_modules,
  pairs_by_name,
  path_name,
)
from prism_optax._modules._layout import Layout, LeafAxes, MatrixAxes, Pair
from prism_optax._modules._tree import (
  ModuleArrays,
  ModuleTree,
  Stacks,
  map_pairs,
)

# fmt: off
__all__ = [
  'Layout', 'LayoutLike', 'LeafAxes', 'MatrixAxes', 'Module', 'ModuleArrays',
  'ModuleTree', 'Pair', 'Stacks', 'describe_pairs', 'find_modules',
  'map_pairs', 'pairs_by_name', 'path_name',
]
# fmt: on
