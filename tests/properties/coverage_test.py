"""Every public function has a property: read from the syntax of the tests.

A name counts as covered where a test with ``@given`` uses it as an attribute
of its module, itself or through the helpers and constants that it uses.
"""

import ast
import importlib
import inspect
import pathlib
import pkgutil

import prism_optax

FOLDER = pathlib.Path(__file__).parent


def _modules():
  """The package and its public sub-packages."""
  names = [
    x.name
    for x in pkgutil.iter_modules(prism_optax.__path__, 'prism_optax.')
    if not x.name.rpartition('.')[2].startswith('_')
  ]
  names.append('prism_optax.contrib.heads')
  return [prism_optax, *map(importlib.import_module, names)]


def _public_names():
  """'prism_optax.lora.truncate': object, functions and classes alone."""
  return {
    f'{module.__name__}.{name}': value
    for module in _modules()
    for name in module.__all__
    if not inspect.ismodule(value := getattr(module, name))
  }


def _spellings(name):
  """All public names of the same thing: transformations have two."""
  found = _public_names()
  return [x for x, value in found.items() if value is found[name]]


class _Source:
  """What the definitions of one file refer to."""

  def __init__(self, text):
    self.aliases, self.definitions, self.tests = {}, {}, []
    for node in ast.parse(text).body:
      if isinstance(node, ast.Import):
        self.aliases |= {x.asname or x.name: x.name for x in node.names}
      elif isinstance(node, ast.ImportFrom):
        self.aliases |= {
          x.asname or x.name: f'{node.module}.{x.name}' for x in node.names
        }
      elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        self.definitions[node.name] = node
        if any(map(_is_given, node.decorator_list)):
          self.tests.append(node.name)
      elif isinstance(node, ast.Assign):
        for target in ast.walk(ast.Tuple(node.targets)):
          if isinstance(target, ast.Name):
            self.definitions[target.id] = node

  def references(self, name):
    """Dotted names that a definition uses, its imports written out."""
    found = set()
    for node in ast.walk(self.definitions[name]):
      parts = []
      while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
      if isinstance(node, ast.Name):
        root = self.aliases.get(node.id, node.id)
        found.add('.'.join([root, *reversed(parts)]))
    return found


def _is_given(decorator):
  call = decorator.func if isinstance(decorator, ast.Call) else decorator
  return getattr(call, 'id', getattr(call, 'attr', None)) == 'given'


def _used_in_properties(texts):
  """Dotted names that tests with ``@given`` reach, over all files."""
  sources = {f'tests.properties.{k}': _Source(v) for k, v in texts.items()}
  used, seen = set(), set()
  todo = [(k, name) for k, source in sources.items() for name in source.tests]
  while todo:
    place = todo.pop()
    if place in seen:
      continue
    seen.add(place)
    module, name = place
    references = sources[module].references(name)
    used |= references
    for dotted in references:
      if dotted in sources[module].definitions:
        todo.append((module, dotted))
      for other, source in sources.items():
        rest = dotted.removeprefix(f'{other}.').partition('.')[0]
        if dotted.startswith(f'{other}.') and rest in source.definitions:
          todo.append((other, rest))
      head = dotted.partition('.')[0]  # `helper.cache_clear()`.
      if head in sources[module].definitions:
        todo.append((module, head))
  return used


def _covered(name, used):
  return any(x == name or x.startswith(f'{name}.') for x in used)


def test_every_public_name_has_a_property():
  texts = {x.stem: x.read_text() for x in FOLDER.glob('*.py')}
  used = _used_in_properties(texts)
  without = [
    x
    for x, value in _public_names().items()
    # An interface does nothing: who makes an object of it tests that.
    if not getattr(value, '_is_protocol', False)
    and not any(_covered(y, used) for y in _spellings(x))
  ]
  assert sorted(set(without)) == []


def test_only_what_a_property_reaches_counts():
  texts = {
    'cases': 'from prism_optax import lora\nPAIR = lora.Pair("a", "b")\n',
    'one_test': '''
from hypothesis import given
from prism_optax import accounting, lora
import prism_optax as package
from tests.properties import cases

def helper():
  return accounting.epsilon
def alone():
  return accounting.gaussian_epsilon
@given()
def test_it():
  """lora.merge and lora.initialize."""
  package.retract()  # lora.truncate
  return helper(), cases.PAIR
def test_plain():
  lora.canonicalize(0.9)
''',
  }
  used = _used_in_properties(texts)
  names = {
    'prism_optax.retract', 'prism_optax.accounting.epsilon',
    'prism_optax.lora.Pair',
  }  # fmt: skip
  for name in _public_names():
    assert _covered(name, used) == (name in names), name
