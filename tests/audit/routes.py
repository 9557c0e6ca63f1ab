"""The ways on which a sum of records leaves the library, as attacks see them.

Frames are unit vectors, so that the attacker inverts projections without
rounding. A bias takes the other half of the entries.
"""

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax

import prism_optax
from prism_optax import contrib, inference
from tests.audit import low_bits
from tests.audit.low_bits import Route
from tests.core import seams

RANK, BATCH, HIDDEN = 2, 32, 1536
STDDEV, LEARNING_RATE = 4.0 / BATCH, 0.125
OPTIONS = {'noise_multiplier': 4.0, 'expected_batch_size': BATCH}


def _problem(size):
  """A module and a bias, and gradients of them from rows (..., size)."""
  side = size // 8
  ends = np.cumsum([size - 4 * (side - 1), RANK * side])
  params = {
    'bias': jnp.zeros(ends[0]),
    'm': {'lora_a': jnp.eye(side, RANK), 'lora_b': jnp.eye(RANK, side)},
  }

  def gradients(rows):
    bias, a, b = jnp.split(rows, ends, -1)
    a = a.reshape(*a.shape[:-1], side, RANK)
    b = b.reshape(*b.shape[:-1], RANK, side - RANK)
    # The frame's own columns are seen in the other factor alone.
    b = jnp.concatenate([jnp.zeros((*b.shape[:-1], RANK)), b], -1)
    return {'bias': bias, 'm': {'lora_a': a, 'lora_b': b}}

  return params, gradients


def _joined(left, right, bias):
  """Entries of one module without the frame's own rows, and of a bias."""
  left, right = (x.reshape(-1, RANK) for x in (left, right))
  return jnp.concatenate([left[RANK:].ravel(), right.ravel(), bias.ravel()])


def _of_stacks(stacks):
  return _joined(*stacks.pairs[0], stacks.others[0])


def _times(factor):
  factor = np.float32(factor)
  return {'after': lambda y: factor * y, 'before': lambda out: out / factor}


def coordinates(size):
  """What the clip and the noise behind it release."""
  params, gradients = _problem(size)

  def release(key, rows):
    tx = prism_optax.chain(
      prism_optax.intrinsic_clip(1.0, normalize_by=BATCH),
      prism_optax.tangent_privatizer(STDDEV, prng_key=key),
      retract_elsewhere=True,
    )
    out, _ = tx.update(gradients(rows), tx.init(params), params)
    return _joined(out['m']['lora_b'].T, out['m']['lora_a'], out['bias'])

  return Route(release, _of_stacks, STDDEV, size)


def _prism(key, **options):
  return prism_optax.prism(
    LEARNING_RATE, l2_clip_norm=1.0, prng_key=key, **OPTIONS, **options
  )


def _first_moments(state):
  return _joined(*state.pairs[0].mu, state.others[0].mu)


SHARE = np.float32(1 - 0.9)  # Of a gradient in a first moment.


def prism_moments(size):
  """The first moments after the first step of ``prism``."""
  params, gradients = _problem(size)

  def release(key, rows):
    tx = _prism(key)
    _, state = tx.update(gradients(rows), tx.init(params), params)
    return _first_moments(state[2])

  return Route(release, _of_stacks, STDDEV, size, **_times(SHARE))


def clipped_elsewhere(size):
  """The same behind the clip and the sum of jax-privacy."""
  params, gradients = _problem(size)

  def loss(params, row):
    return optax.tree.vdot(params, gradients(row))

  def release(key, rows):
    mean = jax_privacy.clipped_grad(
      loss, l2_clip_norm=1.0, normalize_by=BATCH, batch_argnums=1,
      keep_batch_dim=False,
      pre_clipping_transform=prism_optax.tangent_coordinates(params),
    )(params, rows)  # fmt: skip
    tx = _prism(key, per_example_gradients=False)
    _, state = tx.update(mean, tx.init(params), params)
    return _first_moments(state[1])

  return Route(release, _of_stacks, STDDEV, size, **_times(SHARE))


