"""Docstrings: every public name says what it takes, gives, refuses and shows.

The examples are run by ``pytest --doctest-modules prism_optax``, so here it is
enough that they exist.
"""

import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import textwrap
import types

import pytest

import prism_optax
from prism_optax.finetune import options

MODULES = (
  'prism_optax',
  *(
    x.name
    for x in pkgutil.iter_modules(prism_optax.__path__, 'prism_optax.')
    if not x.name.rpartition('.')[2].startswith('_')
    and not x.name.endswith('.finetune')  # A program: no name is public.
  ),
  'prism_optax.contrib.heads',
)
SECTIONS = (
  *('Args', 'Attributes', 'Returns', 'Yields', 'Raises', 'References'),
  *('Example', 'Examples'),
)
# Helpers of our own that raise ValueError.
CHECKS = re.compile(r'_validate\.|(.*\.)?_?check_\w+$')

# The package makes these and hands them over: users read their attributes.
HANDED_OVER = ('prism_optax.training.PrivateTraining',)


def public_names():
  """By the full name all that a user may import, once each."""
  found = {}
  for path in MODULES:
    module = importlib.import_module(path)
    for name in module.__all__:
      value = getattr(module, name)
      home = getattr(value, '__module__', None) or ''
      if isinstance(value, types.ModuleType) or any(
        value is known for known in found.values()
      ):
        continue
      if home.startswith('prism_optax'):
        found[f'{path}.{name}'] = value
  return found


NAMES = public_names()
METHODS = {
  f'{path}.{name}': method
  for path, owner in NAMES.items()
  if inspect.isclass(owner) and not issubclass(owner, tuple)
  for name, method in vars(owner).items()
  if inspect.isfunction(method) and not name.startswith('_')
}


def sections(obj):
  """The summary under '', and each section's text under its name."""
  found, current = {'': []}, ''
  for line in (inspect.getdoc(obj) or '').splitlines():
    if line.removesuffix(':') in SECTIONS and line.endswith(':'):
      current = line.removesuffix(':')
      found[current] = []
    elif current and line and not line.startswith(' '):
      # The section is over, and what follows is lost in the one before.
      found.setdefault('after sections', []).append(line)
    else:
      found[current].append(line)
  return found


def entries(lines):
  """Names of an ``Args:``, ``Attributes:`` or ``Raises:`` section."""
  return [
    found[1] for line in lines if (found := re.match(r'  \**(\w+): \S', line))
  ]


def is_interface(obj):
  """A Protocol: attributes that an object of the user's has to have."""
  return getattr(obj, '_is_protocol', False)


def fields(obj):
  """Parameters of a function; what is read of an object that holds data."""
  if is_interface(obj):
    return [k for k, x in vars(obj).items() if isinstance(x, property)]
  names = getattr(obj, '_fields', getattr(obj, '__dataclass_fields__', None))
  names = names or inspect.signature(obj).parameters
  return [name for name in names if name not in ('self', 'cls')]


def _like(obj):
  """The functions whose arguments ``obj`` has besides those that it lists."""
  text = ' '.join(inspect.getdoc(obj).split())
  names = re.findall(r'not listed are the same as in :func:`([\w.]+)`', text)
  return [getattr(prism_optax, x.rpartition('.')[2]) for x in names]


def raises(function):
  """Whether the function's own source raises, or calls what checks for it."""
  source = textwrap.dedent(inspect.getsource(function))
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.Raise):
      return True
    if isinstance(node, ast.Call) and CHECKS.match(ast.unparse(node.func)):
      return True
  return False


@pytest.mark.parametrize('path', [*NAMES, *METHODS])
def test_it_says_what_it_takes_gives_refuses_and_shows(path):
  obj = (NAMES | METHODS)[path]
  found, names = sections(obj), fields(obj)
  assert 'after sections' not in found
  here = entries(found.get('Args', found.get('Attributes', [])))
  if path not in HANDED_OVER:
    assert here == [x for x in names if x in here]
  others = [x for like in _like(obj) for x in entries(sections(like)['Args'])]
  assert set(names) <= {*here, *others}
  if not inspect.isclass(obj):
    if inspect.signature(obj).return_annotation is not None:
      assert any(found.get('Returns', found.get('Yields', [])))
    if raises(obj):
      assert entries(found.get('Raises', []))
  if path in NAMES and 'Attributes' not in found and not is_interface(obj):
    text = '\n'.join(found.get('Example', found.get('Examples', [])))
    assert doctest.DocTestParser().get_examples(textwrap.dedent(text))


def test_a_default_is_changed_on_purpose():
  """What was measured with the old one is measured again, or goes."""
  found = [
    f'{path} {x.name}={x.default!r}'
    for path, obj in (NAMES | METHODS).items()
    if not is_interface(obj)
    for x in inspect.signature(obj).parameters.values()
    if x.default is not x.empty and not inspect.isfunction(x.default)
  ]
  of_runs = {k: x.defaults for k, x in options.TABLE.items()}
  of_runs |= {f'rates of {k}': x for k, x in options.LEARNING_RATES.items()}
  found += [f'prism-optax train {k}={x!r}' for k, x in of_runs.items()]
  path = pathlib.Path(__file__).with_name('defaults.txt')
  assert found == path.read_text().splitlines()
