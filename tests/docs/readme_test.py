"""The README keeps its word: its Python runs, its commands are those of CI."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / 'README.md'


def blocks(text, language):
  """(line number, code) of every fenced block in the language."""
  pattern = re.compile(rf'^```{language}\n(.*?)^```$', re.M | re.S)
  return [
    (text.count('\n', 0, found.start(1)) + 1, found.group(1))
    for found in pattern.finditer(text)
  ]


def test_blocks_are_found_with_their_lines():
  text = 'a\n```python\nx = 1\n```\nb\n```bash\nls\n```\n```python\ny\nz\n```\n'
  assert blocks(text, 'python') == [(3, 'x = 1\n'), (10, 'y\nz\n')]
  assert blocks(text, 'bash') == [(7, 'ls\n')]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_python_blocks_run_in_order(tmp_path):
  """As a reader pastes them: one session, in a fresh interpreter."""
  found = blocks(README.read_text(), 'python')
  assert found
  # Blank lines in front keep the line numbers of the README in a traceback.
  script = ''
  for line, code in found:
    script += '\n' * (line - 1 - script.count('\n')) + code
  path = tmp_path / 'README.py'
  path.write_text(script)
  done = subprocess.run(
    [sys.executable, str(path)],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    check=False,
    env={**os.environ, 'PYTHONPATH': str(ROOT)},
    timeout=500,
  )
  assert done.returncode == 0, done.stderr
  shown = blocks(README.read_text(), 'text')
  assert done.stdout.split() == ' '.join(x for _, x in shown).split()


def test_ci_installs_with_the_commands_of_the_readme():
  """What is installed for the tests is what a newcomer is told to install."""
  readme = README.read_text()
  commands = re.findall(r'pip install .*', (ROOT / '.ci' / 'run').read_text())
  assert len(commands) == 2
  for command in commands:
    assert command.replace(' -q', '') in readme
