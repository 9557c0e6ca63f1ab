"""Laws of the measures: dense oracles, and the same in every gauge."""

import functools
import math

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import prism_optax
from prism_optax import diagnostics, fixed_rank
from tests.oracles import oracles, test_utils
from tests.properties import cases

SHAPES = st.sampled_from([(5, 4, 2), (3, 3, 3), (6, 2, 1)])
SIZES = st.sampled_from([1e-6, 1.0, 1e6])
CONDITIONS = st.sampled_from([1.0, 1e3])
x64 = pytest.mark.usefixtures('x64')


def _factors(seed, shape, size=1.0):
  rng = np.random.default_rng(seed)
  return [
    size**0.5 * rng.normal(size=(*shape[:-3], k, shape[-1]))
    for k in shape[-3:-1]
  ]


def _regauged(factors, seed, condition):
  rng = np.random.default_rng(seed)
  gauge = oracles.random_gauge(rng, factors[0].shape[-1], condition)
  return oracles.change_gauge(factors, gauge), gauge


@x64
@cases.few
@given(cases.seeds, SHAPES, SIZES, st.floats(1e-3, 1e3), st.floats(0.01, 100.0))
def test_noise_on_factors_is_the_sum_over_its_entries(
  seed, shape, size, stddev, turn
):
  m, n, rank = shape
  left, right = _factors(seed, shape, size)
  found = diagnostics.factor_noise_energy(left, right, stddev)
  # What the unit noise of each single entry, and of each two, does to Z.
  units = [np.eye(k * rank).reshape(-1, k, rank) for k in (m, n)]
  first = np.sum((units[0] @ right.T) ** 2) + sum(
    np.sum((left @ e.T) ** 2) for e in units[1]
  )
  np.testing.assert_allclose(found.first_order, stddev**2 * first, rtol=1e-12)
  second = sum(np.sum((units[0] @ e.T) ** 2) for e in units[1])
  assert math.isclose(found.second_order, stddev**4 * second, rel_tol=1e-12)
  # Along the scalings of the gauge it has the minimum of Corollary 2.3.
  squares = [np.sum(x**2) for x in (left, right)]
  best = (m * squares[1] / (n * squares[0])) ** 0.25
  energies = [
    diagnostics.factor_noise_energy(c * left, right / c, stddev).first_order
    for c in (best, turn * best)
  ]
  assert energies[0] <= energies[1] * (1 + 1e-12)
  np.testing.assert_allclose(
    energies[0],
    2 * stddev**2 * math.sqrt(m * n * squares[0] * squares[1]),
    rtol=1e-12,
  )


@cases.few
@given(cases.seeds, SHAPES, st.floats(1e-3, 1e3))
def test_noise_in_the_tangent_space_is_the_trace_of_its_projector(
  seed, shape, stddev
):
  m, n, rank = shape
  point = oracles.Point.from_factors(*_factors(seed, shape))
  units = np.eye(m * n).reshape(-1, m, n)
  trace = np.sum(point.project(units) ** 2)
  found = diagnostics.tangent_noise_energy(m, n, rank, stddev)
  assert math.isclose(found, stddev**2 * trace, rel_tol=1e-9)


@x64
@cases.few
@given(
  cases.seeds,
  SIZES,
  st.sampled_from([1e-9, 1e-3, 1.0, 1e3]),
)
def test_changes_are_those_of_the_products(seed, size, step):
  shape = (2, 5, 4, 2)
  points = [_factors(seed, shape, size)]
  points += [
    [x + step * y for x, y in zip(points[0], _factors(seed + i, shape, size),
                                  strict=True)]
    for i in (1, 2)
  ]  # fmt: skip
  trees = [test_utils.tree_of([x]) for x in points]
  zs = [test_utils.products_of(x)[0] for x in trees]

  def change(i, j):
    return diagnostics.change_norms(trees[i], trees[j])['m0']

  largest = max(np.linalg.norm(z) for z in zs)
  for i, j in ((0, 1), (1, 2), (0, 2)):
    exact = np.linalg.norm(zs[i] - zs[j], axis=(-2, -1))
    # Rounding relative to the products that the difference is made of.
    np.testing.assert_allclose(
      change(i, j), exact, rtol=1e-9, atol=1e-12 * largest
    )
    np.testing.assert_allclose(
      change(i, j), change(j, i), rtol=1e-9, atol=1e-12 * largest
    )
  assert not np.any(change(0, 0))
  # Another gauge is no change, to rounding of factors 1e3 times as large.
  other, _ = _regauged(points[0], seed, 1e3)
  moved = diagnostics.change_norms(trees[0], test_utils.tree_of([other]))['m0']
  assert np.max(moved) <= 1e-9 * largest


@functools.cache
def _statistics(space):
  return jax.jit(
    functools.partial(diagnostics.nonprivate_clip_statistics, space=space)
  )


