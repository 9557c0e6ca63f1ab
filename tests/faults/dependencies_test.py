"""What the package stands on: tested bounds, no network."""

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
