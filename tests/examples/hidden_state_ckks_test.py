"""The encrypted pipeline: the delta of the clear, and who sees what."""

import hidden_state_ckks as example
import numpy as np
import pytest

from prism_optax import accounting

N, R, TOKENS, DELTA = 24, 3, 3, 1e-5
# CKKS at a scale of 2^40 keeps about six digits here.
PRECISION = 1e-4
tenseal = pytest.importorskip(
  'tenseal', reason='TenSEAL is not installed (the extra "he").'
)


@pytest.fixture(scope='module')
def parties():
  rng = np.random.default_rng(0)
  left, right = rng.normal(size=(N, R)), rng.normal(size=(N, R))
  states = rng.normal(size=(TOKENS, N)) * 30
  return left, right, states


def start(left, right, cap=100.0, stddev=2.0):
  budget = accounting.PrivacyBudget(cap, DELTA, composition='renyi')
  client = example.Client(budget, l2_clip_norm=1.0, stddev=stddev)
  return budget, client, example.Server(client.public_context(), left, right)


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_server_cannot_decrypt_and_takes_no_secret_key(parties):
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
def test_main_answers_until_the_budget_is_spent(capsys):
  assert example.main(16, 2, tokens=9) == 0
  printed = capsys.readouterr().out
  assert 'MB of keys, sent once' in printed
  assert 'token 5: ' in printed
  assert 'would exceed the budget' in printed


def test_without_tenseal_there_is_a_message(monkeypatch, capsys):
  monkeypatch.setattr(example, 'tenseal', None)
  assert example.main() == 1
  assert 'prism-optax[he]' in capsys.readouterr().err
