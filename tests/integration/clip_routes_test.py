"""Every documented way from gradients to noise has the multiplier it claims.

Clip and noise of several groups may come from two calls. Here both meet: two
matrices and six biases, one adversarial record, and what one really gets.
"""

import functools
import math

import jax
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import transforms
from tests import cases

jax_privacy = pytest.importorskip('jax_privacy')

SIGMA, NORM, EXPECTED = 0.8, 0.5, 16.0
SHAPES = {
  'w0': (80, 50), 'w1': (60, 70), **{f'b{i}': (700,) for i in range(6)}
}  # fmt: skip
PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
# The standard deviation of n entries is off by 1 / sqrt(2 n), the sum of three
# groups' by less: five times that.
TOLERANCE = 5 / math.sqrt(2 * 3 * 4000)


def _muon(**options):
  return prism_optax.dp_muon(
    0.1, l2_clip_norms=NORM, expected_batch_size=EXPECTED, momentum=0.0,
    adam_b1=0.0, ns_steps=1, **options,
  )  # fmt: skip


OURS = {'noise_multiplier': SIGMA, 'prng_key': 0}
_gaussian = functools.partial(
  jax_privacy.noise_addition.gaussian_privatizer, prng_key=jax.random.key(0)
)


def _released(tx, updates, params=PARAMS):
  """The noisy mean, which DP-Muon without memory keeps in its moments."""
  _, state = tx.update(updates, tx.init(params), params)
  moments = optax.tree.get_all_with_path(state, 'mu')
  (_, mu), *_ = [m for m in moments if jax.tree.leaves(m[1])]
  mu = {k: mu[k] for k in params if not isinstance(mu[k], optax.MaskedNode)}
  return {**optax.tree.get(state, 'trace'), **mu}


def _mean(grads, **options):
  """By jax-privacy, of a loss whose gradients are the examples."""
  clipped = jax_privacy.clipped_grad(
    optax.tree.vdot, batch_argnums=1, keep_batch_dim=False, **options
  )
  return clipped(PARAMS, grads), clipped.sensitivity()


def _chain_of_ones_own(grads):
  clip = prism_optax.per_matrix_clip(NORM, normalize_by=EXPECTED)
  stddev = SIGMA * clip.sensitivity(params=PARAMS)
  tx = optax.chain(clip, _gaussian(stddev=stddev))
  return tx.update(grads, tx.init(PARAMS), PARAMS)[0]


def _split_by_hand(grads):
  clip = prism_optax.per_matrix_clip(NORM, normalize_by=EXPECTED)
  mean, _ = clip.update(grads, clip.init(PARAMS), PARAMS)
  biases = [name for name in SHAPES if name.startswith('b')]
  groups = [['w0'], ['w1'], biases]
  sizes = [sum(PARAMS[x].size for x in names) for names in groups]
  split = transforms.split_noise_multiplier(
    SIGMA, [NORM] * 3, sizes, noise_split='least_energy'
  )
  out = {}
  for i, (names, sigma) in enumerate(zip(groups, split, strict=True)):
    own = {name: mean[name] for name in names}
    noise = _gaussian(
      stddev=sigma * NORM / EXPECTED, prng_key=jax.random.key(i)
    )
    out |= noise.update(own, noise.init(own))[0]
  return out


def _one_object(grads):
  tx = _muon(per_example_gradients=False, **OURS)
  mean, sensitivity = _mean(
    grads,
    l2_clip_norm=tx.sensitivity(params=PARAMS),
    pre_clipping_transform=tx.pre_clipping_transform,
  )
  assert sensitivity == tx.sensitivity(params=PARAMS)
  return _released(tx, mean)


def _clip_beside_it(grads, tx=None):
  clip = prism_optax.per_matrix_clip(NORM)
  mean, sensitivity = _mean(
    grads, l2_clip_norm=clip.sensitivity(params=PARAMS), normalize_by=EXPECTED,
    pre_clipping_transform=clip.pre_clipping_transform,
  )  # fmt: skip
  if tx is not None:
    return _released(tx, mean)
  noise = _gaussian(stddev=SIGMA * sensitivity)
  return noise.update(mean, noise.init(mean))[0]


ROUTES = {
  'dp_muon': lambda grads: _released(_muon(**OURS), grads),
  'dp_muon, least energy': lambda grads: _released(
    _muon(noise_split='least_energy', **OURS), grads
  ),
  'dp_muon, a privatizer': lambda grads: _released(
    _muon(privatizer=_gaussian(stddev=SIGMA / EXPECTED), steps='unlimited'),
    grads,
  ),
  'dp_muon and its pre_clipping_transform': _one_object,
  'dp_muon and per_matrix_clip': lambda grads: _clip_beside_it(
    grads, _muon(per_example_gradients=False, **OURS)
  ),
  'pre_clipping_transform and a privatizer': _clip_beside_it,
  'per_matrix_clip and a privatizer': _chain_of_ones_own,
  'per_matrix_clip, clip_groups and a split': _split_by_hand,
}


def _joint(one, other):
  """The multiplier of the mechanism that moved from `one` to `other`.

  Both have the same noise, of one key, and `one` is nothing but noise.
  """
  squares = 0.0
  for name, noise in one.items():
    squares += np.sum((other[name] - noise) ** 2) / np.mean(noise**2)
  return squares**-0.5


# Each is a program of its own; the others put the same parts together.
FIRST = 'dp_muon, least energy', 'pre_clipping_transform and a privatizer'


@cases.fast_first('route', FIRST, ROUTES)
def test_two_matrices_and_six_biases_are_one_mechanism_as_claimed(route):
  release = jax.jit(ROUTES[route])
  nothing = {k: np.zeros((3, *s), np.float32) for k, s in SHAPES.items()}
  record = {k: x.copy() for k, x in nothing.items()}
  for x in record.values():
    x[1] = 1e3  # All groups at their thresholds.
  one, other = (jax.device_get(release(g)) for g in (nothing, record))
  assert _joint(one, other) == pytest.approx(SIGMA, rel=TOLERANCE)
