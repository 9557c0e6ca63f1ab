"""Breaks one chosen line at a time and sees which test notices.

::

  python -m tests.mutants.check            # All of `chosen.py`, with a table.
  python -m tests.mutants.check transport  # Those with the word in the name.
  python -m tests.mutants.check --privacy --tested  # What CI runs.

The tests named for a mutant run on a copy of the repository, first unchanged
(they must pass; ``--tested`` says that they did), then mutated (one must fail).
Exit status 1 if a mutant survives.
"""

import argparse
import concurrent.futures
import pathlib
import re
import subprocess
import sys
import tempfile
import time

from tests.mutants import copies
from tests.mutants.chosen import MUTANTS, PRIVACY

TIMEOUT = 600  # Seconds for the tests of one mutant.


def first_failure(folder, tests):
  """The first test that fails, or None; raises where nothing ran."""
  for line in tests:
    name, _, expression = line.partition(' ')
    chosen = ['-k', expression] if expression else []
    status, printed = copies.run_tests_in_a_fork(
      folder, '-x', f'tests/{name}', *chosen, timeout=TIMEOUT
    )
    if status == 1:
      found = re.search(r'^FAILED (.+?)(?: - (.*))?$', printed, re.M)
      test, reason = found.groups('') if found else (name, 'no summary')
      # A mutant that cannot even run is no evidence for the test.
      if re.match(r'(?!AssertionError)\w+(Error|Exception)\b', reason):
        raise RuntimeError(f'{test} crashed: {reason}')
      return test
    if status:
      # No test selected, or pytest itself failed: no evidence either way.
      raise RuntimeError(f'{line}: {printed[-4000:]}')
  return None


def unchanged(mutants):
  """The tests that fail without any mutant."""
  selections = sorted({t for m in mutants for t in m.tests})
  with (
    tempfile.TemporaryDirectory() as folder,
    concurrent.futures.ThreadPoolExecutor(2) as pool,
  ):
    copies.write(pathlib.Path(folder))
    failures = pool.map(lambda t: first_failure(folder, [t]), selections)
    return [f for f in failures if f]


def run(mutant):
  """(killed, what to print)."""
  start = time.monotonic()
  text = (copies.ROOT / 'prism_optax' / mutant.path).read_text()
  if text.count(mutant.old) != 1:
    return False, (
      f'BROKEN    {mutant.name}\nExpected once in {mutant.path}: {mutant.old!r}'
    )
  with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    try:
      copies.write(folder, mutant.path, text.replace(mutant.old, mutant.new))
      killer = first_failure(folder, mutant.tests)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
      return False, f'BROKEN    {mutant.name}\n{error}'
  verdict = 'killed' if killer else 'SURVIVED'
  return bool(killer), (
    f'{verdict:8}  {mutant.name:52}  {time.monotonic() - start:4.0f} s  '
    f'{(killer or "").removeprefix("tests/")}'
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('words', nargs='*', help='all must be in the name')
  parser.add_argument(
    '--privacy', action='store_true', help='only clip, noise, keys and order'
  )
  parser.add_argument(
    '--tested', action='store_true', help='the tests pass without any mutant'
  )
  args = parser.parse_args()
  mutants = [
    m
    for m in MUTANTS
    if all(w in m.name for w in args.words)
    and (m.path in PRIVACY or not args.privacy)
  ]
  if not mutants:
    print('No mutant has these words in its name.')
    return 1
  failures = [] if args.tested else unchanged(mutants)
  if failures:
    print('These fail without any mutant:', *failures, sep='\n  ')
    return 1
  survivors = 0
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    for killed, line in pool.map(run, mutants):
      survivors += not killed
      print(line, flush=True)
  print(f'{len(mutants) - survivors} of {len(mutants)} mutants killed')
  return 1 if survivors else 0


if __name__ == '__main__':
  sys.exit(main())
