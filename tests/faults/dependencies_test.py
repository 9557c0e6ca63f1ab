"""What the package stands on: tested bounds, free licences, no network."""

import importlib.metadata
import pathlib
import re
import tomllib

import pytest

from tests import conftest

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']


def _name(requirement):
  found = re.match(r'[\w.-]+', requirement)[0]
  return re.sub(r'[-_.]+', '-', found).lower()


def _bounds(requirements):
  """{name: lower bound} of those that are not the package itself."""
  return {
    _name(r): re.search(r'[>=]=\s*([\w.]+)', r)[1]
    for r in requirements
    if _name(r) != PROJECT['name']
  }


def _pins(name):
  lines = (ROOT / '.ci' / name).read_text().splitlines()
  return dict(
    line.split('==') for line in lines if line and not line.startswith('#')
  )


EXTRAS = PROJECT['optional-dependencies']
EXAMPLES = [
  *PROJECT['dependencies'],
  *(x for k in ('jax-privacy', 'finetune', 'examples') for x in EXTRAS[k]),
]


@pytest.mark.parametrize(
  ('stem', 'requirements', 'raised'),
  [
    ('oldest', PROJECT['dependencies'], set()),
    ('oldest-examples', EXAMPLES, {'jax', 'optax'}),  # By flax, jax-privacy.
  ],
)
def test_declared_lower_bounds_are_the_ones_that_are_tested(
  stem, requirements, raised
):
  bounds, pins = _bounds(requirements), _pins(f'{stem}.txt')
  assert pins.pop('jaxlib') == pins['jax']
  assert pins.keys() == bounds.keys()
  for name, bound in bounds.items():
    assert pins[name] == bound or name in raised, name
  # And the stage that installs them is there.
  script = (ROOT / '.ci' / 'run').read_text()
  assert f'\n  install_lowest {stem} ' in script
  assert f' oldest {stem} ' in script


_IMPORTING = """
import sys
seen = []
def hook(event, args):
  if event.startswith(('socket.connect', 'socket.getaddrinfo', 'socket.bind',
                       'socket.gethostby', 'socket.sendto', 'urllib.Request')):
    seen.append((event, args))
sys.addaudithook(hook)
import pkgutil, prism_optax
for module in pkgutil.walk_packages(prism_optax.__path__, 'prism_optax.'):
  __import__(module.name)
assert not seen, seen
# The hook would have seen one.
import socket
try:
  socket.create_connection(('localhost', 1), timeout=1)
except OSError:
  pass
print('heard' if seen else 'deaf')
"""


@pytest.mark.slow
def test_importing_every_module_opens_no_socket():
  assert conftest.python('-c', _IMPORTING).split() == ['heard']


# Permissive, or with obligations for changes of its own files alone (MPL).
ALLOWED = re.compile(
  r'apache|mit\b|mit license|bsd|isc\b|python software foundation|psf|zlib'
  r'|mpl-2\.0|mozilla public license 2\.0|hpnd|unlicense|0bsd|cc0',
  re.IGNORECASE,
)
FORBIDDEN = re.compile(
  r'\b(a|l)?gpl|gnu|sspl|busl|commons clause|non-?commercial|proprietary',
  re.IGNORECASE,
)


def _licence(distribution):
  """What a distribution says about itself."""
  metadata = distribution.metadata
  classifiers = metadata.get_all('Classifier') or []
  found = [
    metadata.get('License-Expression') or '',
    *(x.rpartition('::')[2] for x in classifiers if x.startswith('License ::')),
    # Some put the whole text there: its first line names it.
    (metadata.get('License') or '').strip().split('\n')[0],
  ]
  said = ' | '.join(x for x in found if x and x.strip() != 'OSI Approved')
  files = [f for f in distribution.files or [] if 'LICEN' in str(f).upper()]
  if not said and files:
    said = distribution.read_text(files[0].name) or ''
  # NumPy and SciPy say of their wheels what else is in them: the runtime
  # library of GCC, with its exception for programs linked to it.
  return re.sub('GCC-exception-3.1|GPL-3.0-or-later WITH ', '', said)


def test_every_licence_is_on_the_list():
  """Of all distributions that are needed, without their extras."""
  todo = [*map(_name, EXAMPLES + EXTRAS['he'])]
  found = {}
  while todo:
    name = todo.pop()
    if name in found or name == PROJECT['name']:
      continue
    try:
      distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
      continue  # For another platform or Python.
    found[name] = _licence(distribution)
    todo += [
      _name(r)
      for r in distribution.requires or []
      if 'extra ==' not in r.replace("'", '"').split(';')[-1]
    ]
  assert {'jax', 'jaxlib', 'optax', 'numpy', 'scipy', 'flax'} <= set(found)
  # It refuses what it should.
  found |= {'x': 'GNU General Public License v3', 'y': 'AGPL', 'z': 'no rights'}
  unclear = {
    name: said[:80]
    for name, said in found.items()
    if FORBIDDEN.search(said) or not ALLOWED.search(said)
  }
  assert unclear.keys() == {'x', 'y', 'z'}, unclear
