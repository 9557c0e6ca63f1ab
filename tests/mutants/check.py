"""Breaks one place of the package at a time and sees which test notices.

::

  python -m tests.mutants.check --privacy --tested  # What CI runs.
  python -m tests.mutants.check --sample 300 --seed 5 --ran .coverage
  python -m tests.mutants.check _lattice.py operator  # Words of a name.

A sample of the bugs in ``planted.txt``, and one of the edits of ``edits.py``
over the syntax tree, by a hash of seed and name: a change elsewhere in the
package leaves the sample as it is. On a copy of the repository the fast tests
run that are near to the file, up to the first failure; of what these do not
notice, all fast tests; then the slow ones near to it. ``--tested`` says that
they pass without any mutant. Exit status 1 if a mutant survives.

With ``--ran`` those fast tests run first that ran the function, and of the
others only the near ones, those of their files and of ``tests/architecture``.
It has been written by::

  pytest -m 'not slow' -n 2 --cov=prism_optax --cov-context=test
"""

import argparse
import concurrent.futures
import dataclasses
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import coverage

from tests.mutants import copies, edits

PACKAGE = copies.ROOT / 'prism_optax'
# Clip, noise, keys, batches, events, proofs.
PRIVACY = (
  '_clip', '_clip_rules', '_clipped_sum', '_exact_sum', '_lattice', '_proofs',
  '_randomness',
  'accounting/_calibration', 'accounting/_epsilon', 'accounting/_events',
  'contrib/_input_metric', 'contrib/_one_shot_release', 'contrib/heads',
  'training', 'transforms/_chain', 'transforms/_intrinsic_clip',
  'transforms/_matrix_clip', 'transforms/_privatizer',
)  # fmt: skip
# The tests of a file are those of its name, then those of the longest of these
# beginnings of its path and of each shorter one, or of its folder.
NEAR = {
  '': 'core laws training transforms audit',
  '_clip': 'core/per_example_test.py core/clip_range_test.py'
  ' transforms/intrinsic_clip_test.py audit/make_private_test.py',
  '_clip_rules': 'core/clip_range_test.py training/clipping_test.py',
  '_clipped_sum': 'transforms/intrinsic_clip_test.py'
  ' audit/exact_release_test.py',
  '_exact_sum': 'core/per_example_test.py core/lattice_test.py',
  '_linalg': 'core fixed_rank',
  '_modules': 'modules core/trail_test.py',
  '_randomness': 'core/randomness_test.py core/generators_test.py',
  '_randomness/_keys': 'core/randomness_test.py training/noise_once_test.py',
  'accounting': 'accounting core/accounting_test.py laws/refusals_test.py',
  'inference': 'inference laws/refusals_test.py',
  'contrib': 'contrib replay/replay_test.py properties/lora_test.py'
  ' training/prior_releases_test.py',
  'training': 'training audit properties/training_test.py contrib',
  'training/_claim': 'training/stops_test.py training/journal_test.py',
  'training/_make': 'training/misuse_test.py training/mechanism_test.py',
  'training/_means': 'training/private_test.py',
  'training/_optimizer': 'training/mechanism_test.py training/clipping_test.py',
  'training/_owner': 'training/noise_once_test.py training/journal_test.py',
  'training/_program': 'training/private_test.py training/noise_once_test.py',
  'training/_releases': 'training/prior_releases_test.py',
  'transforms': 'laws transforms aliases integration audit',
  'transforms/_chain': 'core/trail_test.py transforms/chain_order_test.py',
  'transforms/_matrix_clip': 'core/clip_groups_test.py',
}
# Several times what the dearest test takes, since a mutant may hang.
FAST = ('--timeout=60', '-m', 'not slow')
SLOW = ('--timeout=200', '-m', 'slow')
TIMEOUT = 1500  # Seconds for the tests of a mutant.


