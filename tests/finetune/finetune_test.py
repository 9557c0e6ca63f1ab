"""The command line: what it refuses, writes, resumes and keeps secret."""

import argparse
import contextlib
import json
import pathlib
import re
import shutil
import signal
import stat

import pytest

from prism_optax.finetune import main as finetune
from prism_optax.finetune import run, training
from tests.core import seams

STEPS = 6


def _arguments(
  tiny_files, tiny_model, output, *more, noise=('--target-epsilon', '2')
) -> list[str]:
  train, evaluation = tiny_files
  return [
    *('train', '--data', str(train), '--eval', str(evaluation)),
    *('--model', str(tiny_model), '--output', str(output)),
    *(*noise, '--delta', '1e-3', '--steps', str(STEPS)),
    *('--batch-size', '16', '--microbatch-size', '8', '--rank', '2'),
    *('--lora-targets', 'attention', '--max-length', '7', '--seed', '5'),
    *('--eval-every', '2', '--checkpoint-every', '2', *more),
  ]


def _results(output: pathlib.Path) -> list[bytes]:
  names = ('adapter.safetensors', 'metrics.jsonl', 'summary.json')
  return [(output / name).read_bytes() for name in names]


# A run takes fifteen seconds: the tests of it are slow. Fast is the one below,
# of a simpler optimizer; training_test has the step of `prism`.
@pytest.fixture(scope='module')
def finished(tmp_path_factory, tiny_files, tiny_model):
  """The folder of a run that ended by itself."""
  output = tmp_path_factory.mktemp('finished') / 'out'
  assert finetune.main(_arguments(tiny_files, tiny_model, output)) == 0
  return output


@contextlib.contextmanager
def interrupted(step):
  """Ctrl-C while the batch of a step is drawn, and another one, which stops."""
  done = []

  def stop(number):
    if number == step and not done:
      done.append(number)
      signal.raise_signal(signal.SIGINT)
      with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

  # A shell ignores Ctrl-C for what it runs in the background, as these tests.
  before = signal.signal(signal.SIGINT, signal.default_int_handler)
  try:
    with seams.before_each_draw(stop):
      yield
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
  finally:
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_output_has_adapter_and_metrics_and_nothing_private(finished, capsys):
  assert not (finished / run.FOLDER).exists()
  summary = json.loads((finished / 'summary.json').read_text())
  # A run that anyone can repeat must not claim to be private.
  assert 'against anyone who knows prng_key' in summary['statement']
  # What is finished is not done again, and its folder is taken.
  before = _results(finished)
  assert finetune.main([*BASE, '--output', str(finished)]) == 2
  assert 'is not empty' in capsys.readouterr().err
  assert finetune.main(['train', '--output', str(finished), '--resume']) == 0
  assert 'epsilon' in capsys.readouterr().out
  assert _results(finished) == before


@pytest.mark.slow
def test_an_audit_of_a_run_finds_missing_noise(finished, capsys):
  """47 coins are secret with the noise of the run, and none without."""
  argv = ['audit', str(finished), '--canaries', '47', '--noise', '0']
  assert finetune.main(argv) == 0
  lines = capsys.readouterr().out.splitlines()
  silent = [line for line in lines if line.startswith('noise x 0, ')]
  assert len(silent) == 2
  assert lines[1].startswith('14 guesses of 47 coins')
  # A canary that was in and never drawn cannot be told.
  assert all(int(line[32:].split()[0]) >= 11 for line in silent)
  assert finetune.main(['audit', str(finished), '--canaries', '61']) == 2
  assert 'to the declared size 60, got 61' in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_run_ends_like_an_uninterrupted_one(
  finished, tiny_files, tiny_model, tmp_path, capsys
):
  output = tmp_path / 'out'
  with interrupted(2):
    status = finetune.main(_arguments(tiny_files, tiny_model, output))
  assert status == 130
  assert re.search(
    f'3 of 6 .*Spent if you stop here: .*--output {output} --resume',
    capsys.readouterr().err, re.S,
  )  # fmt: skip
  folder = output / run.FOLDER
  assert stat.S_IMODE(folder.stat().st_mode) == 0o700
  assert not (output / 'adapter.safetensors').exists()
  # A row that was written after the checkpoint.
  with (output / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 4, "eval_loss": 0, "eval_accuracy": 0}\n')

  # On other data the same noise would be a second release.
  train = pathlib.Path(tiny_files[0])
  original = train.read_text()
  train.write_text(original + '{"text": "dull film", "label": 0}\n')
  arguments = ['train', '--output', str(output), '--resume']
  try:
    # The declared size is a constant of the run: one row more is too many.
    assert finetune.main(arguments) == 2
    assert '--dataset-size 60' in capsys.readouterr().err
    train.write_text(original.replace('plot', 'film', 1))
    assert finetune.main(arguments) == 2
    assert 'a difference in data (the records' in capsys.readouterr().err
  finally:
    train.write_text(original)

  # Without the checkpoint its noise is lost, and other noise is a new release.
  lost = tmp_path / 'lost'
  shutil.copytree(output, lost)
  shutil.rmtree(lost / run.FOLDER)
  assert finetune.main(['train', '--output', str(lost), '--resume']) == 2
  assert 'is gone' in capsys.readouterr().err

  assert finetune.main([*arguments, '--steps', '7']) == 2
  assert '--steps 7 contradicts' in capsys.readouterr().err
  assert finetune.main(arguments) == 0
  assert _results(output) == _results(finished)


