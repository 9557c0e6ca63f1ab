"""Tools for trees of LoRA adapters: to start, read, change, exchange them.

A tree of trainable parameters holds pairs of low-rank factors and perhaps other
leaves (a classification head). The library finds pairs by their names and
shapes, or takes them from a ``layout``; :func:`describe_pairs` shows them.
"""

from prism_optax._modules import Layout, Pair, describe_pairs, pairs_by_name
from prism_optax.lora._adding import add_adapters
from prism_optax.lora._gradients import (
  in_microbatches,
  per_example_gradients,
  per_example_product,
)
from prism_optax.lora._initialization import (
  canonicalize,
  initialize,
  spectral_residual,
)
from prism_optax.lora._merging import deltas, merge
from prism_optax.lora._peft import from_peft, load_peft, save_peft
from prism_optax.lora._ranks import difference, truncate
from prism_optax.lora._stacking import stack, unstack

# fmt: off
__all__ = [
  'Layout', 'Pair', 'add_adapters', 'canonicalize', 'deltas', 'describe_pairs',
  'difference', 'from_peft', 'in_microbatches', 'initialize', 'load_peft',
  'merge', 'pairs_by_name', 'per_example_gradients', 'per_example_product',
  'save_peft', 'spectral_residual', 'stack', 'truncate', 'unstack',
]
# fmt: on