@dataclasses.dataclass(frozen=True)
class Mutant:
  """A wrong file.

  Attributes:
    name: 'file function kind number', or 'file planted' and the fragment.
    path: Below the repository.
    shown: What stands there, and what instead.
    source: Gives the source of the file.
    first: A file below the tests and words of names in it, to be run first.
    lines: Of the function.
  """

  name: str
  path: pathlib.Path
  shown: str
  source: Callable[[], str]
  first: str = ''
  lines: range = range(0)


def is_private(path: pathlib.Path) -> bool:
  """Whether the guarantee depends on a file of the package."""
  name = str(path.relative_to(PACKAGE).with_suffix(''))
  return any(f'{name}/'.startswith(f'{x}/') for x in PRIVACY)


def table(name: str) -> list[str]:
  text = pathlib.Path(__file__).with_name(f'{name}.txt').read_text()
  return [x for x in text.splitlines() if not x.startswith('#')]


def planted_bugs() -> list[Mutant]:
  sources = {p: p.read_text() for p in sorted(PACKAGE.rglob('*.py'))}
  found = []
  for line in table('planted'):
    line, _, first = line.partition(' @ ')
    old, new = line.split(' => ')
    places = [p for p, text in sources.items() for _ in range(text.count(old))]
    if len(places) != 1:
      raise ValueError(f'Expected one {old!r} in the package: {places}')
    (path,) = places
    source = sources[path].replace(old, new)
    name = f'{path.relative_to(PACKAGE)} planted {old}'
    found.append(Mutant(name, path, line, lambda x=source: x, first))
  return found


def edited() -> Iterator[Mutant]:
  """All edits that are not listed as changing nothing."""
  equivalent = {x.split(' # ')[0] for x in table('equivalent')}
  for path in sorted(PACKAGE.rglob('*.py')):
    for edit in edits.edits_of(path.read_text()):
      name = f'{path.relative_to(PACKAGE)} {edit.name}'
      if f'{name}: {edit.shown}' in equivalent:
        equivalent.remove(f'{name}: {edit.shown}')
      else:
        yield Mutant(name, path, edit.shown, edit.apply, lines=edit.lines)
  for name in sorted(equivalent):
    print('Listed in equivalent.txt, but no edit:', name)


def near(path: pathlib.Path) -> list[str]:
  """The tests that are most likely to notice, in the order to run them."""
  tests = copies.ROOT / 'tests'
  module = path.relative_to(PACKAGE).with_suffix('')
  name = path.stem.strip('_')
  own = (*tests.rglob(f'{name}_test.py'), *tests.rglob(f'{name}_*_test.py'))
  parents = [str(x) for x in (module, *module.parents[:-1])]
  more = [x for name in parents for x in NEAR.get(name, '').split()]
  if len(parents) == 1:
    more += NEAR[''].split()
  elif parents[-1] not in NEAR:
    more.append(parents[-1].strip('_'))
  own = sorted(p for p in own if p.parent.name != 'benchmarks')
  paths = [*own, *(tests / x for x in more if (tests / x).exists())]
  return [str(p.relative_to(copies.ROOT)) for p in dict.fromkeys(paths)]


def that_ran(mutant: Mutant, data: coverage.CoverageData) -> list[str]:
  """The tests that ran a line of its function, those of near files first.

  Without their cases: only the first one runs what is compiled once.
  """
  contexts = data.contexts_by_lineno(str(mutant.path))
  ran = {x for line in mutant.lines for x in contexts.get(line, ()) if x}
  paths = near(mutant.path)

  def place(test):
    places = (i for i, path in enumerate(paths) if test.startswith(path))
    return next(places, len(paths)), test

  return sorted({re.split(r'[|\[]', x)[0] for x in ran}, key=place)


