"""Privacy accounting on the host: events, epsilon, calibration, budgets.

Nothing here imports JAX: the numbers are Python floats, so accounting can run
without an accelerator.
"""

from dp_accounting import NeighboringRelation

from prism_optax.accounting._budget import BudgetExceeded, PrivacyBudget
from prism_optax.accounting._calibration import calibrate_noise_multiplier
from prism_optax.accounting._epsilon import epsilon, privacy_statement
from prism_optax.accounting._events import dpsgd_event, joint_noise_multiplier
from prism_optax.accounting._gaussian import gaussian_epsilon
from prism_optax.accounting._matrix_mechanism import (
  calibrate_matrix_mechanism,
  matrix_mechanism_event,
)

# fmt: off
__all__ = [
  'BudgetExceeded', 'NeighboringRelation', 'PrivacyBudget',
  'calibrate_matrix_mechanism', 'calibrate_noise_multiplier', 'dpsgd_event',
  'epsilon', 'gaussian_epsilon',
  'joint_noise_multiplier', 'matrix_mechanism_event', 'privacy_statement',
]
# fmt: on
