"""One call makes a training private: clip, noise, sampling and accounting.

:func:`make_private` keeps everything in agreement that an epsilon depends on:
the clip and the noise, the divisor, the batches and their padding, the number
of steps and the accounted event. The chain of transformations
(:mod:`prism_optax.transforms`) is for a step that you write yourself.
"""

from prism_optax._clip import QuantileClipping
from prism_optax._clip_rules import AutomaticClipping, GroupClipping
from prism_optax.training._make import make_private
from prism_optax.training._plan import plan
from prism_optax.training._private import PrivateTraining
from prism_optax.training._releases import ChangeOfVariables, Release
from prism_optax.training._sampling import Execution
from prism_optax.training._state import load_state, save_state

# fmt: off
__all__ = [
  'AutomaticClipping', 'ChangeOfVariables', 'Execution', 'GroupClipping',
  'PrivateTraining', 'QuantileClipping', 'Release', 'load_state',
  'make_private', 'plan', 'save_state',
]
# fmt: on