def killer(
  folder: pathlib.Path,
  tests: list[str],
  first: str = '',
  ran: list[str] | None = None,
) -> str:
  """The first test that fails, or nothing."""
  file, _, words = first.partition(' ')
  stages = [(FAST, tests), (FAST, ['tests']), (SLOW, tests)]
  if ran is not None:
    # The others of their files call what these have compiled; the names and
    # defaults of all are read by others.
    own = (x.partition('::')[0] for x in ran)
    files = dict.fromkeys([*tests, 'tests/architecture', *own])
    stages[:2] = [(FAST, x) for x in (ran, [*files]) if x]
  if first and (folder / 'tests' / file).exists():
    stages.insert(0, ((*SLOW[:1], '-k', words), [f'tests/{file}']))
  for marked, chosen in stages:
    options = ('-x', '--timeout-method=thread', *marked)
    try:
      status, printed = copies.run_tests(
        folder, *options, *chosen, timeout=TIMEOUT
      )
    except subprocess.TimeoutExpired:
      continue  # Too many tests: one that hangs has failed before.
    # A name in a file that cannot be imported has no collector.
    found = re.search(
      r'^(?:FAILED|ERROR(?:: found no collectors for)?) (\S+)', printed, re.M
    )
    # What ends a test that hangs ends pytest with it, before any summary.
    hung = '+ Timeout +' in printed
    # Pytest itself failed, or the process that ran it: no evidence.
    if status == 3 or (status in (1, 4) and not (found or hung)):
      raise RuntimeError(printed[-2000:])
    if status not in (0, 5):  # 5: none was selected.
      return found[1] if found else f'exit status {status}'
  return ''


def run(
  mutant: Mutant, data: coverage.CoverageData | None = None
) -> tuple[bool, str]:
  """Whether a test notices it, and what to print."""
  start = time.monotonic()
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
    folder = pathlib.Path(name)
    path = str(mutant.path.relative_to(copies.ROOT))
    copies.write(folder, path, mutant.source())
    ran = None if data is None else that_ran(mutant, data)
    by = killer(folder, near(mutant.path), mutant.first, ran)
  seconds = f'{time.monotonic() - start:.0f} s'
  if by:
    return True, f'killed    {mutant.name}  {seconds}  {by}'
  return False, f'SURVIVED  {mutant.name}  {seconds}\n  {mutant.shown}'


def chosen_mutants(args: argparse.Namespace) -> list[Mutant]:
  def order(mutant):
    return hashlib.sha256(f'{args.seed} {mutant.name}'.encode()).digest()

  def is_wanted(mutant):
    chosen = is_private(mutant.path) or not args.privacy
    return chosen and all(x in mutant.name for x in args.words)

  return [
    mutant
    for pool in (planted_bugs(), edited())
    for mutant in sorted(filter(is_wanted, pool), key=order)[: args.sample]
  ]


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('words', nargs='*', help='all must be in the name')
  parser.add_argument(
    '--privacy', action='store_true', help='files that the guarantee is from'
  )
  parser.add_argument(
    '--sample', type=int, default=8, help='how many, planted and edited'
  )
  parser.add_argument('--seed', type=int, default=0, help='which edits')
  parser.add_argument(
    '--tested', action='store_true', help='the tests pass without any mutant'
  )
  parser.add_argument(
    '--ran', metavar='FILE', help='of pytest-cov: which test ran which line'
  )
  args = parser.parse_args()
  data = None
  if args.ran:
    data = coverage.CoverageData(args.ran)
    data.read()
  mutants = chosen_mutants(args)
  if not mutants:
    print('No mutant has these words in its name.')
    return 1
  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    if not args.tested:
      with tempfile.TemporaryDirectory() as folder:
        copies.write(pathlib.Path(folder))
        if by := killer(pathlib.Path(folder), near(mutants[0].path)):
          print('This fails without any mutant:', by)
          return 1
    survivors = 0
    for noticed, line in pool.map(lambda x: run(x, data), mutants):
      survivors += not noticed
      print(line, flush=True)
  print(f'{len(mutants) - survivors} of {len(mutants)} mutants killed')
  return 1 if survivors else 0


if __name__ == '__main__':
  sys.exit(main())
