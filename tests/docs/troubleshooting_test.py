"""The page on troubleshooting quotes messages that the package has."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / 'docs' / 'troubleshooting.md').read_text('utf-8')
QUOTED = dict(
  re.findall(r'^<!-- id: ([\w-]+) -->\n```text\n(.*?)^```$', PAGE, re.M | re.S)
)
# Strings of the package: those of a formatted one, between its values.
STRINGS = {
  ' '.join(part.split())
  for path in (ROOT / 'prism_optax').rglob('*.py')
  for node in ast.walk(ast.parse(path.read_text('utf-8')))
  if isinstance(node, ast.Constant) and isinstance(node.value, str)
  for part in node.value.split('...')
}


def foreign(quoted):
  """What of a message stands in no string of the package: values, if right."""
  found = []
  for part in ' '.join(quoted.split()).split('...'):
    if not any(part.strip() in x for x in STRINGS):
      for x in sorted(STRINGS, key=len, reverse=True):
        part = part.replace(x, '  ') if len(x) >= 8 else part
      found += part.split('  ')
  return found


@pytest.mark.parametrize('name', QUOTED)
def test_the_words_of_a_message_are_those_of_the_package(name):
  assert all(len(x) < 12 for x in foreign(QUOTED[name])), foreign(QUOTED[name])
  # With other words for its longest one it is another message.
  word = max(re.findall(r'\w+', QUOTED[name]), key=len)
  other = QUOTED[name].replace(word, 'something else')
  assert any(len(x) >= 12 for x in foreign(other))


def test_there_are_messages():
  assert PAGE.count('<!-- id: ') == len(QUOTED) > 30
