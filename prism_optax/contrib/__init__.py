"""Young parts of our own, which may change between minor versions.

The rest of the package imports nothing from here, and ``import prism_optax``
does not load it. Import it yourself: ``from prism_optax import contrib``.
Privacy is guaranteed and tested as in the rest of the package; names, arguments
and defaults may still change.
"""

from prism_optax.contrib import heads
from prism_optax.contrib._input_metric import InputMetric, input_metric
from prism_optax.contrib._orthogonalize_tangents import orthogonalize_tangents
from prism_optax.contrib._prism_muon import prism_muon
from prism_optax.contrib._tangent_probes import tangent_probes

# fmt: off
__all__ = [
  'InputMetric', 'heads', 'input_metric', 'orthogonalize_tangents',
  'prism_muon', 'tangent_probes',
]
# fmt: on
