"""Ready-made optimizers."""

from prism_optax.aliases._dp_muon import dp_muon as dp_muon
from prism_optax.aliases._prism import prism as prism
