"""The ledger file: threads, processes, kills, changes from outside."""

import concurrent.futures
import math
import os
import pathlib
import sqlite3
import subprocess
import sys
import textwrap

import dp_accounting
import pytest

from prism_optax import accounting
from tests.core import seams

DELTA = 1e-5
RELEASE = dp_accounting.GaussianDpEvent(4.8448)
ROOT = pathlib.Path(accounting.__file__).parent.parent
# The package without its __init__, which imports JAX: what a ledger needs
# starts in a second, and that it needs no JAX is checked on the way.
PRELUDE = textwrap.dedent(f"""
  import sys, types
  package = types.ModuleType('prism_optax')
  package.__path__ = [{str(ROOT)!r}]
  sys.modules['prism_optax'] = package
  from prism_optax import accounting
  assert not {{'jax', 'optax'}} & set(sys.modules)
  import dp_accounting
  release = dp_accounting.GaussianDpEvent(4.8448)
""")


needs_fork = pytest.mark.skipif(
  not hasattr(os, 'fork'), reason='Needs os.fork and kill -9.'
)


def start(script, *arguments, **options):
  return subprocess.Popen(
    [sys.executable, '-c', PRELUDE + textwrap.dedent(script), *arguments],
    stdout=subprocess.PIPE, text=True, **options,
  )  # fmt: skip


def epsilon_of(count):
  return accounting.gaussian_epsilon(math.sqrt(count) / 4.8448, DELTA)


def opened(path, epsilon=3.0, **options):
  return accounting.PrivacyBudget(epsilon, DELTA, path=path, **options)


def consistent(path, cap, **options):
  """Checks that accounts and ledger tell the same story; returns counts."""
  with sqlite3.connect(path) as connection:
    assert connection.execute('PRAGMA integrity_check').fetchone() == ('ok',)
  connection.close()
  exported = opened(path, cap, **options).export()
  counts = {}
  for row in exported['ledger']:
    counts[row['session']] = counts.get(row['session'], 0) + row['count']
  assert sorted(exported['sessions']) == sorted(counts)
  for name, figures in exported['sessions'].items():
    assert figures['spent'] == pytest.approx(epsilon_of(counts[name]))
    assert figures['spent'] <= cap
  return counts


@pytest.mark.parametrize('in_memory', [True, False])
def test_sixty_four_threads_never_pass_the_cap(tmp_path, in_memory):
  path = None if in_memory else tmp_path / 'ledger.sqlite'
  cap = epsilon_of(100)
  budget = opened(path, cap, create=True)

  def work(_):
    granted = 0
    for _ in range(4):  # 256 attempts on 100 releases.
      try:
        budget.spend(RELEASE, 'a')
        granted += 1
      except accounting.BudgetExceeded:
        pass
    return granted

  with concurrent.futures.ThreadPoolExecutor(64) as pool:
    granted = sum(pool.map(work, range(64)))
  assert granted == 100
  assert budget.spent('a') == pytest.approx(cap)
  assert len(budget.export()['ledger']) == 100
  if path:
    assert consistent(path, cap) == {'a': 100}


@pytest.mark.slow
def test_eight_processes_of_eight_threads_never_pass_the_cap(tmp_path):
  """Two sessions and the server's cap, which ends first."""
  path = tmp_path / 'ledger.sqlite'
  cap, server = epsilon_of(100), epsilon_of(150)
  opened(path, cap, server_epsilon=server, create=True)
  script = """
    import concurrent.futures
    path, cap, server = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    budget = accounting.PrivacyBudget(
      cap, 1e-5, path=path, server_epsilon=server
    )

    def granted(number):
      count = 0
      for _ in range(5):  # 8 x 8 x 5 = 320 attempts on 150 releases.
        try:
          budget.spend(release, f'session {number % 2}')
          count += 1
        except accounting.BudgetExceeded:
          pass
      return count

    print('ready', flush=True)
    input()  # Until all have been started.
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
      print(sum(pool.map(granted, range(8))))
  """
  arguments = script, str(path), repr(cap), repr(server)
  workers = [start(*arguments, stdin=subprocess.PIPE) for _ in range(8)]
  assert [x.stdout.readline() for x in workers] == ['ready\n'] * 8
  for worker in workers:
    worker.stdin.write('\n')
    worker.stdin.flush()
  assert sum(int(x.communicate(timeout=200)[0]) for x in workers) == 150
  counts = consistent(path, cap, server_epsilon=server)
  assert sum(counts.values()) == 150
  assert max(counts.values()) <= 100


