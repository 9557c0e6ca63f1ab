"""The architecture: which module may import what.

A table of layers, read against the import statements of every file. A module
may import modules of lower layers only, none of its own layer and none above;
the files of a sub-package count as one module. A file that the table does not
name fails, so that a new module has to be given a place.
"""

import ast
import pathlib
import sys
import textwrap

import pytest

PACKAGE = 'prism_optax'
ROOT = pathlib.Path(__file__).parents[2] / PACKAGE

LAYERS = (
  (
    '_validate',
    '_linalg',
    '_matrix_axes',
    '_per_example',
    '_randomness',
    '_horizon',
    '_normal',
  ),
  ('fixed_rank', 'orthogonalization', 'clip_groups'),
  ('lora', 'tangent_orthogonalization'),
  (
    'clipping',
    'per_matrix_clipping',
    'noise_addition',
    'correlated_noise',
    'preconditioning',
    'retraction',
    'weight_decay',
    'orthogonal_updates',
    'orthogonal_tangents',
    'tangent_probes',
    'inference',
    'diagnostics',
  ),
  ('aliases', 'augmented'),
)
LAYER = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}

# Beside the layers: no JAX, not even through a module that it imports.
HOST_SIDE = 'accounting'
HOST_SIDE_IMPORTS = {'_validate'}
HOST_SIDE_USERS = {'aliases', 'inference'}

RUNTIME = {'jax', 'optax', 'numpy', 'dp_accounting'}
NEEDS_JAX = {'jax', 'jaxlib', 'optax', 'flax', 'chex'}
# Optional packages, imported inside a function where a user asks for them.
LAZY = {'augmented': {'jax_privacy'}, 'lora': {'safetensors'}}


def imports(source, package=PACKAGE):
  """(dotted name, whether inside a function) for every import of a source.

  ``from a import b`` counts as ``a.b``: whether b is a module is not known
  here, and a longer name says no less. Relative imports start at ``package``.
  """
  found = []

  def visit(node, lazy):
    if isinstance(node, ast.Import):
      found.extend((alias.name, lazy) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      base = node.module or ''
      if node.level:
        parts = package.split('.')[: len(package.split('.')) - node.level + 1]
        base = '.'.join([*parts, base] if base else parts)
      found.extend((f'{base}.{alias.name}', lazy) for alias in node.names)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
      '__import__',
      'importlib.import_module',
      'import_module',
    ):
      argument = node.args[0] if node.args else None
      constant = isinstance(argument, ast.Constant)
      found.append((argument.value if constant else '<computed>', lazy))
    inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    for child in ast.iter_child_nodes(node):
      visit(child, lazy or inside)

  visit(ast.parse(source), False)
  return found


def violations(module, source, package=PACKAGE):
  """What a file of ``module`` imports against the rules, as sentences."""
  out = []
  if module != HOST_SIDE and module not in LAYER:
    return [f'{module} has no place in the table of layers']
  for name, lazy in imports(source, package):
    top, _, rest = name.partition('.')
    if top == PACKAGE:
      target = rest.partition('.')[0]
      if target == module:
        continue
      if module == HOST_SIDE:
        allowed = target in HOST_SIDE_IMPORTS
      elif target == HOST_SIDE:
        allowed = module in HOST_SIDE_USERS
      else:
        allowed = target in LAYER and LAYER[target] < LAYER[module]
      if not allowed:
        out.append(f'{module} imports {name}')
    elif not (
      top in RUNTIME
      or top in sys.stdlib_module_names
      or (lazy and top in LAZY.get(module, ()))
    ):
      out.append(f'{module} imports {name}, which is no runtime dependency')
    if top in NEEDS_JAX and module in {HOST_SIDE, *HOST_SIDE_IMPORTS}:
      out.append(f'{module} imports {name}, but has to do without JAX')
  return out


def files():
  """(module, package, path) of every file below the package's folder."""
  for path in sorted(ROOT.rglob('*.py')):
    parts = path.relative_to(ROOT).parts
    if parts == ('__init__.py',):
      continue
    module = parts[0].removesuffix('.py')
    yield module, '.'.join([PACKAGE, *parts[:-1]]), path


def test_every_arrow_points_downwards():
  found = [
    f'{path.relative_to(ROOT)}: {line}'
    for module, package, path in files()
    for line in violations(module, path.read_text(), package)
  ]
  assert not found, '\n'.join(found)


def test_every_file_is_found():
  modules = {module for module, _, _ in files()}
  assert {'_linalg', 'fixed_rank', 'lora', 'accounting'} <= modules


def test_the_package_itself_only_re_exports():
  tree = ast.parse((ROOT / '__init__.py').read_text())
  for node in tree.body:
    docstring = isinstance(node, ast.Expr) and isinstance(
      node.value, ast.Constant
    )
    names = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in (
      '__all__',
      '__version__',
    )
    assert docstring or names or isinstance(node, ast.Import | ast.ImportFrom)


PLANTED = {
  'upwards': ('fixed_rank', 'from prism_optax import lora'),
  'far upwards': ('_linalg', 'import prism_optax.aliases as aliases'),
  'sideways': ('clipping', 'from prism_optax.retraction import retract'),
  'of private parts': ('lora', 'from prism_optax.clipping._sums import total'),
  'relative': ('clipping', 'from . import preconditioning'),
  'of the package': ('clipping', 'from prism_optax import prism'),
  'in a function': (
    'lora',
    """
    def f():
      from prism_optax import aliases
    """,
  ),
  'by name': (
    'lora',
    """
    import importlib
    importlib.import_module('prism_optax.aliases')
    """,
  ),
  'by a computed name': ('lora', '__import__("prism_" + "optax")'),
  'of an extra': ('lora', 'import flax.nnx'),
  'of an extra, late': (
    'clipping',
    """
    def f():
      import jax_privacy
    """,
  ),
  'JAX on the host side': ('accounting', 'import jax.numpy as jnp'),
  'JAX on the host side, late': (
    'accounting',
    """
    def f():
      import optax
    """,
  ),
  'JAX behind the host side': ('accounting', 'from prism_optax import _linalg'),
  'JAX in what the host side imports': ('_validate', 'import jax'),
  'of the host side': ('lora', 'from prism_optax import accounting'),
  'of a new file': ('surprise', 'import numpy'),
}


@pytest.mark.parametrize('kind', PLANTED)
def test_a_planted_arrow_is_found(kind):
  module, source = PLANTED[kind]
  assert violations(module, textwrap.dedent(source))


def test_a_planted_arrow_in_a_sub_package_is_found():
  source = 'from ... import aliases\nfrom .._pairs import find'
  assert violations('lora', source, 'prism_optax.lora.formats') == [
    'lora imports prism_optax.aliases'
  ]


def test_what_is_allowed_passes():
  source = textwrap.dedent(
    """
    from __future__ import annotations
    import functools
    import jax.numpy as jnp
    from jax import lax
    import optax, numpy as np
    from dp_accounting import dp_event
    from prism_optax import _validate, fixed_rank, lora
    from prism_optax.lora import _pairs
    """
  )
  assert not violations('clipping', source)
  assert not violations(
    'accounting', 'import math\nimport numpy, dp_accounting'
  )
