"""Adaptive steps in rank space with a floor at the known noise level."""

from prism_optax.preconditioning._transform import (
  RankPreconditionerState as RankPreconditionerState,
)
from prism_optax.preconditioning._transform import (
  rank_preconditioner_part as rank_preconditioner_part,
)
from prism_optax.preconditioning._transform import (
  scale_by_rank_preconditioner as scale_by_rank_preconditioner,
)
