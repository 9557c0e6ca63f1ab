"""Differentially private training of LoRA adapters with optax."""

from prism_optax import accounting as accounting
from prism_optax import diagnostics as diagnostics
from prism_optax import fixed_rank as fixed_rank
from prism_optax import inference as inference
from prism_optax import lora as lora
from prism_optax import orthogonalization as orthogonalization
from prism_optax.aliases import dp_muon as dp_muon
from prism_optax.aliases import prism as prism
from prism_optax.augmented import AugmentedState as AugmentedState
from prism_optax.augmented import augmented_optimizer as augmented_optimizer
from prism_optax.clipping import intrinsic_clip as intrinsic_clip
from prism_optax.clipping import tangent_coordinates as tangent_coordinates
from prism_optax.correlated_noise import (
  CorrelatedPrivatizerState as CorrelatedPrivatizerState,
)
from prism_optax.correlated_noise import (
  correlated_noise_stddev as correlated_noise_stddev,
)
from prism_optax.correlated_noise import (
  correlated_tangent_privatizer as correlated_tangent_privatizer,
)
from prism_optax.noise_addition import (
  ForeignPrivatizerState as ForeignPrivatizerState,
)
from prism_optax.noise_addition import (
  TangentPrivatizerState as TangentPrivatizerState,
)
from prism_optax.noise_addition import tangent_privatizer as tangent_privatizer
from prism_optax.orthogonal_tangents import (
  orthogonalize_tangents as orthogonalize_tangents,
)
from prism_optax.orthogonal_updates import BiasCorrection as BiasCorrection
from prism_optax.orthogonal_updates import (
  OrthogonalizeState as OrthogonalizeState,
)
from prism_optax.orthogonal_updates import orthogonalize as orthogonalize
from prism_optax.per_matrix_clipping import clip_each_matrix as clip_each_matrix
from prism_optax.per_matrix_clipping import per_matrix_clip as per_matrix_clip
from prism_optax.preconditioning import (
  RankPreconditionerState as RankPreconditionerState,
)
from prism_optax.preconditioning import (
  scale_by_rank_preconditioner as scale_by_rank_preconditioner,
)
from prism_optax.retraction import retract as retract
from prism_optax.tangent_probes import TangentProbes as TangentProbes
from prism_optax.tangent_probes import tangent_probes as tangent_probes
from prism_optax.weight_decay import add_decayed_factors as add_decayed_factors

__version__ = '0.1.0'
