"""Differentially private training of LoRA adapters with optax."""

import importlib
import typing

# Imported when they are first used: a command line must not wait for JAX, and
# accounting does without.
if typing.TYPE_CHECKING:
  from prism_optax import (
    accounting,
    diagnostics,
    fixed_rank,
    inference,
    lora,
    muon,
    training,
    transforms,
  )
  from prism_optax.aliases import dp_muon, prism, published_prism
  from prism_optax.transforms import (
    add_decayed_factors,
    chain,
    correlated_tangent_privatizer,
    intrinsic_clip,
    per_matrix_clip,
    retract,
    scale_by_learning_rate,
    scale_by_rank_preconditioner,
    tangent_coordinates,
    tangent_privatizer,
  )

__version__ = '0.1.0'

# fmt: off
__all__ = [
  'accounting', 'add_decayed_factors', 'chain',
  'correlated_tangent_privatizer', 'diagnostics', 'dp_muon', 'fixed_rank',
  'inference', 'intrinsic_clip', 'lora', 'muon', 'per_matrix_clip', 'prism',
  'published_prism', 'retract', 'scale_by_learning_rate',
  'scale_by_rank_preconditioner', 'tangent_coordinates', 'tangent_privatizer',
  'training', 'transforms',
]
# fmt: on
_HOMES = {
  **dict.fromkeys(('dp_muon', 'prism', 'published_prism'), 'aliases'),
  **dict.fromkeys(
    (
      *('add_decayed_factors', 'chain', 'correlated_tangent_privatizer'),
      *('intrinsic_clip', 'per_matrix_clip', 'retract'),
      *('scale_by_learning_rate', 'scale_by_rank_preconditioner'),
      *('tangent_coordinates', 'tangent_privatizer'),
    ),
    'transforms',
  ),
}


def __getattr__(name: str) -> typing.Any:
  if name in _HOMES:
    home = importlib.import_module(f'{__name__}.{_HOMES[name]}')
    return getattr(home, name)
  if name in __all__:
    return importlib.import_module(f'{__name__}.{name}')
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
