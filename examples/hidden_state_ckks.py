"""Noise and encryption: a LoRA delta computed on an encrypted hidden state.

    python examples/hidden_state_ckks.py

A file to copy; it needs TenSEAL (`pip install "prism-optax[he]"`). The client
runs the base model (random states stand in for it), the server has the LoRA
factors and lends them without showing them. For each hidden state h

  1. the client pays, clips and noises:        x = clip(h) + noise,
  2. encrypts with a key that stays with it:   ct(x),
  3. the server multiplies the ciphertext by its plaintext factors,
     first right (n, r), then left (m, r):     ct(x) -> ct(left right^T x),
  4. the client decrypts and adds:             h + delta.

With `rescale` the client undoes the factor of the clip on its side, noise
included; nothing that the server sees changes.

The server sees ciphertexts and their sizes, the public keys, the number of
tokens and when they come, and its own factors; nothing else as long as the
ring-learning-with-errors problem is hard. The client sees deltas. Enough of
them, for states that it chooses, determine left right^T.

The noise is for everything after the decryption: a log of deltas, a process
that holds the secret key (where a server encrypts for itself, encryption hides
nothing from that server), and the day on which the key leaks.

Decrypted CKKS values are approximate and carry a trace of the key: a client
must not send them back to the server (Li and Micciancio, EUROCRYPT 2021).
"""

import sys

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

  def __init__(self, budget, l2_clip_norm: float, stddev: float):
    self._budget, self._clip, self._stddev = budget, l2_clip_norm, stddev
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

  def ask(
    self, server: Server, states: np.ndarray, session: str, rescale=False
  ) -> np.ndarray:
    """States plus deltas, for a (T, n) block that is clipped as a whole.

    Raises:
      accounting.BudgetExceeded: Before anything is released.
    """
    noised = self.privatised(states, session)
    ratio = np.linalg.norm(states) / self._clip
    factor = max(ratio, 1.0) if rescale else 1.0
    deltas = [self.decrypt(server.delta(self.encrypt(x))) for x in noised]
    return states + factor * np.array(deltas)


def main(
  n: int = 256, r: int = 8, tokens: int = 3, epsilon: float = 3.0
) -> int:
  """A prompt as one block, then token by token until the budget is spent."""
  if tenseal is None:
    print('TenSEAL is missing: pip install "prism-optax[he]"', file=sys.stderr)
    return 1
  rng, delta = np.random.default_rng(0), 1e-5
  left = rng.normal(size=(n, r)) / r**0.5
  right = rng.normal(size=(n, r)) / n**0.5
  states = rng.normal(size=(tokens, n))
  # As long as after the last layer of a transformer.
  states *= 177.5 / np.linalg.norm(states, axis=-1, keepdims=True)
  budget = accounting.PrivacyBudget(epsilon, delta, composition='renyi')
  sensitivity = inference.hidden_state_sensitivity(1.0, REPLACE_ONE)
  stddev = inference.gaussian_stddev(1.0, delta, sensitivity)
  client = Client(budget, 1.0, stddev)
  public = client.public_context()
  server = Server(public, left, right)
  print(f'{len(public) / 1e6:.1f} MB of keys, sent once; noise {stddev:.2f} on')
  print(f'{n} coordinates of norm 1: ratio at best 1/{stddev * n**0.5:.0f}.')
  for session, blocks in ('block', [states]), ('token', states[:, None]):
    for answered, block in enumerate(blocks):
      try:
        client.ask(server, block, session)
      except accounting.BudgetExceeded as refused:
        print(f'{session} {answered}: {refused}')
        break
    print(f'{session}: epsilon {budget.spent(session):.2f} at delta {delta:g}')
  return 0


if __name__ == '__main__':
  sys.exit(main())
