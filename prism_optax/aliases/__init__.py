"""Ready-made optimizers."""

from prism_optax.aliases._dp_muon import dp_muon
from prism_optax.aliases._prism import prism, published_prism

__all__ = ['dp_muon', 'prism', 'published_prism']
