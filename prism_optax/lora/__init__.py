"""LoRA pairs in parameter trees: finding them, and geometry over all of them.

A tree of trainable parameters holds pairs of low-rank factors and perhaps
other leaves (a classification head). This package finds the pairs from names
and shapes, or takes them from a ``layout``, and moves between the tree and
stacked arrays on which :mod:`prism_optax.fixed_rank` works.
"""

from prism_optax.lora._adapters import Adapters as Adapters
from prism_optax.lora._averaging import EmaState as EmaState
from prism_optax.lora._averaging import ema as ema
from prism_optax.lora._batched_backward import (
  per_example_gradients as per_example_gradients,
)
from prism_optax.lora._batched_backward import (
  per_example_product as per_example_product,
)
from prism_optax.lora._blocks import Blocks as Blocks
from prism_optax.lora._blocks import ModuleArrays as ModuleArrays
from prism_optax.lora._blocks import map_pairs as map_pairs
from prism_optax.lora._blocks import multiply_out as multiply_out
from prism_optax.lora._blocks import to_coordinates as to_coordinates
from prism_optax.lora._canonicalize import canonicalize as canonicalize
from prism_optax.lora._gradient_norms import (
  columns_are_orthogonal as columns_are_orthogonal,
)
from prism_optax.lora._gradient_norms import (
  squared_gradient_norms as squared_gradient_norms,
)
from prism_optax.lora._initialization import initialize as initialize
from prism_optax.lora._initialization import (
  spectral_residual as spectral_residual,
)
from prism_optax.lora._intrinsic import intrinsic as intrinsic
from prism_optax.lora._layout import Layout as Layout
from prism_optax.lora._layout import Pair as Pair
from prism_optax.lora._merging import Kernel as Kernel
from prism_optax.lora._merging import merge as merge
from prism_optax.lora._merging import unmerge as unmerge
from prism_optax.lora._pairs import describe_pairs as describe_pairs
from prism_optax.lora._pairs import pairs_by_name as pairs_by_name
from prism_optax.lora._parts import Part as Part
from prism_optax.lora._parts import Point as Point
from prism_optax.lora._parts import chain_parts as chain_parts
from prism_optax.lora._parts import part_from_optax as part_from_optax
from prism_optax.lora._parts import scaling_part as scaling_part
from prism_optax.lora._parts import stateless as stateless
from prism_optax.lora._peft import PeftAdapter as PeftAdapter
from prism_optax.lora._peft import from_peft as from_peft
from prism_optax.lora._peft import load_peft as load_peft
from prism_optax.lora._peft import save_peft as save_peft
from prism_optax.lora._rank_changes import difference as difference
from prism_optax.lora._rank_changes import pad_rank as pad_rank
from prism_optax.lora._rank_changes import truncate as truncate