@pytest.mark.slow
@needs_fork
def test_killed_processes_lose_no_recorded_spend(tmp_path):
  """What was acknowledged is in the file; at most one more is."""
  path = tmp_path / 'ledger.sqlite'
  cap = epsilon_of(100_000)
  opened(path, cap, create=True)
  script = """
    import os, random, signal, time
    cap, path = float(sys.argv[2]), sys.argv[1]
    chance = random.Random(0)
    for _ in range(60):
      read, write = os.pipe()
      child = os.fork()
      if not child:
        budget = accounting.PrivacyBudget(cap, 1e-5, path=path)
        while True:
          budget.spend(release, 'a')
          os.write(write, b'.')
      os.close(write)
      os.read(read, 1)  # It is at work.
      # A spend takes a millisecond or two: any part of it may be hit.
      time.sleep(chance.uniform(0.0, 0.02))
      os.kill(child, signal.SIGKILL)
      os.waitpid(child, 0)
      acknowledged = 1 + len(os.read(read, 65536))
      budget = accounting.PrivacyBudget(cap, 1e-5, path=path)
      print(acknowledged, len(budget.export()['ledger']), flush=True)
  """
  worker = start(script, str(path), repr(cap))
  lines = worker.communicate(timeout=200)[0].splitlines()
  assert len(lines) == 60
  recorded = 0
  for line in lines:
    acknowledged, found = map(int, line.split())
    assert acknowledged <= found - recorded <= acknowledged + 1
    recorded = found
  assert consistent(path, cap) == {'a': recorded}


def test_reopening_continues_and_another_cap_is_refused(tmp_path):
  path = tmp_path / 'ledger.sqlite'
  first = opened(path, server_epsilon=5.0, create=True)
  spent = first.spend(RELEASE, 'a', count=2)
  again = opened(path, server_epsilon=5.0)
  assert again.spent('a') == spent
  assert again.export() == first.export()
  relation = accounting.NeighboringRelation.REPLACE_ONE
  for changed, message in (
    ({'epsilon': 4.0}, r'caps=.*4\.0.*3\.0'),
    ({'server_epsilon': None}, 'caps'),
    ({'composition': 'renyi'}, "composition='renyi'"),
    ({'neighboring_relation': relation}, 'neighboring_relation'),
  ):
    with pytest.raises(ValueError, match=message):
      opened(path, **{'server_epsilon': 5.0} | changed)
  assert again.export() == first.export()


def test_a_ledger_that_was_moved_away_is_no_fresh_budget(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  budget = opened('ledger.sqlite', create=True)
  budget.spend(RELEASE, 'a')
  (tmp_path / 'elsewhere').mkdir()
  monkeypatch.chdir(tmp_path / 'elsewhere')
  budget.spend(RELEASE, 'a')  # The same file as before.
  assert len(budget.export()['ledger']) == 2
  (tmp_path / 'ledger.sqlite').rename(tmp_path / 'moved')
  with pytest.raises(sqlite3.OperationalError):
    budget.spend(RELEASE, 'a')
  with pytest.raises(FileNotFoundError, match=r'create=True once.*not a fresh'):
    opened(tmp_path / 'ledger.sqlite')
  assert not (tmp_path / 'ledger.sqlite').exists()


def test_an_error_while_writing_leaves_nothing_half_recorded(tmp_path):
  """The row is written and not committed: it does not stay."""
  budget = opened(tmp_path / 'ledger', server_epsilon=5.0, create=True)
  budget.spend(RELEASE, 'a')
  before = budget.export()
  with seams.interrupted('append'), pytest.raises(KeyboardInterrupt):
    budget.spend(RELEASE, 'a')
  assert budget.export() == before


def test_a_busy_file_is_a_timeout_not_a_grant(tmp_path):
  budget = opened(tmp_path / 'ledger', timeout=0.05, create=True)
  other = sqlite3.connect(tmp_path / 'ledger', isolation_level=None)
  other.execute('BEGIN IMMEDIATE')
  with pytest.raises(TimeoutError, match=r'0\.05'):
    budget.spend(RELEASE, 'a')
  other.execute('ROLLBACK')
  other.close()
  assert budget.export()['ledger'] == []


@needs_fork
def test_forked_processes_share_a_file_and_no_memory(tmp_path):
  script = """
    import os
    for path in (None, sys.argv[1]):
      budget = accounting.PrivacyBudget(3.0, 1e-5, path=path, create=True)
      budget.spend(release, 'a')
      child = os.fork()
      if not child:
        try:
          budget.spend(release, 'a')
        except RuntimeError as error:
          os._exit(3 if 'in memory' in str(error) else 4)
        os._exit(0)
      code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
      print(code, len(budget.export()['ledger']), flush=True)
  """
  worker = start(script, str(tmp_path / 'ledger.sqlite'))
  assert worker.communicate(timeout=60)[0].split() == ['3', '1', '0', '2']
