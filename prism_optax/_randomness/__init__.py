"""Keys, and the generators of random words under them."""

from prism_optax._randomness._keys import (
  CHACHA20,
  check_key,
  for_release,
  is_given,
  key_words,
  resolve_key,
  split,
)

# fmt: off
__all__ = [
  'CHACHA20', 'check_key', 'for_release', 'is_given', 'key_words',
  'resolve_key', 'split',
]
# fmt: on
