"""Edits random lines of the package and sees which tests notice.

The mutants of ``chosen.py`` are lines that somebody thought of; these are the
others. Run by hand, for hours, in the background::

  python -m tests.mutants.random_lines lines    # Which tests run which lines.
  python -m tests.mutants.random_lines run 300  # So many mutants, resumable.
  python -m tests.mutants.random_lines table    # What survived, and why.

``lines`` runs every test file by itself under ``coverage`` (a process each:
what another test has compiled is not traced again). ``run`` takes the same
mutants in the same order every time, runs the fast tests of the files that
execute the line, its own file first, up to the first failure, and stores each
verdict at once in ``random_lines.json``. A survivor is there because it changes
nothing (say why under ``why``), or because a test is missing: write it, put its
name under ``by`` and the verdict that it changed under ``first``.
"""

import argparse
import concurrent.futures
import json
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

from tests.mutants import copies, edits
from tests.mutants.copies import ROOT

RESULTS = pathlib.Path(__file__).with_suffix('.json')
LINES = ROOT / '.jax_cache' / 'lines.json'
FAST = ('-m', 'not slow')
# A loop without an end is noticed by the time limit of one test.
IMPATIENT = ('-x', '--timeout=90', '--timeout-method=thread')
TIMEOUT = 900  # Seconds for one mutant; beyond it, it hangs.


def lines_of(test):
  """Seconds of a test file, and the lines of the package that it executes."""
  start = time.monotonic()
  with tempfile.TemporaryDirectory() as folder:
    data, report = (pathlib.Path(folder) / x for x in ('data', 'report'))
    program = ('coverage', 'run', f'--data-file={data}')
    program += ('--include=prism_optax/*', '-m', 'pytest')
    done = copies.run_tests(ROOT, *FAST, test, timeout=TIMEOUT, program=program)
    if done.returncode not in (0, 5):  # 5: all of its tests are slow.
      raise RuntimeError(f'{test}: {done.stdout[-2000:]}{done.stderr[-2000:]}')
    seconds = time.monotonic() - start
    command = [sys.executable, '-m', 'coverage', 'json', '-q', '-o', report]
    # It reports nothing where no line of the package ran.
    subprocess.run(
      [*command, f'--data-file={data}'],
      cwd=ROOT,
      check=False,
      stdout=subprocess.DEVNULL,
    )
    files = json.loads(report.read_text())['files'] if report.exists() else {}
  lines = {path: file['executed_lines'] for path, file in files.items()}
  return {'seconds': seconds, 'lines': lines}


def collect_lines():
  found = json.loads(LINES.read_text()) if LINES.exists() else {}
  tests = sorted(p.relative_to(ROOT) for p in ROOT.glob('tests/**/*_test.py'))
  left = [str(t) for t in tests if str(t) not in found]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for test, value in zip(left, pool.map(lines_of, left), strict=True):
      found[test] = value
      LINES.parent.mkdir(exist_ok=True)
      LINES.write_text(json.dumps(found))
      print(f'{value["seconds"]:5.0f} s  {test}', flush=True)


def candidates(seed):
  """All edits of the package as (path, edit), in an order of the seed's."""
  pairs = [
    (path, edit)
    for path in sorted((ROOT / 'prism_optax').rglob('*.py'))
    if 'finetune' not in path.parts
    for edit in edits.edits_of(path.read_text())
  ]
  random.Random(seed).shuffle(pairs)
  return pairs


def tests_for(path, line, found):
  """The test files that execute a line: its own, then the cheapest first."""
  name = str(path.relative_to(ROOT))
  lines = set(edits.statement_lines(path.read_text(), line))
  covering = [
    test for test, x in found.items() if lines & set(x['lines'].get(name, ()))
  ]
  own = f'/{path.stem.lstrip("_")}_test.py'
  return sorted(
    covering, key=lambda test: (not test.endswith(own), found[test]['seconds'])
  )


def verdict(path, edit, found):
  """What becomes of one mutant."""
  source = path.read_text()
  changed = edit.apply(source)
  row = {
    'path': str(path.relative_to(ROOT / 'prism_optax')),
    'line': edit.line,
    'kind': edit.kind,
    'old': source.splitlines()[edit.line - 1].strip(),
    'new': changed.splitlines()[edit.line - 1].strip(),
  }
  start = time.monotonic()
  tests = tests_for(path, edit.line, found)
  row |= {'verdict': 'not executed', 'by': ''}
  if tests:
    with tempfile.TemporaryDirectory() as name:
      folder = pathlib.Path(name)
      copies.write(folder, row['path'], changed)
      try:
        status, printed = copies.run_tests_in_a_fork(
          folder, *FAST, *IMPATIENT, *tests, timeout=TIMEOUT
        )
        killed = re.search(r'^(?:FAILED|ERROR) (\S+)', printed, re.M)
        row['verdict'] = 'killed' if status else 'survived'
        if status:  # A process that ran too long says no more.
          row['by'] = killed[1] if killed else 'the time limit'
      except subprocess.TimeoutExpired:
        row['verdict'] = 'killed'
        row['by'] = 'the time limit'
  return row | {'seconds': round(time.monotonic() - start)}


def run(count, seed):
  found = json.loads(LINES.read_text())
  rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
  known = {(row['path'], row['old'], row['new']) for row in rows}

  def is_new(path, edit):
    source = path.read_text()
    return (
      str(path.relative_to(ROOT / 'prism_optax')),
      source.splitlines()[edit.line - 1].strip(),
      edit.apply(source).splitlines()[edit.line - 1].strip(),
    ) not in known

  todo = [pair for pair in candidates(seed)[:count] if is_new(*pair)]
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for row in pool.map(lambda pair: verdict(*pair, found), todo):
      rows.append(row)
      RESULTS.write_text(json.dumps(rows, indent=1) + '\n')
      print(
        f'{row["verdict"]:8} {row["seconds"]:4} s  {row["path"]}:{row["line"]}'
        f'  {row["new"]}  {row["by"]}',
        flush=True,
      )


def table():
  rows = json.loads(RESULTS.read_text())
  for row in rows:
    if row['verdict'] != 'killed':
      print(f'{row["path"]}:{row["line"]} ({row["kind"]}, {row["verdict"]})')
      print(f'  - {row["old"]}\n  + {row["new"]}\n  {row.get("why", "?")}')
  killed = sum(row['verdict'] == 'killed' for row in rows)
  same = sum('why' in row for row in rows if row['verdict'] != 'killed')
  first = killed - sum('first' in row for row in rows)
  matter = max(len(rows) - same, 1)
  print(
    f'{len(rows)} mutants: {killed} killed, {same} change no result,'
    f' {len(rows) - killed - same} left; killed of those that change one:'
    f' {first / matter:.1%} at first, {killed / matter:.1%} now'
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('command', choices=('lines', 'run', 'table'))
  parser.add_argument('count', nargs='?', type=int, default=300)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args()
  if args.command == 'lines':
    collect_lines()
  elif args.command == 'run':
    run(args.count, args.seed)
  else:
    table()


if __name__ == '__main__':
  main()
