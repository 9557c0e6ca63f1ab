"""The Gaussian mechanism on hidden states, at inference.

A query's hidden state is clipped, noised and only then handed to a party that
must learn little about the query, for example one that computes a LoRA delta
on it. The order is: pay (``accounting.PrivacyBudget.spend`` with
:func:`release_event`), privatise, release.
"""

from prism_optax.inference._calibration import (
  gaussian_stddev,
  hidden_state_sensitivity,
  release_event,
)
from prism_optax.inference._host import privatize_on_host
from prism_optax.inference._mechanism import lora_delta, privatize_hidden_states

# fmt: off
__all__ = [
  'gaussian_stddev', 'hidden_state_sensitivity', 'lora_delta',
  'privatize_hidden_states', 'privatize_on_host', 'release_event',
]
# fmt: on
