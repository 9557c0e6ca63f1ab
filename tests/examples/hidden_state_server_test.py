"""The gateway: what leaves, what is paid, what is refused."""

import hidden_state_server as example
import numpy as np
import pytest

from prism_optax import accounting, inference

DELTA = 1e-5
TEXT = 'seven words are what this query has'
MECHANISM = example.Mechanism(l2_clip_norm=1.0, stddev=14.0, pad=False)


def cap_of(vectors):
  """A budget for exactly so many released vectors."""
  mu = 2.0 * MECHANISM.l2_clip_norm / MECHANISM.stddev
  return accounting.gaussian_epsilon(mu * vectors**0.5, DELTA)


def ask(gateway, session='alice', text=TEXT):
  return gateway(session, text)


def service(cap=50.0, mechanism=MECHANISM):
  adapter = example.AdapterHost()
  budget = accounting.PrivacyBudget(cap, DELTA)
  return example.Gateway(budget, mechanism, adapter), adapter


def test_a_query_is_answered_with_state_plus_delta_of_the_noised_state():
  gateway, adapter = service()
  status, answer = ask(gateway)
  assert status == 200
  assert answer['released'] == 7
  states = example.hidden_states(TEXT)
  [noised] = adapter.seen
  delta = inference.lora_delta(noised, adapter.left, adapter.right)
  np.testing.assert_allclose(
    answer['outputs'], states + np.asarray(delta), rtol=1e-4, atol=1e-3
  )
  assert answer['epsilon_spent'] == pytest.approx(cap_of(7))
  assert answer['epsilon_spent'] == gateway.budget.spent('alice')
  assert answer['epsilon_left'] == gateway.budget.remaining('alice')


def test_the_adapter_host_sees_clipped_and_noised_states_only():
  gateway, adapter = service(5000.0)
  for _ in range(40):
    assert ask(gateway)[0] == 200
  states = example.hidden_states(TEXT)
  assert np.all(np.linalg.norm(states, axis=-1) > 80)
  seen = np.array(adapter.seen)  # (40, 7, HIDDEN)
  # Averaged over forty answers there is the clipped state, of norm 1, under
  # noise of norm 14 sqrt(48 / 40) = 15.3: nothing of norm 80 has left.
  assert np.all(np.linalg.norm(seen.mean(0), axis=-1) < 1 + 2 * 15.3)
  noise = seen - states / np.linalg.norm(states, axis=-1, keepdims=True)
  energy = np.sum(np.square(noise / 14.0))
  assert abs(energy - noise.size) < 5 * np.sqrt(2 * noise.size)
  # Never the same noise twice. One number may come twice by chance, as it did.
  rows = seen.reshape(-1, seen.shape[-1])
  assert len(np.unique(rows, axis=0)) == len(rows)


def test_refusal_is_429_and_releases_nothing():
  gateway, adapter = service(cap_of(15))
  assert [ask(gateway)[0] for _ in range(2)] == [200, 200]
  status, answer = ask(gateway)
  assert status == 429
  assert answer['scope'] == 'session'
  # One word is one vector, and fits.
  assert ask(gateway, text='one')[0] == 200
  assert ask(gateway, text='one')[0] == 429
  assert ask(gateway, session='bob')[0] == 200
  assert sum(map(len, adapter.seen)) == 7 + 7 + 1 + 7


def test_padding_releases_and_pays_the_same_for_every_length():
  gateway, adapter = service(mechanism=MECHANISM._replace(pad=True))
  for text in ('one', TEXT, 'word ' * 100):
    assert ask(gateway, text=text)[0] == 200
  assert [len(seen) for seen in adapter.seen] == [example.MAX_TOKENS] * 3
  assert np.all(np.abs(adapter.seen[0]).max(-1) > 1)  # Noise on padding, too.
  assert gateway.budget.spent('alice') == pytest.approx(
    cap_of(3 * example.MAX_TOKENS)
  )


def test_a_host_that_fails_was_paid_for():
  gateway, _ = service()

  def broken(states):
    raise ConnectionError

  gateway.adapter = broken
  assert ask(gateway)[0] == 502
  assert gateway.budget.spent('alice') == pytest.approx(cap_of(7))


@pytest.mark.parametrize(
  'given', [(None, TEXT), ('alice', None), ('', TEXT), (3, TEXT), ('a', '  ')]
)
def test_bad_requests_cost_nothing(given):
  gateway, adapter = service()
  status, answer = gateway(*given)
  assert status == 400
  assert 'error' in answer
  assert adapter.seen == []
  assert gateway.budget.export()['ledger'] == []


def test_main_shows_answers_and_refusals_and_goes_on_with_its_ledger(
  tmp_path, capsys
):
  arguments = ['--ledger', str(tmp_path / 'ledger.sqlite')]
  with pytest.raises(FileNotFoundError, match='create=True once'):
    example.main(arguments)
  answers = example.main([*arguments, '--create'])
  statuses = [status for status, _ in answers]
  assert statuses.count(429) == 2  # Each client stops at its refusal.
  assert statuses.count(200) >= 4
  printed = capsys.readouterr().out
  assert '200 client 0 7' in printed
  assert 'would exceed the budget' in printed
  again = example.main(arguments)
  assert sum(answer.get('released', 0) for _, answer in again) <= 6
  with pytest.raises(FileExistsError, match='Leave create=True out'):
    example.main([*arguments, '--create'])
