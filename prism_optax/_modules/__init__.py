"""LoRA pairs in trees of parameters: finding them, and stacking their arrays.

A tree of trainable parameters holds pairs of low-rank factors and perhaps
other leaves (a classification head). This package finds the pairs from names
and shapes, or takes them from a ``layout``, and moves between the tree and
stacked arrays on which :mod:`prism_optax.fixed_rank` works. Users meet it
through :mod:`prism_optax.lora`.
"""

from prism_optax._modules._finding import (
  LayoutLike,
  describe_pairs,
  find_modules,
  named_leaves,
  other_leaves,
  pairs_by_name,
  warn_if_mostly_no_adapters,
)
from prism_optax._modules._layout import (
  Layout,
  Module,
  Pair,
  inverse,
)
from prism_optax._modules._tree import (
  ClippedSum,
  ModuleTree,
  Stacks,
  StepContext,
  map_factors,
  map_pairs,
)

# fmt: off
__all__ = [
  'ClippedSum', 'Layout', 'LayoutLike', 'Module', 'ModuleTree', 'Pair',
  'Stacks', 'StepContext', 'describe_pairs', 'find_modules', 'inverse',
  'map_factors', 'map_pairs', 'named_leaves', 'other_leaves', 'pairs_by_name',
  'warn_if_mostly_no_adapters',
]
# fmt: on
