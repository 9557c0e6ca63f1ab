"""The transformations, in the order in which they see the data.

Per-example gradients become tangent coordinates (:func:`tangent_coordinates`),
are clipped and summed (:func:`intrinsic_clip`, :func:`per_matrix_clip`), get
noise (:func:`tangent_privatizer`, :func:`correlated_tangent_privatizer`),
become a direction (:func:`scale_by_rank_preconditioner`,
:func:`adapt_step_size`), and lead to new factors (:func:`add_decayed_factors`,
:func:`scale_by_learning_rate`, :func:`retract`).
:func:`chain` fuses them; :func:`tangent_transformation` makes one of your own.
"""

from prism_optax.transforms._augmented import augmented_optimizer
from prism_optax.transforms._chain import chain, tangent_transformation
from prism_optax.transforms._correlated import (
  correlated_noise_stddev,
  correlated_tangent_privatizer,
)
from prism_optax.transforms._declared import (
  clipped_elsewhere,
  noised_elsewhere,
)
from prism_optax.transforms._descent import (
  add_decayed_factors,
  retract,
  scale_by_learning_rate,
)
from prism_optax.transforms._intrinsic_clip import (
  intrinsic_clip,
  tangent_coordinates,
)
from prism_optax.transforms._matrix_clip import (
  per_matrix_clip,
  split_noise_multiplier,
)
from prism_optax.transforms._orthogonalize import orthogonalize
from prism_optax.transforms._privatizer import tangent_privatizer
from prism_optax.transforms._published import scale_by_published_preconditioner
from prism_optax.transforms._rank_preconditioner import (
  scale_by_rank_preconditioner,
)
from prism_optax.transforms._step_size import adapt_step_size

# fmt: off
__all__ = [
  'adapt_step_size', 'add_decayed_factors', 'augmented_optimizer', 'chain',
  'clipped_elsewhere', 'correlated_noise_stddev',
  'correlated_tangent_privatizer', 'intrinsic_clip',
  'noised_elsewhere', 'orthogonalize', 'per_matrix_clip', 'retract',
  'scale_by_learning_rate', 'scale_by_published_preconditioner',
  'scale_by_rank_preconditioner', 'split_noise_multiplier',
  'tangent_coordinates', 'tangent_privatizer', 'tangent_transformation',
]
# fmt: on
