"""Every public name has a property: it is used in a file of this folder."""

import ast
import importlib
import inspect
import pathlib
import pkgutil

import prism_optax

FOLDER = pathlib.Path(__file__).parent


def _modules():
  """The package and its public sub-packages."""
  found = [
    importlib.import_module(f'prism_optax.{x.name}')
    for x in pkgutil.iter_modules(prism_optax.__path__)
    if not x.name.startswith('_')
  ]
  found += [prism_optax, importlib.import_module('prism_optax.contrib.heads')]
  return [x for x in found if hasattr(x, '__all__')]


def _attributes(text):
  """'lora.truncate' of all attributes in the code of a file."""
  nodes = [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.Attribute)]
  names = [
    (getattr(x.value, 'id', getattr(x.value, 'attr', '')), x.attr)
    for x in nodes
  ]
  return {'.'.join(x) for x in names}


def test_every_public_name_has_a_property():
  texts = [x.read_text() for x in FOLDER.glob('*_test.py')]
  used = set().union(*(_attributes(x) for x in texts if '@given' in x))
  spellings, missing = {}, []
  for module in _modules():
    for name in module.__all__:
      value = getattr(module, name)
      # An interface does nothing: who makes an object of it tests that.
      if not inspect.ismodule(value) and not getattr(
        value, '_is_protocol', False
      ):
        spelling = f'{module.__name__.rpartition(".")[2]}.{name}'
        spellings.setdefault(id(value), set()).add(spelling)
  missing = [x for x in spellings.values() if not x & used]
  assert missing == []


def test_only_code_counts():
  text = '"""lora.merge"""\nlora.Pair(1)  # lora.truncate\na.lora.Layout.x'
  assert _attributes(text) == {'lora.Pair', 'a.lora', 'lora.Layout', 'Layout.x'}