def prism_parameters(size):
  """A bias after the first step of ``prism``, from zero, without moments.

  Where a noisy gradient is smaller than the floor of the second moment, the
  step is a multiple of it. The attacker replays it with the library.
  """
  params = {**_problem(40)[0], 'bias': jnp.zeros(size)}
  nothing = jax.tree.map(jnp.zeros_like, params['m'])

  def moved(tx, gradients):
    updates, _ = tx.update(gradients, tx.init(params), params)
    return optax.apply_updates(params, updates)['bias']

  def release(key, rows):
    zeros = jax.tree.map(lambda x: jnp.zeros((len(rows), *x.shape)), nothing)
    return moved(_prism(key), {'bias': rows, 'm': zeros})

  def replay(y):
    tx = _prism(jax.random.key(0), per_example_gradients=False)
    return moved(tx, {'bias': y, 'm': nothing})

  silent = Route(lambda _, y: replay(y), _bias_of_stacks, STDDEV, size)
  play = low_bits.played(silent, lambda key, tree, s: seams.as_floats(tree))
  one_key = jax.random.split(jax.random.key(0), 1)
  replayed = jax.jit(jax.vmap(lambda y: play(one_key, y)[0][0]))
  largest = np.float32(STDDEV / 2)
  slope = float(replayed(np.full((1, size), largest))[0, 0] / largest)

  def before(out):
    inside = abs(out) < abs(1.999 * slope * largest)
    return np.where(inside, out / slope, np.inf)

  return Route(
    release, _bias_of_stacks, STDDEV, size,
    lambda y: np.asarray(replayed(y)), before,
  )  # fmt: skip


def _bias_of_stacks(stacks):
  return stacks.others[0].ravel()


def prism_muon_moments(size):
  """The heavy ball and Adam's first moment after a step of ``prism_muon``."""
  params, gradients = _problem(size)

  def release(key, rows):
    tx = contrib.prism_muon(
      LEARNING_RATE, l2_clip_norm=1.0, prng_key=key, **OPTIONS
    )
    _, state = tx.update(gradients(rows), tx.init(params), params)
    return _joined(*state[2].pairs[0].trace, state[2].others.mu[0])

  shares = np.full(size, SHARE)
  shares[: size - len(params['bias'])] = 1
  return Route(release, _of_stacks, STDDEV, size, **_times(shares))


def dp_muon_moments(size):
  """The heavy ball of three matrices and Adam's first moment of a bias."""
  quarter = size // 4
  names = ('bias', 'w0', 'w1', 'w2')

  def tree_of(rows):
    parts = jnp.split(rows, 4, -1)
    return {
      name: x if name == 'bias' else x.reshape(*x.shape[:-1], 10, -1)
      for name, x in zip(names, parts, strict=True)
    }

  def release(key, rows):
    params = tree_of(jnp.zeros(size))
    tx = prism_optax.dp_muon(
      LEARNING_RATE, l2_clip_norms=1.0, prng_key=key, **OPTIONS
    )
    _, state = tx.update(tree_of(rows), tx.init(params), params)
    traces = optax.tree.get(state, 'trace')
    bias = optax.tree.get(state, 'mu')['bias']
    return flat({**traces, 'bias': bias})

  def flat(tree):
    leaves = tree if isinstance(tree, list) else [tree[x] for x in names]
    return jnp.concatenate([x.ravel() for x in leaves])

  shares = np.ones(size, np.float32)
  shares[:quarter] = SHARE
  # Four groups of one clip norm: twice the noise of one.
  return Route(release, flat, 2 * STDDEV, size, **_times(shares))


def hidden_states(size):
  """One vector, or one block of several: the sum of at most two records."""
  shape = (-1, HIDDEN) if size > HIDDEN else (size,)

  def release(key, rows):
    return inference.privatize_hidden_states(
      rows.sum(0).reshape(shape), key, l2_clip_norm=1.0, stddev=4.0,
      block_ndim=len(shape),
    ).ravel()  # fmt: skip

  return Route(release, jnp.ravel, 4.0, size)


ROUTES = {
  'intrinsic_clip, tangent_privatizer': coordinates,
  'prism, moments': prism_moments,
  'prism, parameters': prism_parameters,
  'prism_muon, moments': prism_muon_moments,
  'dp_muon, moments': dp_muon_moments,
  "jax-privacy's clip, prism": clipped_elsewhere,
  'hidden states': hidden_states,
}


def size_of(name, size):
  """A number of entries near this one that a route can have."""
  if name != 'hidden states':
    return size
  return max(size // HIDDEN, 1) * HIDDEN
