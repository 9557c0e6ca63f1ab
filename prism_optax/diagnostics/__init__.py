"""Measures of gauge dependence, noise and preconditioning.

They show why DP-SGD on LoRA factors fails and how PRISM behaves (the three
issues of arXiv:2606.00944). What is computed from raw per-example values is
named ``nonprivate_*``: no guarantee covers it, so compute it on public data, or
keep it on the trusted side. The rest reads parameters, shapes and states of
optimizers, which are already private.
"""

from prism_optax.diagnostics._batches import (
  ClipStatistics,
  depends_on_other_examples,
  nonprivate_clip_statistics,
  nonprivate_signal_to_noise,
)
from prism_optax.diagnostics._noise import (
  FactorNoiseEnergy,
  Spectra,
  change_norms,
  factor_noise_energy,
  preconditioner_spectra,
  tangent_noise_energy,
)

# fmt: off
__all__ = [
  'ClipStatistics', 'FactorNoiseEnergy', 'Spectra', 'change_norms',
  'depends_on_other_examples', 'factor_noise_energy',
  'nonprivate_clip_statistics', 'nonprivate_signal_to_noise',
  'preconditioner_spectra', 'tangent_noise_energy',
]
# fmt: on
