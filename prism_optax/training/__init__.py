"""One call makes a training private: clip, noise, sampling and accounting.

:func:`make_private` owns what has to agree for an epsilon to be right: the clip
and the noise, the divisor, the batches and their padding, the number of steps
and the event that is accounted. The chain of transformations
(:mod:`prism_optax.transforms`) is for those who put these together themselves.
"""

from prism_optax.training._clipping import (
  AutomaticClipping,
  FlatClipping,
  GroupClipping,
  QuantileClipping,
)
from prism_optax.training._make import make_private
from prism_optax.training._private import PrivateTraining, TrainingState
from prism_optax.training._releases import ChangeOfVariables, Release
from prism_optax.training._sampling import Batch, Batches

# fmt: off
__all__ = [
  'AutomaticClipping', 'Batch', 'Batches', 'ChangeOfVariables', 'FlatClipping',
  'GroupClipping', 'PrivateTraining', 'QuantileClipping', 'Release',
  'TrainingState', 'make_private',
]
# fmt: on
