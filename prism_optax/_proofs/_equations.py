"""Equations of a jaxpr: the jaxprs inside of them, and their source lines."""

import os
from typing import Any

from jax._src import source_info_util

# Primitives that call one jaxpr, and the parameter that holds it. A
# `custom_vmap_call` that is left runs its own function, not its rule.
CALLS = {
  'jit': 'jaxpr',
  'pjit': 'jaxpr',
  'remat2': 'jaxpr',
  'checkpoint': 'jaxpr',
  'closed_call': 'call_jaxpr',
  'core_call': 'call_jaxpr',
  'custom_jvp_call': 'call_jaxpr',
  'custom_vjp_call': 'call_jaxpr',
  'custom_vmap_call': 'call',
}


def line_of(equation: Any) -> str | None:
  """``file.py:12 (function)`` in the user's code, or None if there is none."""
  frame = source_info_util.user_frame(equation.source_info.traceback)
  if frame is None:
    return None
  file = os.path.basename(frame.file_name)
  return f'{file}:{frame.start_line} ({frame.function_name})'
