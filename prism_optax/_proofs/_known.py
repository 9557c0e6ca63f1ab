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

# Their results depend on their operands alone, and there is no rule for how.
# All that is neither here nor in a rule might remember an earlier call
# (callbacks, memory), and bring a batch in although no operand has one.
FUNCTIONS = frozenset(
  (
    'iota', 'iota_2x32_shape', 'rng_bit_generator', 'rng_uniform', 'empty',
    'empty2', 'platform_index', 'eig', 'schur', 'hessenberg', 'tridiagonal',
    'approx_top_k', 'ragged_dot_general', 'select_and_scatter', 'scaled_dot',
    'to_edtype', 'from_edtype',
  )
)  # fmt: skip
