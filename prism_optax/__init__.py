"""Differentially private training of LoRA adapters with optax."""

from prism_optax import (
  accounting,
  diagnostics,
  fixed_rank,
  inference,
  lora,
  muon,
  training,
  transforms,
)
from prism_optax.aliases import dp_muon, prism, published_prism
from prism_optax.transforms import (
  add_decayed_factors,
  chain,
  correlated_tangent_privatizer,
  intrinsic_clip,
  per_matrix_clip,
  retract,
  scale_by_learning_rate,
  scale_by_rank_preconditioner,
  tangent_coordinates,
  tangent_privatizer,
)

__version__ = '0.1.0'

# fmt: off
__all__ = [
  'accounting', 'add_decayed_factors', 'chain',
  'correlated_tangent_privatizer', 'diagnostics', 'dp_muon', 'fixed_rank',
  'inference', 'intrinsic_clip', 'lora', 'muon', 'per_matrix_clip', 'prism',
  'published_prism', 'retract', 'scale_by_learning_rate',
  'scale_by_rank_preconditioner', 'tangent_coordinates', 'tangent_privatizer',
  'training', 'transforms',
]
# fmt: on
