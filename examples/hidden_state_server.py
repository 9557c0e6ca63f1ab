"""A LoRA adapter on a host that learns little about the queries.

    python examples/hidden_state_server.py
        Starts everything on this machine, sends queries until the budget is
        spent, and prints what was answered, what was refused and why.

    python examples/hidden_state_server.py --ledger runs/ledger.sqlite --create
        The same with a ledger in a file, which is begun. Started again without
        --create it goes on where it was, and soon refuses everything; and if
        the file is gone it does not start, for a ledger that was lost is not a
        fresh budget.

Three parties talk over HTTP on the loopback interface:

    client --query--> gateway --noised states--> adapter host
           <-answer--         <-----deltas------

The client is the owner of the query and trusts the gateway, which runs the
base model (here a stand-in of a few lines). The adapter host owns a LoRA
adapter and is curious. For every query the gateway

  1. computes the hidden states, one for each token,
  2. pays for their release from the session's budget and from the budget of
     all sessions, or answers 429 and releases nothing,
  3. clips and noises them (`inference.privatize_hidden_states`),
  4. sends only those to the adapter host, and adds the deltas that come back
     to its own states.

Paying comes before releasing: a crash in between loses budget, not privacy.

What the adapter host sees: noised states, the number of tokens of each query,
and when it was asked. What it does not see: the query, the states, the session.
The guarantee is about another text of the same number of tokens in the place of
the session's texts (neighbouring relation replace-one); the number itself is
hidden only as far as padding hides it: with --pad every query releases, and
pays for, the same number of vectors.

A session's name is a claim of the client here. In earnest it comes from
authentication; the server-wide cap holds whatever the names are.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import hashlib
import http.server
import json
import math
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import accounting, inference

HIDDEN, RANK, MAX_TOKENS = 48, 4, 16
REPLACE_ONE = accounting.NeighboringRelation.REPLACE_ONE

Handler = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


class Mechanism(NamedTuple):
  """What is done to a state before it leaves."""

  l2_clip_norm: float
  stddev: float
  pad: bool


@functools.cache
def _mixing() -> np.ndarray:
  generator = np.random.default_rng(0)
  return generator.normal(size=(HIDDEN, HIDDEN)) / math.sqrt(HIDDEN)


def hidden_states(text: str) -> np.ndarray:
  """States of a text, (tokens, HIDDEN): a stand-in for a base model."""
  states, context = [], np.zeros(HIDDEN)
  for word in text.split()[:MAX_TOKENS]:
    digest = hashlib.sha256(word.lower().encode()).digest()
    seed = int.from_bytes(digest[:8], 'big')
    embedding = np.random.default_rng(seed).normal(size=HIDDEN)
    context = np.tanh(_mixing() @ context + embedding)
    # Norms near 170, as behind the last layer of a transformer.
    states.append(170 / math.sqrt(HIDDEN) * context)
  return np.array(states).reshape(-1, HIDDEN)


class AdapterHost:
  """Answers with the LoRA deltas of whatever it gets, and remembers it."""

  def __init__(self, seed: int = 1):
    generator = np.random.default_rng(seed)
    self.left = generator.normal(size=(HIDDEN, RANK)) / math.sqrt(RANK)
    self.right = generator.normal(size=(HIDDEN, RANK)) / math.sqrt(HIDDEN)
    self.seen: list[np.ndarray] = []

  def __call__(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    states = np.asarray(body['states'], np.float32)
    self.seen.append(states)
    deltas = inference.lora_delta(states, self.left, self.right)
    return 200, {'deltas': np.asarray(deltas).tolist()}


class Gateway:
  """Pays, privatises, asks the adapter host, adds."""

  def __init__(
    self,
    budget: accounting.PrivacyBudget,
    mechanism: Mechanism,
    adapter_url: str,
  ):
    self._budget, self._mechanism = budget, mechanism
    self._adapter_url = adapter_url

  def __call__(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    text, session = body.get('text'), body.get('session')
    if not isinstance(text, str) or not isinstance(session, str) or not session:
      return 400, {'error': 'Expected {"session": name, "text": text}.'}
    states = hidden_states(text)
    if not len(states):
      return 400, {'error': 'The text has no words.'}
    released = MAX_TOKENS if self._mechanism.pad else len(states)
    event = inference.release_event(
      self._mechanism.stddev,
      self._mechanism.l2_clip_norm,
      REPLACE_ONE,
      released,
    )
    try:
      spent = self._budget.spend(event, session)
    except accounting.BudgetExceeded as refused:
      # It depends on counts alone, not on what the query says.
      return 429, {
        'error': str(refused),
        'scope': refused.scope,
        'epsilon_left': refused.remaining,
      }
    noised = self._privatised(states)[:released]
    # Whatever happens now, what was paid stays paid: the states have left.
    try:
      status, answer = post(self._adapter_url, {'states': noised.tolist()})
    except OSError:
      return 502, {'error': 'The adapter host did not answer.'}
    if status != 200:
      return 502, {'error': f'The adapter host answered {status}.'}
    outputs = states + np.asarray(answer['deltas'])[: len(states)]
    return 200, {
      'outputs': outputs.tolist(),
      'released': released,
      'epsilon_spent': spent,
      'epsilon_left': self._budget.remaining(session),
    }

  def _privatised(self, states: np.ndarray) -> np.ndarray:
    # One shape for all lengths, so that it compiles once.
    padded = np.zeros((MAX_TOKENS, HIDDEN), np.float32)
    padded[: len(states)] = states
    return np.asarray(
      _noised(
        padded,
        fresh_key(),
        self._mechanism.l2_clip_norm,
        self._mechanism.stddev,
      )
    )


@jax.jit
def _noised(
  states: jax.Array, key: jax.Array, l2_clip_norm: float, stddev: float
) -> jax.Array:
  return inference.privatize_hidden_states(
    states, key, l2_clip_norm=l2_clip_norm, stddev=stddev
  )


def fresh_key() -> jax.Array:
  """A key from the operating system: no two requests share their noise."""
  words = jnp.asarray(np.frombuffer(os.urandom(16), np.uint32))
  return jax.random.wrap_key_data(words, impl='rbg')


def post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
  """Sends JSON, returns the status and the JSON that came back."""
  request = urllib.request.Request(
    url,
    json.dumps(body).encode(),
    {'Content-Type': 'application/json'},
  )
  # Loopback only: a proxy of the environment has no business in between.
  opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
  try:
    with opener.open(request, timeout=60) as response:
      return response.status, json.load(response)
  except urllib.error.HTTPError as error:
    with error:
      return error.code, json.load(error)


@contextlib.contextmanager
def serving(handler: Handler) -> Iterator[str]:
  """Yields the address at which ``handler`` is answering."""

  class Requests(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
      try:
        length = int(self.headers.get('Content-Length', 0))
        body = json.loads(self.rfile.read(length))
        if not isinstance(body, dict):
          raise ValueError('Expected a JSON object.')
        status, answer = handler(body)
      except (ValueError, KeyError):
        # Nothing of the request in the answer, and nothing in a log.
        status, answer = 400, {'error': 'The request was not understood.'}
      payload = json.dumps(answer).encode()
      self.send_response(status)
      self.send_header('Content-Type', 'application/json')
      self.send_header('Content-Length', str(len(payload)))
      self.end_headers()
      self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
      pass

  class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # Clients that all start at once.

  with Server(('127.0.0.1', 0), Requests) as server:
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
      yield f'http://127.0.0.1:{server.server_port}'
    finally:
      server.shutdown()
      thread.join()


@contextlib.contextmanager
def service(
  budget: accounting.PrivacyBudget, mechanism: Mechanism
) -> Iterator[tuple[str, AdapterHost]]:
  """Yields the gateway's address and the adapter host behind it."""
  adapter = AdapterHost()
  with (
    serving(adapter) as adapter_url,
    serving(Gateway(budget, mechanism, adapter_url)) as url,
  ):
    yield url, adapter


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--release-epsilon', type=float, default=0.5)
  parser.add_argument('--epsilon', type=float, default=4.0)
  parser.add_argument('--server-epsilon', type=float, default=6.0)
  parser.add_argument('--delta', type=float, default=1e-5)
  parser.add_argument('--l2-clip-norm', type=float, default=1.0)
  parser.add_argument('--clients', type=int, default=3)
  parser.add_argument('--ledger', default=None, help='SQLite file')
  parser.add_argument(
    '--create', action='store_true', help='begin the ledger; the first time'
  )
  parser.add_argument('--pad', action='store_true')
  return parser.parse_args(arguments)


