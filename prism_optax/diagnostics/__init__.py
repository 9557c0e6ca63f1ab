"""Measures of gauge dependence, noise and preconditioning.

They tell why DP-SGD on LoRA factors fails and how PRISM behaves (the three
issues of arXiv:2606.00944). What is computed from raw per-example values is
named ``nonprivate_*``: it is not covered by any guarantee, so compute it on
public data, or do not let it out. The rest reads parameters, shapes and states
of optimizers, which are already private.
"""

from prism_optax.diagnostics._batches import ClipStatistics as ClipStatistics
from prism_optax.diagnostics._batches import (
  nonprivate_clip_statistics as nonprivate_clip_statistics,
)
from prism_optax.diagnostics._batches import (
  nonprivate_signal_to_noise as nonprivate_signal_to_noise,
)
from prism_optax.diagnostics._independence import (
  depends_on_other_examples as depends_on_other_examples,
)
from prism_optax.diagnostics._noise import (
  FactorNoiseEnergy as FactorNoiseEnergy,
)
from prism_optax.diagnostics._noise import change_norms as change_norms
from prism_optax.diagnostics._noise import (
  factor_noise_energy as factor_noise_energy,
)
from prism_optax.diagnostics._noise import (
  tangent_noise_energy as tangent_noise_energy,
)
from prism_optax.diagnostics._spectra import Spectra as Spectra
from prism_optax.diagnostics._spectra import (
  preconditioner_spectra as preconditioner_spectra,
)
