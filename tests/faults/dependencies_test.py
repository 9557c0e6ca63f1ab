"""What the package stands on: tested bounds, free licences, no network."""

import importlib.metadata
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

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


@pytest.mark.parametrize(
  ('file', 'requirements', 'raised'),
  [
    ('oldest.txt', PROJECT['dependencies'], set()),
    (
      'oldest-examples.txt',
      [
        *PROJECT['dependencies'],
        *(
          x
          for name in ('jax-privacy', 'finetune', 'examples')
          for x in EXTRAS[name]
          if not x.startswith('prism-optax')
        ),
      ],
      {'jax', 'optax'},  # By flax and jax-privacy.
    ),
  ],
)
def test_declared_lower_bounds_are_the_ones_that_are_tested(
  file, requirements, raised
):
  bounds, pins = _bounds(requirements), _pins(file)
  assert pins.pop('jaxlib') == pins['jax']
  assert pins.keys() == bounds.keys()
  for name, bound in bounds.items():
    if name not in raised:
      assert pins[name] == bound, name
  # And the stage that installs them is there.
  stem = file.removesuffix('.txt')
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
  done = subprocess.run(
    [sys.executable, '-c', _IMPORTING],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
    timeout=120,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.split() == ['heard']


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


def _licences(distribution):
  """What a distribution says about itself, shortest statement first."""
  metadata = distribution.metadata
  found = [metadata.get('License-Expression') or '']
  found += [
    text.rpartition('::')[2].strip()
    for text in metadata.get_all('Classifier') or []
    if text.startswith('License ::')
  ]
  # Some put the whole text there: its first line names it.
  found.append((metadata.get('License') or '').strip().split('\n')[0])
  return [text for text in found if text and text != 'OSI Approved']


def _closure(requirements):
  """Installed distributions that these need, without their extras."""
  todo, seen = [_name(r) for r in requirements], {}
  while todo:
    name = todo.pop()
    if name in seen or name == PROJECT['name']:
      continue
    try:
      found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
      continue  # For another platform or Python.
    seen[name] = found
    todo += [
      _name(r)
      for r in found.requires or []
      if 'extra ==' not in r.replace("'", '"').split(';')[-1]
    ]
  return seen


def test_the_list_refuses_what_it_should():
  for text in ('GNU General Public License v3 (GPLv3)', 'LGPL-2.1', 'AGPL'):
    assert FORBIDDEN.search(text)
  for text in ('Apache-2.0', 'BSD License', 'MIT', 'Apache Software License'):
    assert ALLOWED.search(text)
    assert not FORBIDDEN.search(text)
  assert not ALLOWED.search('All rights reserved')


def test_every_licence_is_on_the_list():
  requirements = [
    *PROJECT['dependencies'],
    *EXTRAS['jax-privacy'],
    *EXTRAS['finetune'],
    *EXTRAS['examples'],
    *EXTRAS['he'],
  ]
  found = _closure(requirements)
  assert {'jax', 'jaxlib', 'optax', 'numpy', 'scipy', 'flax'} <= set(found)
  unclear = {}
  for name, distribution in found.items():
    texts = _licences(distribution)
    files = [
      str(f) for f in distribution.files or [] if 'LICEN' in str(f).upper()
    ]
    if not texts and files:
      texts = [distribution.read_text(pathlib.PurePath(files[0]).name) or '']
    said = ' | '.join(texts)
    # NumPy and SciPy say of their wheels what else is in them: the runtime
    # library of GCC, with its exception for programs linked to it.
    said = said.replace('GCC-exception-3.1', '').replace(
      'GPL-3.0-or-later WITH ', ''
    )
    if FORBIDDEN.search(said) or not ALLOWED.search(said):
      unclear[name] = said[:80]
  assert not unclear
