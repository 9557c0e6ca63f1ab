"""Noise and encryption: a LoRA delta computed on an encrypted hidden state.

    python examples/hidden_state_ckks.py
        A prompt of a few tokens, sent as a whole and then token by token.

    python examples/hidden_state_ckks.py --hidden 1536 --rank 32 --tokens 2
        The sizes of a model of 1.5 billion parameters.

Needs TenSEAL (`pip install "prism-optax[he]"`).

The client has the query and runs the base model (random states stand in for
it). The server has the LoRA factors and lends them without showing them. For
each hidden state h

  1. the client pays, clips and noises:        x = clip(h) + noise,
  2. encrypts with a key that stays with it:   ct(x),
  3. the server multiplies the ciphertext by its plaintext factors,
     first right (n, r), then left (m, r):     ct(x) -> ct(left right^T x),
  4. the client decrypts, rescales and adds:   h + delta.

A clipped state is scaled down by C / ||h||, in earnest by more than a hundred.
The client knows that factor and may undo it on its side (--rescale), noise
included; nothing that the server sees changes.

What the server sees: ciphertexts and their sizes, the public parameters and
evaluation keys, the number of tokens and when they come; its own factors. It
does not see the state, the noised state, the intermediate product, the delta,
or the secret key, as long as the ring-learning-with-errors problem is hard.
What the client sees of the server: deltas. Enough of them, for states that the
client chooses, determine left right^T.

Then what is the noise for? For everything behind the decryption: a log of
deltas, a process that holds the secret key (where a server encrypts for itself,
as gateways do, encryption hides nothing from that server, the noise does), and
the day on which the key leaks. It has to be paid for only towards such a party,
and costs accuracy always: see the ratio that is printed.

Decrypted CKKS values are approximate and carry a trace of the key: a client
must not send them back to the server (Li and Micciancio, EUROCRYPT 2021).
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from prism_optax import accounting, inference

try:
  import tenseal
except ImportError:
  tenseal = None

REPLACE_ONE = accounting.NeighboringRelation.REPLACE_ONE
# 128-bit security for this ring; two products use up the two middle primes. The
# ring's half, 4096, is the longest state that fits.
_RING, _PRIMES, _SCALE = 8192, (60, 40, 40, 60), 2.0**40
MAX_HIDDEN = _RING // 2


class Report(NamedTuple):
  """What one mode took, and how well it agrees with the clear computation."""

  mode: str
  tokens: int  # Answered before the budget was spent.
  releases: int
  epsilon: float
  error: float  # Largest difference of a delta from the one in the clear.
  delta_norm: float  # Largest entry of a delta, to compare the error with.
  upload: int  # Bytes of ciphertext.
  download: int
  seconds: dict[str, float]
  outputs: np.ndarray


class Server:
  """Has the factors and the public context; never the secret key."""

  def __init__(self, context: bytes, left: np.ndarray, right: np.ndarray):
    self._context = tenseal.context_from(context)
    if self._context.has_secret_key():
      raise ValueError('The server was given the secret key.')
    self._right = right.tolist()  # (n, r)
    self._left = left.T.tolist()  # (r, m)

  def delta(self, ciphertext: bytes) -> bytes:
    """Returns the ciphertext of left @ right.T @ x."""
    x = tenseal.ckks_vector_from(self._context, ciphertext)
    # The narrow product first, as in the clear: n rotations, then r.
    return x.mm(self._right).mm(self._left).serialize()


class Client:
  """Has the states, the secret key and the budget."""

  def __init__(
    self,
    budget: accounting.PrivacyBudget,
    *,
    l2_clip_norm: float,
    stddev: float,
    rescale: bool,
  ):
    self._budget = budget
    self._clip, self._stddev, self._rescale = l2_clip_norm, stddev, rescale
    self._context = tenseal.context(
      tenseal.SCHEME_TYPE.CKKS, _RING, coeff_mod_bit_sizes=list(_PRIMES)
    )
    self._context.global_scale = _SCALE
    self._context.generate_galois_keys()

  def public_context(self) -> bytes:
    """What the server gets: parameters and evaluation keys."""
    return self._context.serialize(save_secret_key=False)

  def privatised(self, states: np.ndarray, session: str) -> np.ndarray:
    """Pays for a (T, n) block as one release, and noises it on the host."""
    event = inference.release_event(
      self._stddev, self._clip, REPLACE_ONE, noise='discrete'
    )
    self._budget.spend(event, session)
    return inference.privatize_on_host(
      states, l2_clip_norm=self._clip, stddev=self._stddev, block_ndim=2
    )

  def encrypt(self, x: np.ndarray) -> bytes:
    return tenseal.ckks_vector(self._context, x.tolist()).serialize()

  def decrypt(self, ciphertext: bytes) -> np.ndarray:
    vector = tenseal.ckks_vector_from(self._context, ciphertext)
    return np.array(vector.decrypt())

  def undo_clip(self, states: np.ndarray) -> float:
    """The factor by which the clip shortened a block, known to the client."""
    norm = float(np.linalg.norm(states))
    return max(norm / self._clip, 1.0) if self._rescale else 1.0


def run(
  mode: str,
  client: Client,
  server: Server,
  budget: accounting.PrivacyBudget,
  states: np.ndarray,
  left: np.ndarray,
  right: np.ndarray,
) -> Report:
  """Sends the prompt as one block ('split') or token by token ('token').

  Args:
    mode: One release of a (T, n) block, clipped as a whole; or T releases of a
      vector, until the budget is spent.
    client: The party that has the key.
    server: The party that has the factors.
    budget: The budget of the client.
    states: Hidden states of the prompt, (T, n).
    left: Left factor of the server, (m, r): to compare with the delta in the
      clear.
    right: Right factor of the server, (n, r).

  Returns:
    The report; ``outputs`` has a row for each token that was answered.
  """
  seconds = dict.fromkeys(('noise', 'encrypt', 'multiply', 'decrypt'), 0.0)
  outputs, error, largest = [], 0.0, 0.0
  upload = download = releases = 0

  def timed(name: str, function: Any, *arguments: Any) -> Any:
    start = time.perf_counter()
    result = function(*arguments)
    seconds[name] += time.perf_counter() - start
    return result

  blocks = [states] if mode == 'split' else list(states[:, None])
  for block in blocks:
    try:
      noised = timed('noise', client.privatised, block, mode)
    except accounting.BudgetExceeded as refused:
      print(f'  {refused}')
      break
    releases += 1
    factor = client.undo_clip(block)
    for h, x in zip(block, noised, strict=True):
      sent = timed('encrypt', client.encrypt, x)
      received = timed('multiply', server.delta, sent)
      delta = timed('decrypt', client.decrypt, received)
      clear = left @ (right.T @ x)
      error = max(error, float(np.abs(delta - clear).max()))
      largest = max(largest, float(np.abs(clear).max()))
      upload, download = upload + len(sent), download + len(received)
      outputs.append(h + factor * delta)
  return Report(
    mode,
    len(outputs),
    releases,
    budget.spent(mode),
    error,
    largest,
    upload,
    download,
    seconds,
    np.array(outputs).reshape(-1, len(left)),
  )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--hidden', type=int, default=256)
  parser.add_argument('--rank', type=int, default=8)
  parser.add_argument('--tokens', type=int, default=3)
  parser.add_argument('--l2-clip-norm', type=float, default=1.0)
  parser.add_argument('--release-epsilon', type=float, default=1.0)
  parser.add_argument('--epsilon', type=float, default=3.0)
  parser.add_argument('--delta', type=float, default=1e-5)
  parser.add_argument('--rescale', action='store_true')
  options = parser.parse_args(arguments)
  if not 1 <= options.hidden <= MAX_HIDDEN:
    parser.error(f'--hidden must be 1 to {MAX_HIDDEN}, got {options.hidden}')
  if not 1 <= options.rank <= options.hidden or options.tokens < 1:
    parser.error('--rank must be 1 to --hidden, --tokens at least 1')
  return options


def main(arguments: Sequence[str] | None = None) -> list[Report]:
  """Runs both modes, prints and returns their reports."""
  options = parse(arguments)
  if tenseal is None:
    print(
      'TenSEAL is not installed: pip install "prism-optax[he]".',
      file=sys.stderr,
    )
    return []
  n, r = options.hidden, options.rank
  generator = np.random.default_rng(0)
  left = generator.normal(size=(n, r)) / math.sqrt(r)
  right = generator.normal(size=(n, r)) / math.sqrt(n)
  states = generator.normal(size=(options.tokens, n))
  # As long as behind the last layer of a transformer.
  states *= 177.5 / np.linalg.norm(states, axis=-1, keepdims=True)

  budget = accounting.PrivacyBudget(
    options.epsilon, options.delta, composition='renyi'
  )
  sensitivity = inference.hidden_state_sensitivity(
    options.l2_clip_norm, REPLACE_ONE
  )
  stddev = inference.gaussian_stddev(
    options.release_epsilon, options.delta, sensitivity
  )
  client = Client(
    budget,
    l2_clip_norm=options.l2_clip_norm,
    stddev=stddev,
    rescale=options.rescale,
  )
  public = client.public_context()
  server = Server(public, left, right)
  print(
    f'States of {n} coordinates and norm 177.5, rank {r}. Noise {stddev:.3f} on'
    ' each coordinate of what is clipped to norm'
    f' {options.l2_clip_norm:g}: signal to noise'
    f' 1/{_inverse_ratio(options, stddev, n):.0f} for a vector,'
    f' 1/{_inverse_ratio(options, stddev, n * options.tokens):.0f} for the'
    f' block of {options.tokens}.'
  )
  print(f'Public context and keys: {len(public) / 1e6:.1f} MB, sent once.')
  reports = []
  for mode in ('split', 'token'):
    print(f'{mode}:')
    report = run(mode, client, server, budget, states, left, right)
    reports.append(report)
    print(
      f'  {report.tokens} of {options.tokens} tokens in {report.releases}'
      f' releases, epsilon {report.epsilon:.2f} at delta {options.delta:g}'
      ' (replace-one)\n'
      f'  {report.upload / 1e3:.0f} kB up, {report.download / 1e3:.0f} kB down;'
      f' seconds: '
      + ', '.join(f'{k} {v:.3f}' for k, v in report.seconds.items())
      + f'\n  delta as in the clear to {report.error:.1e}, its largest entry'
      f' being {report.delta_norm:.2g}'
    )
  return reports


def _inverse_ratio(
  options: argparse.Namespace, stddev: float, size: int
) -> float:
  return stddev * size**0.5 / options.l2_clip_norm


if __name__ == '__main__':
  sys.exit(0 if main() else 1)
