"""DP-Muon against the formulas of its source, and its joint accounting."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import dp_muon
from tests import cases
from tests.oracles import muon_oracle

Dims = optax.contrib.MuonDimensionNumbers


def _fixed_noise(noises):
  """A privatizer that adds ``noises[t]``, in the units it is shown."""

  def update(updates, state, params=None):
    del params
    noise = jax.tree.map(lambda z: jnp.asarray(z)[state], noises)
    return jax.tree.map(jnp.add, updates, noise), state + 1

  return optax.GradientTransformation(lambda _: jnp.zeros((), int), update)


def _optimizer_of_the_source(clips, noises, batch, beta, degree, steps, eta):
  # In units of sqrt(K) C_W, K = 6, each matrix gets the noise sigma C_W / B.
  return dp_muon(
    eta, l2_clip_norms=clips, expected_batch_size=batch, momentum=beta,
    degree=degree, ns_steps=steps,
    weight_dimension_numbers={
      **dict.fromkeys(noises, Dims()), 'stack': Dims(1, 2)
    },
    privatizer=_fixed_noise(noises),
    steps='unlimited',
  )  # fmt: skip


@functools.partial(jax.jit, static_argnums=range(5, 10))
def _step_of_the_source(grads, state, params, clips, noises, *options):
  """Thresholds and noise are data, as the gradients are: all sizes, once."""
  tx = _optimizer_of_the_source(clips, noises, *options)
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


@pytest.mark.parametrize('size', [0.01, 1.0, 50.0])
# Each is a program of its own.
@cases.fast_first(
  ('beta', 'degree', 'steps'),
  [(0.95, 2, 5)],
  [(0.95, 2, 5), (0.0, 1, 1), (0.5, 2, 5), (0.95, 3, 3), (0.9, 1, 8)],
)
def test_ten_steps_are_those_of_the_source(x64, beta, degree, steps, size):
  """Tall, wide, square and stacked matrices, with fixed noise.

  ``size`` scales thresholds and noise together: momenta of norm below one
  (max(1, .) leaves them) and far above.
  """
  shapes = {'tall': (7, 3), 'wide': (2, 5), 'square': (4, 4)}
  layers, batch, sigma, eta = 3, 6, 0.8, 0.1
  rng = np.random.default_rng(0)
  params = {k: rng.standard_normal(s) for k, s in shapes.items()}
  params['stack'] = rng.standard_normal((layers, 5, 6))
  clips = {'tall': 0.5, 'wide': 2.0, 'square': 1.0, 'stack': 0.7}
  clips = {k: size * c for k, c in clips.items()}
  of_each = [*clips.values(), *[clips['stack']] * (layers - 1)]

  def one_by_one(tree, axis=0):
    stack = np.moveaxis(np.asarray(tree['stack']), axis, 0)
    return [*(np.asarray(tree[k]) for k in shapes), *stack]

  noises = {k: rng.standard_normal((10, *p.shape)) for k, p in params.items()}
  gradients = {
    k: size * rng.standard_normal((10, batch, *p.shape)) / 2
    for k, p in params.items()
  }
  oracle = muon_oracle.DPMuon(
    one_by_one(params), clips=of_each, batch=batch, beta=beta, degree=degree,
    steps=steps, eta=eta,
  )  # fmt: skip
  given = {k: sigma / math.sqrt(6) / batch * z for k, z in noises.items()}
  options = batch, beta, degree, steps, eta
  state = _optimizer_of_the_source(clips, given, *options).init(params)
  norms = []
  for t in range(10):
    grads, noise = (
      {k: x[t] for k, x in y.items()} for y in (gradients, noises)
    )
    params, state = _step_of_the_source(
      grads, state, params, clips, given, *options
    )
    of_noise = zip(of_each, one_by_one(noise), strict=True)
    oracle.step(
      one_by_one(grads, 1), [sigma / batch * c * z for c, z in of_noise]
    )
    norms += [np.linalg.norm(m) for m in oracle.momenta]
  # All on one side of the max(1, .), or on both.
  assert {0.01: max(norms) < 1, 1.0: min(norms) < 1 < max(norms)}.get(
    size, min(norms) > 1
  )
  # The clip stops 8 eps below the threshold; ten steps in float64.
  cases.assert_close(one_by_one(params), oracle.thetas, 1e-12)


SHAPES = {'b': (30,), 'layers': (2, 20, 30), 'w': (40, 25), 'norm': (10,)}
PARAMS = {k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()}
SPECS = {'b': None, 'layers': Dims(1, 2), 'w': Dims(), 'norm': None}


# No clip, no noise.
PLAIN = {'l2_clip_norms': 1e3, 'noise_multiplier': 0.0, 'prng_key': 0}


def test_leaves_that_are_no_matrices_go_to_adam():
  tx = dp_muon(
    0.1, **PLAIN, expected_batch_size=2.0, weight_dimension_numbers=SPECS,
    adam_learning_rate=0.02, adam_b1=0.8, adam_b2=0.9, adam_eps=0.01,
  )  # fmt: skip
  adam = optax.adam(0.02, 0.8, 0.9, 0.01)
  state, adam_state = tx.init(PARAMS), adam.init(PARAMS)
  update, adam_update = jax.jit(tx.update), jax.jit(adam.update)
  for step in range(3):
    grads = cases.normal(PARAMS, step, lead=(2,))
    out, state = update(grads, state, PARAMS)
    mean = jax.tree.map(lambda g: g.mean(0), grads)
    expected, adam_state = adam_update(mean, adam_state)
    for k in ('b', 'norm'):
      np.testing.assert_allclose(out[k], expected[k], rtol=1e-4)
    assert not np.allclose(out['w'], expected['w'], rtol=0.1)


def test_each_group_has_its_part_of_the_noise():
  """A privatizer sees a leaf over its part: C_W over sqrt(C_W sqrt(d_W))."""
  clips, seen = {'b': 2.0, 'layers': 0.5, 'w': 1.0, 'norm': 2.0}, []
  tx = dp_muon(
    0.1, l2_clip_norms=clips, expected_batch_size=1.0, steps='unlimited',
    weight_dimension_numbers=SPECS, noise_split='least_energy',
    privatizer=optax.stateless(lambda x, _: seen.append(x) or x),
  )  # fmt: skip
  grads = {k: np.full((1, *x.shape), 1e-3) for k, x in PARAMS.items()}

  @jax.jit
  def shown(grads):
    tx.update(grads, tx.init(PARAMS), PARAMS)
    return seen.pop()

  found = shown(grads)
  sizes = {'b': 40, 'layers': 600, 'w': 1000, 'norm': 40}
  budgets = {k: c * math.sqrt(sizes[k]) for k, c in clips.items()}
  # Two layers are two groups, and the leaves that are no matrices one.
  whole = 2 * budgets['layers'] + budgets['w'] + budgets['b']
  for k, c in clips.items():
    part = c * math.sqrt(whole / budgets[k])
    np.testing.assert_allclose(found[k], 1e-3 / part, rtol=1e-5)


def test_consistent_rms_and_weight_decay():
  w, b = np.full((6, 4), 2.0, np.float32), np.zeros(3, np.float32)
  params = {'w': w, 'b': b}
  grads = cases.normal(params, 9, lead=(1,))

  def update(**options):
    tx = dp_muon(0.1, **PLAIN, expected_batch_size=1.0, ns_steps=12, **options)
    return jax.jit(tx.update)(grads, tx.init(params), params)[0]['w']

  plain, decayed = update(), update(consistent_rms=0.2, weight_decay=0.5)
  rms = decayed + 0.1 * 0.5 * 2.0
  np.testing.assert_allclose(rms, 0.2 * math.sqrt(6) * plain, atol=1e-7)
  # Orthonormal columns: four of six rows, entries of rms 1 / sqrt(6).
  np.testing.assert_allclose(np.sqrt(np.mean(rms**2)), 0.1 * 0.2, rtol=1e-3)
