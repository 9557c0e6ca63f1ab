"""The metric of the inputs: its release, and the change of variables."""

import functools
import math

import jax
import numpy as np
import optax
import pytest
from dp_accounting import GaussianDpEvent

from prism_optax import contrib, lora
from tests import cases
from tests.contrib.cases import assert_noisy

N, FIRST, SECOND = 40, 6, 4
_rng = np.random.default_rng(0)
# Some positions each, a strong direction, lengths of many sizes.
INPUTS = {
  'a*': np.float32(
    (_rng.normal(size=(N, 5, FIRST)) + 3 * np.eye(FIRST)[1])
    * 10.0 ** _rng.uniform(-30, 15, (N, 1, 1))
  ),
  # Negative, and too small to be squared.
  'b': np.float32(-1e-30 * np.abs(_rng.normal(size=(N, SECOND)) + 2)),
}
release = functools.partial(
  contrib.input_metric, dataset_size=N, prng_key=0, layout=lora.Layout()
)


def dense(metric, name):
  """S as a matrix."""
  q, s = (np.float64(x[name]) for x in (metric.bases, metric.scales))
  return np.eye(len(q)) - (q * (1 - s)) @ q.T


@pytest.mark.parametrize('name', INPUTS)
def test_second_moment_is_that_of_the_oracle(name):
  metric, moment = release([INPUTS], noise_multiplier=0.0), 0.0
  # The sum of the normalised second moments, dense, in float64.
  for x in np.float64(INPUTS[name]).reshape(N, -1, INPUTS[name].shape[-1]):
    moment += x.T @ x / np.trace(x.T @ x) / math.sqrt(len(INPUTS))
  values, vectors = np.linalg.eigh(moment)
  cap = 2 * np.trace(moment) / len(moment)
  scales = np.clip(np.sqrt(cap / values), 0.1, 1)
  expected = (vectors * scales) @ vectors.T
  np.testing.assert_allclose(dense(metric, name), expected, atol=1e-5)
  # What the columns of the coordinates see: no direction above the cap.
  s = dense(metric, name)
  assert scales.min() < 0.8
  assert np.linalg.eigvalsh(s @ moment @ s).max() == pytest.approx(
    cap, rel=1e-4
  )


def test_zeros_for_one_pattern_leave_the_others():
  zeros = INPUTS | {'a*': np.zeros_like(INPUTS['a*'])}
  some, all_ = (release([x], noise_multiplier=0.0) for x in (zeros, INPUTS))
  # Of a metric, only these are arrays of a program.
  assert len(jax.tree.leaves(all_)) == 2 * len(INPUTS)
  np.testing.assert_array_equal(dense(some, 'b'), dense(all_, 'b'))


def test_a_scale_is_a_tenth_at_least():
  """Of 400 directions the strongest has all the energy: 200 times the cap."""
  first = np.eye(1, 400, dtype=np.float32)
  metric = contrib.input_metric(
    [{'x': first}], noise_multiplier=0.0, dataset_size=1, prng_key=0
  )
  np.testing.assert_array_equal(metric.scales['x'], np.float32([0.1]))


@pytest.mark.parametrize('name', INPUTS)
def test_mean_is_that_of_the_oracle(name):
  opposed = INPUTS['b'][:, None] * np.float32([[1], [-0.9]])
  inputs = INPUTS | {'b': opposed}
  metric = release([inputs], noise_multiplier=0.0, form='mean')
  means = np.float64(INPUTS[name]).reshape(N, -1, INPUTS[name].shape[-1]).sum(1)
  v = np.sum(means / np.linalg.norm(means, axis=1, keepdims=True), 0)
  u = v / np.linalg.norm(v)
  expected = np.eye(len(u)) - 0.75 * np.outer(u, u)
  np.testing.assert_allclose(dense(metric, name), expected, atol=1e-6)
  assert metric.entries == FIRST + SECOND


@pytest.mark.slow
@pytest.mark.parametrize('form', ['second_moment', 'mean'])
def test_the_same_bits_in_any_batches(form):
  """Also with zeros, which are padding, and records that are not finite."""
  nothing = {name: np.zeros_like(x[:3]) for name, x in INPUTS.items()}
  nothing['a*'][0, 0, 0] = np.nan
  nothing['a*'][1, 2] = np.inf
  nothing['b'][:2] = 7.0  # The record counts as zero for all patterns.
  parts = [
    {name: x[rows] for name, x in INPUTS.items()}
    for rows in (slice(31, None), slice(7), slice(7, 31))
  ]
  # Padding counts as records.
  size = N + 3
  whole = release([INPUTS], noise_multiplier=2.0, form=form, dataset_size=size)
  found = release(
    [*parts, nothing], noise_multiplier=2.0, form=form, dataset_size=size
  )
  assert found.digest == whole.digest
  assert found.seeded
  cases.assert_same_bits(found, whole)
  other = release([INPUTS], noise_multiplier=2.0, form=form, prng_key=2)
  assert not np.array_equal(other.bases['b'], whole.bases['b'])