BASE = [
  *('train', '--data', 'T', '--eval', 'E'),
  *('--target-epsilon', '3', '--delta', '1e-5'),
]
PLAN = ['plan', '--dataset-size=9', '--hours=1', '--example-gradients=9']


@pytest.mark.parametrize(
  ('argv', 'message'),
  [
    ([*BASE, '--eval', 'T'], '--eval T is --data, but has to be public'),
    ([*BASE[:7]], '--delta is needed'),
    ([*BASE[:5], '--delta', '1e-5'], 'one of --target-epsilon and'),
    ([*BASE, '--noise-multiplier', '1'], 'one of --target-epsilon and'),
    ([*BASE, '--delta', '1'], r'--delta: .* got 1'),
    ([*BASE, '--l2-clip-norm', 'nan'], r'--l2-clip-norm: .* got nan'),
    ([*BASE, '--learning-rate', '0'], r'--learning-rate: .* got 0'),
    ([*BASE[:5], '--noise-multiplier', '-1'], r'--noise-multiplier: .* got -1'),
    ([*BASE, '--steps', '0'], r'--steps: .* got 0'),
    (
      [*BASE[:5], '--noise-multiplier', '1', '--head', 'released'],
      '--head released has a share of the budget, but --target-epsilon is not',
    ),
    (['train', '--mesh', 'data=3', '--microbatch-size', '4'], '--mesh, got 4'),
    (['train', '--mesh', 'data=8'], '--mesh asks for 8 devices, but there'),
    ([*BASE, '--optimizer', 'adamw'], 'adamw is not private'),
    (['train', '--batch-size', '901'], '901 exceeds the dataset size 900'),
    (['trian'], 'unrecognized arguments: trian'),
    (['check-data', '--data', 'T'], 'needs --labels or --eval'),
    (['train', '--labels', 'a', 'b'], r'--labels .* needs --data'),
    (['train', '--task', 'classify'], '--task classify needs --data'),
    ([*BASE, '--resume'], '--resume needs --output'),
    (['train', '--output', 'nowhere', '--resume'], 'no run in nowhere'),
    ([*BASE], '--eval: there is no file E'),
    ([*PLAN, *BASE[5:]], '--gradients-per-second: give both or none'),
    ([*PLAN, '--gradients-per-second=2', *BASE[5:]], '9 and --hours 1: give'),
  ],
)
def test_bad_options_are_named_with_their_value(
  argv, message, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  assert finetune.main(argv) == 2
  error = capsys.readouterr().err
  assert error.startswith('error: ')
  assert re.search(message, error), error
  assert not list(tmp_path.iterdir())  # And nothing is left behind.


@pytest.mark.slow
@pytest.mark.parametrize(
  ('more', 'message'),
  [
    (['--dataset-size', '59'], '--dataset-size 59 is below'),
    (['--batch-size', '61'], '--batch-size 61 exceeds the dataset size 60'),
    (['--labels', '0', '2'], "lacks ['1'], which occur in the evaluation"),
    (['--text-column', 'review'], "no column 'review', only ['label', 'text']"),
    (['--rank', '9'], 'rank <= 8'),
    (['--max-length', '17'], '3 <= --max-length <= 16, got 17'),
    (['--model', 'nowhere'], '--model nowhere: there is no such folder.'),
    (['--mesh', 'axis=2'], '--mesh: expected data=N with N >= 1, got axis=2'),
    (['--model', 'org/net'], 'hf download org/net --local-dir net, and --mod'),
  ],
)
def test_bad_data_and_models_are_named(
  tiny_files, tiny_model, tmp_path, capsys, more, message
):
  argv = _arguments(tiny_files, tiny_model, tmp_path / 'out', *more)
  assert finetune.main(argv) == 2
  assert message in capsys.readouterr().err


def test_the_learning_rate_follows_steps_and_head():
  for steps, rate, head in (
    (300, 1e-2, 'random'), (1200, 5e-3, 'random'), (12, 5e-2, 'random'),
    (12, 1e-2, 'released'), (1200, 5e-3, 'released'),
  ):  # fmt: skip
    given = argparse.Namespace(
      learning_rate=None, task='classify', steps=steps, head=head
    )
    assert training.learning_rate(given, 'prism') == pytest.approx(rate)
