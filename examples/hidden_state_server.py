"""A LoRA adapter on a host that learns little about the queries.

    python examples/hidden_state_server.py [--ledger ledger.sqlite [--create]]

A file to copy. The client trusts the gateway, which runs the base model (here a
stand-in). The adapter host owns a LoRA adapter and is curious:

    client --query--> Gateway --noised states--> AdapterHost
           <-answer--         <-----deltas------

For every query the gateway pays, from the session's budget and from that of all
sessions, or refuses and releases nothing; clips and noises the states, sends
only those, and adds the deltas that come back to its own states. Paying comes
first: a crash in between loses budget, not privacy. Put your web framework
around `Gateway`, and let it authenticate the session.

The guarantee is about another text of as many tokens (replace-one); with `pad`
every query releases, and pays for, as many. A ledger in a file is begun once,
by --create: one that was lost is not a fresh budget.
"""

import argparse
import concurrent.futures
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import accounting, inference

HIDDEN, RANK, MAX_TOKENS = 48, 4, 16
REPLACE_ONE = accounting.NeighboringRelation.REPLACE_ONE
_privatize = jax.jit(inference.privatize_hidden_states)
QUERIES = 'which tablets did my doctor write down', 'is this rash anything'


class Mechanism(NamedTuple):
  """What is done to a state before it leaves."""

  l2_clip_norm: float
  stddev: float
  pad: bool = False


def hidden_states(text: str) -> np.ndarray:
  """States of a text, (tokens, HIDDEN): a stand-in for a base model."""
  states = []
  for word in text.lower().split()[:MAX_TOKENS]:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], 'big')
    embedding = np.random.default_rng(seed).normal(size=HIDDEN)
    # Norms above 100, as behind the last layer of a transformer.
    states.append(170 / HIDDEN**0.5 * np.tanh(embedding))
  return np.array(states).reshape(-1, HIDDEN)


class AdapterHost:
  """Answers with the LoRA deltas of whatever it gets, and remembers it."""

  def __init__(self, seed: int = 1):
    generator = np.random.default_rng(seed)
    self.left = generator.normal(size=(HIDDEN, RANK)) / RANK**0.5
    self.right = generator.normal(size=(HIDDEN, RANK)) / HIDDEN**0.5
    self.seen: list[np.ndarray] = []

  def __call__(self, states: np.ndarray) -> np.ndarray:
    self.seen.append(states)
    return np.asarray(inference.lora_delta(states, self.left, self.right))


class Gateway:
  """Pays, privatises, asks the adapter host, adds."""

  def __init__(self, budget, mechanism: Mechanism, adapter: Callable):
    self.budget, self.mechanism, self.adapter = budget, mechanism, adapter

  def __call__(self, session: Any, text: Any) -> tuple[int, dict[str, Any]]:
    """A status as of HTTP, and the answer or why there is none."""
    states = hidden_states(text if isinstance(text, str) else '')
    if not len(states) or not isinstance(session, str) or not session:
      return 400, {'error': 'Expected the name of a session and some words.'}
    clip_norm, stddev, pad = self.mechanism
    released = MAX_TOKENS if pad else len(states)
    event = inference.release_event(stddev, clip_norm, REPLACE_ONE, released)
    try:
      spent = self.budget.spend(event, session)
    except accounting.BudgetExceeded as refused:
      # It depends on counts alone, not on what the query says.
      return 429, {'error': str(refused), 'scope': refused.scope}
    # One shape for all lengths, so that it compiles once.
    padded = np.zeros((MAX_TOKENS, HIDDEN), np.float32)
    padded[: len(states)] = states
    release = _privatize(
      padded, fresh_key(), l2_clip_norm=clip_norm, stddev=stddev
    )
    noised = np.asarray(release)
    # Whatever happens now, what was paid stays paid: the states have left.
    try:
      deltas = self.adapter(noised[:released])
    except OSError:
      return 502, {'error': 'The adapter host did not answer.'}
    return 200, {
      'outputs': states + deltas[: len(states)],
      'released': released,
      'epsilon_spent': spent,
      'epsilon_left': self.budget.remaining(session),
    }


def fresh_key() -> jax.Array:
  """A key from the operating system: no two requests share their noise."""
  words = jnp.asarray(np.frombuffer(os.urandom(16), np.uint32))
  return jax.random.wrap_key_data(words, impl='rbg')


def main(arguments: Sequence[str] | None = None) -> list[tuple[int, Any]]:
  """Two clients ask until they are refused; returns all answers."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--ledger', help='SQLite file')
  parser.add_argument('--create', action='store_true', help='begin it')
  given, delta = parser.parse_args(arguments), 1e-5
  sensitivity = inference.hidden_state_sensitivity(1.0, REPLACE_ONE)
  stddev = inference.gaussian_stddev(0.5, delta, sensitivity)
  ledger = {'path': given.ledger, 'create': given.create}
  budget = accounting.PrivacyBudget(2.5, delta, server_epsilon=4.0, **ledger)
  adapter = AdapterHost()
  gateway = Gateway(budget, Mechanism(1.0, stddev), adapter)

  def client(name: str) -> list[tuple[int, Any]]:
    answers = []
    while not answers or answers[-1][0] == 200:
      status, answer = gateway(name, QUERIES[len(answers) % 2])
      print(status, name, answer.get('error', answer.get('released')))
      answers.append((status, answer))
    return answers

  with concurrent.futures.ThreadPoolExecutor(2) as pool:
    answers = [x for y in pool.map(client, ['client 0', 'client 1']) for x in y]
  print(f'epsilon {budget.export()["server"]["spent"]:.2f} of 4 is spent')
  return answers


if __name__ == '__main__':
  main()