@pytest.mark.parametrize('sigma', [0.5, 20.0])
def test_every_entry_gets_the_noise_of_its_length(sigma):
  """Of the matrix: sigma on the diagonal, and sigma over root two beside it."""
  zeros = {'x': np.zeros((1, 60), np.float32)}
  of_zeros = functools.partial(contrib.input_metric, [zeros])
  for metric in assert_noisy(of_zeros, sigma, 60 * 61 // 2):
    # Noise alone has no direction that stands out.
    assert metric.scales['x'].size == 0


def test_the_scale_of_a_direction_is_that_of_its_energy_without_noise():
  """Half of the energy along one direction of 40, at a noise that counts."""
  n, size, sigma = 40, 2000, 50.0
  rng = np.random.default_rng(4)
  x = rng.normal(size=(size, n)) / (n - 1) ** 0.5
  x[:, 0] = rng.choice([-1, 1], size)
  metric = contrib.input_metric(
    [{'x': np.float32(x)}], noise_multiplier=sigma, dataset_size=size,
    prng_key=3,
  )  # fmt: skip
  energy = np.float64(x).T @ (np.float64(x) / np.sum(x**2, 1, keepdims=True))
  # Of 1,000, of which the mean is 50, the noise adds at most 50 * sqrt(80).
  ideal = (2 * size / n / energy[0, 0]) ** 0.5
  assert metric.scales['x'].shape == (1,)
  edge = sigma * (2 * n) ** 0.5
  high = ideal * (1 - 1.2 * edge / energy[0, 0]) ** -0.5
  assert ideal < metric.scales['x'][0] < high


PARAMS = {
  'a1': {'lora_a': _rng.normal(size=(FIRST, 2)), 'lora_b': np.zeros((2, 3))},
  'a2': {
    'lora_a': _rng.normal(size=(7, FIRST, 2)),
    'lora_b': np.ones((7, 2, 3)),
  },
  'b': {'lora_a': _rng.normal(size=(SECOND, 2)), 'lora_b': np.ones((2, 3))},
  'c': {'lora_a': _rng.normal(size=(9, 2)), 'lora_b': np.ones((2, 3))},
  'head': np.ones(4),
}
PARAMS = jax.tree.map(np.float32, PARAMS)


def test_change_of_variables_and_back():
  """``right = S right'`` for those that match, and nothing else moves."""
  metric = release([INPUTS], noise_multiplier=1.0)
  params = jax.jit(lambda m, x: m.to_params(x))(metric, PARAMS)
  for module, name in (('a1', 'a*'), ('a2', 'a*'), ('b', 'b')):
    expected = dense(metric, name) @ np.float64(PARAMS[module]['lora_a'])
    np.testing.assert_allclose(params[module]['lora_a'], expected, atol=1e-5)
    cases.assert_same_bits(params[module]['lora_b'], PARAMS[module]['lora_b'])
  cases.assert_same_bits(params['c'], PARAMS['c'])
  cases.assert_same_bits(params['head'], PARAMS['head'])
  cases.assert_close(metric.from_params(params), PARAMS, 2e-5)


def test_the_release_is_part_of_what_is_accounted_for():
  """Any change of variables is in training/prior_releases_test.py."""
  metric = release(
    [INPUTS], noise_multiplier=np.float32(5), dataset_size=np.int64(N)
  )
  assert type(metric.noise_multiplier) is float
  assert type(metric.dataset_size) is int
  assert metric.seeded is True
  assert metric.key_digest not in repr(metric)
  options = {'dataset_size': N, 'change_of_variables': metric, 'delta': 1e-3}
  private = cases.make(optax.sgd(0.1), params=PARAMS, **options)
  assert private.event().events[1] == GaussianDpEvent(5.0)
  with pytest.raises(ValueError, match=f'InputMetric of {N} for dataset_size'):
    cases.make(optax.sgd(0.1), **options | {'dataset_size': cases.N})


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'batches': []}, 'at least one'),
    ({'batches': [INPUTS, INPUTS]}, '80 records for dataset_size=40'),
    ({'batches': [{}]}, r'shape \(B, ..., n\)'),
    ({'batches': [INPUTS | {'x': np.ones(N)}]}, r'shape \(B, ..., n\)'),
    ({'batches': [INPUTS, {'b': INPUTS['b']}]}, 'same patterns'),
    (
      {'batches': [{'x': np.ones((3, k, 2))} for k in (5, 4)]},
      r'positions .*\(3, 4, 2\).* after .*\(5, 2\)',
    ),
    ({'batches': [{'x': np.ones((3, 2)), 'y': np.ones((2, 2))}]}, 'one number'),
  ],
)
def test_bad_arguments(change, message):
  arguments = {'batches': [INPUTS], 'noise_multiplier': 1.0, 'dataset_size': N}
  arguments |= change
  with pytest.raises(ValueError, match=message):
    contrib.input_metric(arguments.pop('batches'), **arguments)


def test_patterns_that_do_not_fit():
  metric = release([INPUTS], noise_multiplier=1.0)
  with pytest.raises(ValueError, match='match no module'):
    metric.to_params({'a1': PARAMS['a1']})
  with pytest.raises(
    ValueError, match=f'dimension {FIRST} for .b., got {SECOND}'
  ):
    metric.to_params({'b': PARAMS['a1'], 'a': PARAMS['a1']})
