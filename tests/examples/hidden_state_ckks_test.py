"""The encrypted pipeline: the delta of the clear, and who sees what."""

import hidden_state_ckks as example
import numpy as np
import pytest

from prism_optax import accounting, inference

N, R, TOKENS, DELTA = 24, 3, 3, 1e-5
# CKKS at a scale of 2^40 keeps about six digits here.
PRECISION = 1e-4


@pytest.fixture(scope='module')
def tenseal():
  return pytest.importorskip(
    'tenseal', reason='TenSEAL is not installed (the extra "he").'
  )


@pytest.fixture(scope='module')
def parties(tenseal):
  del tenseal
  rng = np.random.default_rng(0)
  left, right = rng.normal(size=(N, R)), rng.normal(size=(N, R))
  states = rng.normal(size=(TOKENS, N)) * 30
  return left, right, states


def start(left, right, cap=100.0, stddev=2.0, rescale=False):
  budget = accounting.PrivacyBudget(cap, DELTA, composition='renyi')
  client = example.Client(
    budget, l2_clip_norm=1.0, stddev=stddev, rescale=rescale
  )
  return budget, client, example.Server(client.public_context(), left, right)


@pytest.mark.parametrize(
  ('mode', 'releases'),
  [pytest.param('split', 1, marks=pytest.mark.slow), ('token', TOKENS)],
)
def test_the_delta_is_that_of_the_clear(parties, mode, releases):
  left, right, states = parties
  budget, client, server = start(left, right)
  report = example.run(mode, client, server, budget, states, left, right)
  assert report.tokens == TOKENS
  assert report.releases == releases
  assert report.error < PRECISION
  assert report.delta_norm > 100 * PRECISION
  assert report.outputs.shape == (TOKENS, N)
  assert report.upload > 0 < report.download
  # A block is paid for once, tokens one by one.
  event = inference.release_event(
    2.0, 1.0, example.REPLACE_ONE, releases, noise='discrete'
  )
  same = accounting.PrivacyBudget(100.0, DELTA, composition='renyi')
  assert report.epsilon == pytest.approx(same.spend(event, 'a'))


def test_noised_states_are_what_is_encrypted(parties):
  """Without a key nothing is read; with it, the noised state and no other."""
  left, right, states = parties
  _, client, server = start(left, right)
  noised = client.privatised(states, 'a')
  assert np.linalg.norm(noised - states) > 100  # Clipped from 30 to 1.
  ciphertext = client.encrypt(noised[0])
  np.testing.assert_allclose(
    client.decrypt(ciphertext), noised[0], atol=PRECISION
  )
  np.testing.assert_allclose(
    client.decrypt(server.delta(ciphertext)),
    left @ right.T @ noised[0],
    atol=PRECISION,
  )
  # The same state twice is two ciphertexts.
  assert client.encrypt(noised[0]) != ciphertext


def test_the_server_cannot_decrypt_and_takes_no_secret_key(parties, tenseal):
  left, right, _ = parties
  _, client, server = start(left, right)
  sent = client.encrypt(np.ones(N))
  vector = tenseal.ckks_vector_from(server._context, sent)
  with pytest.raises(ValueError, match='secret'):
    vector.decrypt()
  everything = client._context.serialize(save_secret_key=True)
  with pytest.raises(ValueError, match='secret key'):
    example.Server(everything, left, right)


@pytest.mark.slow
def test_tokens_are_refused_when_the_budget_is_spent(parties, capsys):
  left, right, states = parties
  probe = accounting.PrivacyBudget(100.0, DELTA, composition='renyi')
  event = inference.release_event(
    2.0, 1.0, example.REPLACE_ONE, noise='discrete'
  )
  probe.spend(event, 'a', count=2)
  budget, client, server = start(left, right, cap=probe.spent('a') * 1.1)
  report = example.run('token', client, server, budget, states, left, right)
  assert 0 < report.tokens < TOKENS
  assert len(report.outputs) == report.tokens
  assert 'would exceed the budget' in capsys.readouterr().out


@pytest.mark.slow
def test_rescaling_undoes_the_clip(parties):
  """With little noise the output is h + left right^T h, as without a clip."""
  left, right, states = parties
  budget, client, server = start(
    left, right, cap=1e9, stddev=1e-4, rescale=True
  )
  report = example.run('token', client, server, budget, states, left, right)
  expected = states + states @ right @ left.T
  # Noise of 1e-4 and CKKS's error, both scaled up by the clip's factor.
  np.testing.assert_allclose(report.outputs, expected, atol=1.0)
  assert np.abs(expected - states).max() > 100


@pytest.mark.slow
def test_main_prints_both_modes(parties, capsys):
  del parties
  reports = example.main(
    ['--hidden', '16', '--rank', '2', '--tokens', '2', '--epsilon', '5']
  )
  assert [report.mode for report in reports] == ['split', 'token']
  assert all(report.error < PRECISION for report in reports)
  printed = capsys.readouterr().out
  assert 'MB, sent once' in printed
  assert 'signal to noise' in printed


def test_without_tenseal_there_is_a_message(monkeypatch, capsys):
  monkeypatch.setattr(example, 'tenseal', None)
  assert example.main([]) == []
  assert 'prism-optax[he]' in capsys.readouterr().err


@pytest.mark.parametrize(
  'arguments',
  [
    ['--hidden', '4097'],
    ['--rank', '0'],
    ['--hidden', '8', '--rank', '9'],
    ['--tokens', '0'],
  ],
)
def test_bad_options_are_refused(arguments):
  with pytest.raises(SystemExit):
    example.main(arguments)
