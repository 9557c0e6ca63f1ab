"""Privacy accounting on the host: events, epsilon, calibration.

Nothing in here imports JAX: the numbers are Python floats, and an accountant
can run where there is no accelerator.
"""

from dp_accounting import NeighboringRelation

from prism_optax.accounting._calibration import calibrate_noise_multiplier
from prism_optax.accounting._dpsgd import (
  dpsgd_event,
  epsilon,
  joint_noise_multiplier,
  privacy_statement,
)

__all__ = [
  'NeighboringRelation',
  'calibrate_noise_multiplier',
  'dpsgd_event',
  'epsilon',
  'joint_noise_multiplier',
  'privacy_statement',
]