QUERIES = (
  'which tablets did my doctor write down',
  'move two hundred to my landlord',
  'is this rash anything to worry about',
)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
  """Runs the demonstration and returns the answers in the order of arrival."""
  options = parse(arguments)
  sensitivity = inference.hidden_state_sensitivity(
    options.l2_clip_norm, REPLACE_ONE
  )
  stddev = inference.gaussian_stddev(
    options.release_epsilon, options.delta, sensitivity
  )
  mechanism = Mechanism(options.l2_clip_norm, stddev, options.pad)
  budget = accounting.PrivacyBudget(
    options.epsilon,
    options.delta,
    path=options.ledger,
    create=options.create,
    server_epsilon=options.server_epsilon,
  )
  ratio = options.l2_clip_norm / (stddev * HIDDEN**0.5)
  print(
    f'Each released vector: clipped to {options.l2_clip_norm:g}, noise'
    f' {stddev:.3f} on each of {HIDDEN} coordinates (signal to noise at best'
    f' 1/{1 / ratio:.0f}), epsilon {options.release_epsilon:g} at delta'
    f' {options.delta:g}, replace-one neighbours.'
  )

  answers: list[dict[str, Any]] = []
  with service(budget, mechanism) as (url, adapter):

    def client(number: int) -> None:
      for text in QUERIES * 20:
        body = {'session': f'client {number}', 'text': text}
        status, answer = post(url, body)
        answers.append({'status': status, **body, **answer})
        if status != 200:
          return

    with concurrent.futures.ThreadPoolExecutor(options.clients) as pool:
      for done in [pool.submit(client, i) for i in range(options.clients)]:
        done.result()

  for answer in answers:
    if answer['status'] == 200:
      print(
        f'200 {answer["session"]}: {answer["released"]} vectors, epsilon'
        f' {answer["epsilon_spent"]:.2f} spent,'
        f' {answer["epsilon_left"]:.2f} left'
      )
    else:
      print(f'{answer["status"]} {answer["error"]}')
  exported = budget.export()
  print(
    f'The adapter host saw {sum(map(len, adapter.seen))} noised vectors. All'
    f' sessions together: epsilon {exported["server"]["spent"]:.2f} of'
    f' {options.server_epsilon:g} at delta {options.delta:g}.'
  )
  return answers


if __name__ == '__main__':
  main()
