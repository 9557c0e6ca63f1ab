"""Links and names lead somewhere. No network."""

import ast
import functools
import pathlib
import re
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted([*(ROOT / 'docs').rglob('*.md'), *ROOT.glob('*.md')])
_FENCED = re.compile(r'^(```+|~~~+|:::+)[^\n]*\n.*?^\1\s*$', re.M | re.S)
_CODE = re.compile(r'`([^`\n]+)`')
_ASSERTED = re.compile("<!-- = '(tests/[^']*)' -->")
_LINK = re.compile(r'\]\(\s*<?([^)>\s]+)>?(?:\s+"[^"]*")?\s*\)')
_NAMED = re.compile(
  r'(?:tests|benchmarks|examples|docs|notebooks|prism_optax|\.ci)/[\w./-]*'
)


def prose_of(text):
  return _FENCED.sub('', text)


def slug_of(heading):
  """The anchor that GitHub and MyST give a heading."""
  text = re.sub(r'\[([^\]]*)\]\([^)]*\)', r'\1', heading).replace('`', '')
  return re.sub(r'[^\w\- ]', '', text.strip().lower()).replace(' ', '-')


@functools.cache
def anchors_of(path):
  if not path.is_file():
    return set()
  text = prose_of(path.read_text('utf-8'))
  return {slug_of(x) for x in re.findall(r'^#{1,6} (.+)$', text, re.M)}


@functools.cache
def functions_of(path):
  return {
    node.name
    for node in ast.parse(path.read_text('utf-8')).body
    if isinstance(node, ast.FunctionDef)
  }


def wrong_links(page, text):
  out = []
  for link in _LINK.findall(_CODE.sub('', prose_of(text))):
    if re.match(r'[a-z]+:', link):
      continue
    target, _, anchor = link.partition('#')
    path = (page.parent / target).resolve() if target else page
    known = not anchor or path.suffix != '.md' or anchor in anchors_of(path)
    if not (path.exists() and known):
      out.append(link)
  return out


def wrong_names(text):
  """Files of the repository, with the test that they have.

  In `code`, and in the comments that say which test asserts a figure.
  """
  text = prose_of(text)
  return nowhere([*_CODE.findall(text), *_ASSERTED.findall(text)])


def nowhere(names):
  """Those of ``file`` or ``file::test[case]`` that are not there."""
  out = []
  for code in names:
    name, _, test = code.partition('[')[0].partition('::')
    if not _NAMED.fullmatch(name):
      continue
    path = ROOT / name
    if not path.exists() or (test and test not in functions_of(path)):
      out.append(code)
  return out


@pytest.mark.parametrize('page', PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_and_names(page):
  text = page.read_text('utf-8')
  assert not wrong_links(page, text)
  assert not wrong_names(text)


def test_what_leads_nowhere_is_found():
  page = ROOT / 'docs' / 'faults.md'
  text = (
    '# A *b*: `c`\n[a](faults.md) [b](#numbers) ![c](none.png) [d](#none)\n'
    '`tests/conftest.py::test_no` `tests/none.py` `[x](y)`\n'
    "a<!-- = 'tests/none.py::test_no' -->\n"
    '```\n[x](y) `tests/none.py`\n```\n[e](../README.md#none) [f](https://x)\n'
  )
  assert wrong_links(page, text) == ['none.png', '#none', '../README.md#none']
  assert wrong_names(text) == [
    'tests/conftest.py::test_no', 'tests/none.py', 'tests/none.py::test_no'
  ]  # fmt: skip


def test_one_version_is_cited_built_and_imported():
  found = {
    name: re.search(pattern, (ROOT / name).read_text('utf-8'), re.M)[1]
    for name, pattern in {
      'CITATION.cff': r'^version: (\S+)$',
      'prism_optax/__init__.py': r"^__version__ = '(\S+)'$",
      'CHANGELOG.md': r'^## (\d\S*\d)',  # The newest comes first.
    }.items()
  }
  assert len(set(found.values())) == 1, found
  # The wheel takes it from there.
  built = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))
  assert built['project']['dynamic'] == ['version']
  assert built['tool']['hatch']['version']['path'] in found
