"""The architecture: which module may import what.

A table of layers, read against the import statements of every file. A module
may import modules of lower layers only, none of its own layer and none above;
the files of a sub-package count as one module. A file that the table does not
name fails, so that a new module has to be given a place.
"""

import ast
import importlib
import pathlib
import re
import sys

import pytest

import prism_optax
from tests import conftest

PACKAGE = 'prism_optax'
ROOT = pathlib.Path(__file__).parents[2] / PACKAGE

LAYERS = (
  ('_types',),
  ('_proofs', '_validate', '_matrix_axes'),
  ('_linalg', '_randomness'),
  ('_exact_sum', '_identity'),
  ('_lattice', '_clipped_sum'),
  ('_clip',),
  ('_clip_rules',),
  ('fixed_rank',),
  ('muon', '_modules'),
  ('lora', 'transforms', 'inference'),
  ('diagnostics', 'aliases'),
  ('training',),
  # Young and ours: above all others, so that none of them imports it.
  ('contrib',),
  # A program.
  ('finetune',),
)
LAYER = {name: depth for depth, layer in enumerate(LAYERS) for name in layer}

# Beside the layers: no JAX, not even through a module that it imports.
HOST_SIDE = 'accounting'
HOST_SIDE_IMPORTS = {'_validate'}
HOST_SIDE_USERS = {'inference', 'training'}

RUNTIME = {'jax', 'optax', 'numpy', 'dp_accounting'}
NEEDS_JAX = {'jax', 'jaxlib', 'optax', 'flax', 'chex'}
# Optional packages, imported inside a function where a user asks for them.
# The command, and the packages of its extra.
PROGRAM = {
  'finetune': {
    *('absl', 'flax', 'jax_privacy', 'jinja2', 'matplotlib', 'safetensors'),
    *('sklearn', 'tokenizers', 'tqdm'),
  }
}
LAZY = {
  'finetune': {'gguf', 'huggingface_hub', 'pyarrow'},
  'lora': {'flax', 'safetensors'},
  'transforms': {'jax_privacy'},
}


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
      if module in PROGRAM:
        allowed = True  # The top: it uses the package as a user does.
      elif module == HOST_SIDE:
        allowed = target in HOST_SIDE_IMPORTS
      elif target == HOST_SIDE:
        allowed = module in HOST_SIDE_USERS
      else:
        allowed = target in LAYER and LAYER[target] < LAYER[module]
      if not allowed:
        out.append(f'{module} imports {name}')
    elif not (
      top in RUNTIME
      or top in PROGRAM.get(module, ())
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


def test_the_package_itself_only_re_exports():
  """What a type checker reads and what is imported on use are the same."""
  found = {}
  for node in ast.walk(ast.parse((ROOT / '__init__.py').read_text())):
    if isinstance(node, ast.ImportFrom):
      found |= {alias.name: node.module for alias in node.names}
  assert sorted(found) == sorted(prism_optax.__all__)
  assert set(found) <= set(dir(prism_optax))  # Of what is not imported yet.
  for name, home in found.items():
    value = getattr(prism_optax, name)
    assert value is getattr(importlib.import_module(home), name), name
  with pytest.raises(AttributeError, match="'prism_optax' has no .* 'nothing'"):
    _ = prism_optax.nothing


@pytest.mark.slow
def test_accounting_does_without_jax():
  program = """
import sys
from prism_optax import accounting
assert accounting.epsilon
assert 'jax' not in sys.modules
  """
  conftest.python('-c', program)


PLANTED = {
  'upwards': ('fixed_rank', 'from prism_optax import lora'),
  'by a computed name': ('lora', '__import__("prism_" + "optax")'),
  'of an extra': ('lora', 'import flax.nnx'),
  'JAX on the host side, late': ('accounting', 'def f():\n  import optax'),
  'of a new file': ('surprise', 'import numpy'),
  'in a sub-package': ('lora', 'from ... import aliases', f'{PACKAGE}.lora.x'),
}  # fmt: skip


@pytest.mark.parametrize('kind', PLANTED)
def test_a_planted_arrow_is_found(kind):
  assert violations(*PLANTED[kind])


def test_private_names_are_imported_by_tests_of_the_core_alone():
  """So that the name of a private function changes without other edits."""
  tests = ROOT.parent / 'tests'
  for file in tests.rglob('*.py'):
    if file.is_relative_to(tests / 'core'):
      continue
    for name, _ in imports(file.read_text('utf-8')):
      first, *rest = name.split('.')
      private = any(re.match('_[^_]', x) for x in rest)
      assert first != PACKAGE or not private, (file.name, name)