@x64
@cases.few
@given(
  cases.seeds, CONDITIONS, st.sampled_from([1e-8, 1.0, 1e8]),
  st.sampled_from([0.0, 1e-3, 1.0, 1e3]),
)  # fmt: skip
def test_clip_statistics_are_those_of_the_norms(seed, condition, size, length):
  """In the tangent space the same in every gauge, on factors by definition."""
  shapes = [(5, 4, 2), (3, 6, 1)]
  factors = [_factors(seed + i, s) for i, s in enumerate(shapes)]
  rng = np.random.default_rng(seed)
  dense = [length * size * rng.normal(size=(3, m, n)) for m, n, _ in shapes]
  extra = length * size * rng.normal(size=(3, 5))
  others = [_regauged(x, seed, condition)[0] for x in factors]
  points = [oracles.Point.from_factors(*x) for x in factors]
  *_, exact = oracles.clipped_mean(points, dense, [extra], l2_clip_norm=size)
  for pairs in (factors, others):
    params = test_utils.tree_of(pairs, extra[0])
    grads = test_utils.factor_gradients(pairs, dense, extra)
    for space in ('tangent', 'factor'):
      found = _statistics(space)(grads, params, size)
      if space == 'tangent':
        norms = exact
      else:
        norms = [
          cases.norm(jax.tree.map(lambda x, i=i: x[i], grads)) for i in range(3)
        ]
      np.testing.assert_allclose(
        found.norms, norms, rtol=1e-6 if condition > 1 else 1e-10
      )
      ratio = np.asarray(found.norms) / size
      assert float(found.clipped_fraction) == pytest.approx(np.mean(ratio > 1))
      assert float(found.mean_coefficient) == pytest.approx(
        np.mean(1 / np.maximum(ratio, 1)), rel=1e-6
      )


@x64
@cases.few
@given(
  cases.seeds, st.sampled_from([(5, 4, 2), (2, 6, 3, 1)]),
  st.floats(1e-6, 1e6), st.floats(1e-6, 1e6),
)  # fmt: skip
def test_signal_to_noise_is_relative_to_the_energy_of_the_noise(
  seed, shape, size, stddev
):
  params = test_utils.tree_of([_factors(seed, shape)])
  x = test_utils.tree_of([_factors(seed + 1, shape)])
  x = jax.tree.map(lambda y: size * y, x)
  found = diagnostics.nonprivate_signal_to_noise(x, params, stddev)
  energy = math.prod(shape[:-3]) * diagnostics.tangent_noise_energy(
    *shape[-3:], stddev
  )
  assert math.isclose(found, cases.norm(x) / math.sqrt(energy), rel_tol=1e-9)


@jax.jit
def _two_updates(params, factors, gradient, stddev, floor_factor):
  """At one point; and the basis and the dense tangent vector there."""
  frame = fixed_rank.frame(fixed_rank.Factors(*factors))
  tangent = fixed_rank.project(
    frame, fixed_rank.Tangent(gradient @ frame.right, gradient.T @ frame.left)
  )
  tx = prism_optax.scale_by_rank_preconditioner(
    b2=0.5, noise_stddev=stddev, floor_factor=floor_factor
  )
  updates = test_utils.tree_of([tangent])
  # Twice the same: what averages of equal things are.
  _, state = tx.update(updates, tx.init(params), params)
  direction, state = tx.update(updates, state, params)
  spectra = diagnostics.preconditioner_spectra(
    state, b2=0.5, floor_factor=floor_factor
  )
  return frame, fixed_rank.embed(frame, tangent), direction, spectra


@pytest.mark.slow
@x64
@cases.few
@given(
  cases.seeds, st.sampled_from([(5, 4, 2), (3, 3, 3)]), CONDITIONS,
  st.sampled_from([(0.1, 1.0), (3.0, 2.0)]),
  st.sampled_from([1e-3, 1.0, 1e3]), st.integers(0, 2), st.integers(0, 2),
)  # fmt: skip
def test_spectra_are_those_of_the_dense_tangent(
  seed, shape, condition, noise, size, lost_left, lost_right
):
  """Of Q^T T^T T Q, and s^2 in every direction that is observed."""
  m, n, rank = shape
  lost = [min(x, rank - 1) for x in (lost_left, lost_right)]
  rng = np.random.default_rng(seed)
  factors = _factors(seed, shape)
  for x, count in zip(factors, lost, strict=True):
    x[:, rank - count :] = 0
    # Not along the axes: the zeros are rounding errors.
    x[:] = x @ oracles.random_gauge(rng, rank, condition)[0]
  stddev, floor_factor = noise
  params = test_utils.tree_of([factors])
  g = size * rng.normal(size=(m, n))
  frame, t, direction, ((left, right),) = _two_updates(
    params, factors, g, stddev, floor_factor
  )
  t = np.asarray(t)
  gains = []
  for found, basis, product, missing in (
    (left, frame.right, t.T @ t / m, lost[1]),
    (right, frame.left, t @ t.T / n, lost[0]),
  ):
    exact = np.linalg.eigvalsh(basis.T @ product @ basis)
    np.testing.assert_allclose(found.nu[0], exact, atol=1e-9 * size**2)
    observed = np.r_[np.zeros(missing), np.full(rank - missing, stddev**2)]
    np.testing.assert_allclose(found.noise[0], observed, atol=1e-9 * stddev**2)
    # The floor is that of the directions that are observed.
    floor = floor_factor * stddev**2
    np.testing.assert_allclose(
      found.gain[0], 1 / np.sqrt(np.maximum(exact, floor)), rtol=1e-6
    )
    gains.append(float(found.gain.max()))
  assert cases.norm(direction) <= max(gains) * np.linalg.norm(t) * (1 + 1e-6)


@cases.settings
@given(
  hnp.arrays(
    np.float64, (3, 2), elements=st.integers(-4, 4).map(float), unique=True
  ),
  st.sampled_from([0.0, 0.05, 1.0]),
  st.sampled_from(['none', 'nan', 'inf', '-inf', 'huge']),
  st.permutations(range(3)),
)
def test_losses_that_mix_examples_are_found(batch, share, oddity, order):
  """Also where what one example does to another is no finite number."""
  with np.errstate(all='ignore'):

    def mixed(scale, xs):
      xs = np.asarray(xs)
      return scale * (xs + share * np.mean(xs, 0)) if share else scale * xs

    batch = np.asarray(cases.spoiled(jnp.asarray(batch), oddity, 0))
    for rows in (batch, batch[order]):
      found = diagnostics.depends_on_other_examples(mixed, 2.0, rows)
      assert found == bool(share)
