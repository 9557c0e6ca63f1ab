"""The primitives that JAX itself has defined.

Rules go by name. Anybody can give a primitive of theirs the name ``add``, so
the object has to be one of JAX's own.
"""

import sys

import jax.extend.core
import jax.numpy  # So that all that it defines is there to be found.

PRIMITIVES = frozenset(
  value
  for name, module in tuple(sys.modules.items())
  if name.startswith('jax._src.')
  for value in tuple(vars(module).values())
  if isinstance(value, jax.extend.core.Primitive)
)

# They run what is not in the program, and could remember an earlier call.
OUTSIDE = frozenset(
  ('pure_callback', 'io_callback', 'debug_callback', 'ffi_call')
)
