"""A journal counts what is released again in another environment."""

import json

import jax
import numpy as np
import optax
import pytest
from dp_accounting import GaussianDpEvent, SelfComposedDpEvent

from prism_optax import accounting
from tests import cases, conftest
from tests.cases import DATA, FROZEN, PARAMS, N
from tests.core import seams


def make(path):
  return cases.make(
    optax.sgd(0.1), prng_key=None, journal=path, expected_batch_size=N,
    noise_multiplier=9.0,
  )  # fmt: skip


def test_a_step_done_again_elsewhere_is_another_release(tmp_path, monkeypatch):
  here = make(tmp_path / 'journal')
  saved = here.init(PARAMS)
  one = cases.first_step(here, start=saved)
  assert here.event() == make(tmp_path / 'none').event()
  planned = here.epsilon()
  # Again here: the same release.
  cases.assert_same_bits(cases.first_step(here, start=saved).params, one.params)
  assert here.epsilon() == planned
  assert ' again ' not in here.statement(one)
  # Elsewhere: fresh noise, which counts.
  elsewhere = make(tmp_path / 'journal')
  with seams.elsewhere():
    elsewhere.init(PARAMS)
    other = cases.first_step(elsewhere, start=saved)
  # Far above rounding (1e-7), far below independent noise (1e-3).
  assert cases.norm(jax.tree.map(np.subtract, one.params, other.params)) > 2e-5
  for made in (here, elsewhere):
    assert made.event() == SelfComposedDpEvent(GaussianDpEvent(9.0), 4)
    assert made.epsilon() > planned
    assert (
      '1 of 3 steps (epsilon is for all 3) and 1 of them done again elsewhere'
    ) in made.statement(other)
  counted = []
  with monkeypatch.context() as patch:
    patch.setattr(
      accounting, 'epsilon', lambda *_, entries, **__: counted.append(entries)
    )
    elsewhere.epsilon()
  each = sum(x.size for x in jax.tree.leaves(PARAMS))
  assert counted == [4 * each]
  # It goes on there, and a release more is no second one.
  batch = next(iter(elsewhere.batches(other, DATA)))
  state = elsewhere.step(other, batch, FROZEN)
  assert ' and 1 of them done again' in elsewhere.statement(state)
  # An old state does not undo what was released after it.
  fixed = elsewhere.statement(saved, stop_was_fixed=True)
  assert '2 of 3 steps (declared: the stop was fixed beforehand)' in fixed
  # Other data are refused all the same, and another program in one place.
  with pytest.raises(ValueError, match='a difference in data'):
    elsewhere.batches(state, tuple(2 * x for x in DATA))


def test_a_journal_is_for_one_run(tmp_path):
  path = tmp_path / 'journal'
  made = make(str(path))
  first, second = made.init(PARAMS), made.init(PARAMS)
  for call in (
    lambda: cases.first_step(made, start=second),
    lambda: made.statement(second),
  ):
    with pytest.raises(ValueError, match='is that of another run'):
      call()
  path.unlink()
  batch = next(iter(made.batches(first, DATA)))
  with pytest.raises(FileNotFoundError):
    made.step(first, batch, FROZEN)
  # Nothing was done: the buffers of the state are still there.
  assert np.isfinite(np.asarray(first.params['head'])).all()


# One step of a run, saved before it, in a process with other devices: without a
# journal, and with one.
_PROGRAM = """
import json, pathlib, sys
import jax.numpy as jnp, numpy as np, optax
from prism_optax import training
from tests import cases
from tests.training.noise_once_test import no_gradient
folder, params = pathlib.Path(sys.argv[1]), jnp.zeros(1000)
for journal in (None, folder / 'journal'):
  made = cases.make(
    optax.sgd(1.0), loss=no_gradient, params=params, prng_key=None,
    journal=journal)
  state, saved = made.init(params), folder / f'state {journal is None}'
  if sys.argv[2] == 'begin':
    training.save_state(saved, state)
  state = training.load_state(saved, state)
  try:
    batch = next(iter(made.batches(state, cases.DATA)))
    state = made.step(state, batch, jnp.ones(()))
    found = {'noise': np.asarray(state.params, float).tolist(),
      'statement': made.statement(state), 'epsilon': made.epsilon()}
  except ValueError as error:
    found = {'refused': str(error)}
  print(json.dumps(found))
"""


@pytest.mark.slow
def test_one_device_and_two(tmp_path):
  """Processes with another number of devices; the first one may go on."""

  def run(devices, what):
    printed = conftest.python('-c', _PROGRAM, tmp_path, what, count=devices)
    return [json.loads(line) for line in printed.splitlines()[-2:]]

  begun = run(1, 'begin')
  assert run(1, 'again') == begun
  refused, other = run(2, 'again')
  assert 'another environment' in refused['refused']
  one = begun[1]
  x, y = (np.array(z['noise']) for z in (one, other))
  assert abs(x @ y) < 6 / np.sqrt(len(x)) * np.sqrt(x @ x * (y @ y))
  assert 'again' not in one['statement']
  assert ' and 1 of them done again' in other['statement']
  assert other['epsilon'] > one['epsilon']
