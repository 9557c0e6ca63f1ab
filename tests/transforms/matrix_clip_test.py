"""Per-matrix clipping against loops, and its sensitivity."""

import dp_accounting
import jax
import numpy as np
import optax
import pytest

from prism_optax import transforms
from tests import cases
from tests.oracles import muon_oracle

Dims = optax.contrib.MuonDimensionNumbers

SHAPES = {'a': (3, 5), 'bias': (4,), 'stack': (2, 4, 3), 'z': (6,)}
SPECS = {'a': Dims(), 'bias': None, 'stack': Dims(1, 2), 'z': None}
NORMS = {'a': 0.7, 'bias': 1.5, 'stack': 0.4, 'z': 1.5}
PARAMS = {k: np.zeros(shape, np.float32) for k, shape in SHAPES.items()}


@pytest.mark.parametrize('batch_axis', [0, 1, 2])
def test_matrices_may_be_stacked_along_any_axis(batch_axis):
  params = np.zeros((4, 2, 5), np.float32)
  grads = cases.normal(params, 2, lead=(3,))
  rest = [a for a in range(3) if a != batch_axis]
  tx = transforms.per_matrix_clip(
    0.5, weight_dimension_numbers=Dims(rest[1], rest[0])
  )
  out, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  expected = np.zeros((4, 2, 5))
  for g in grads:
    for j in range(g.shape[batch_axis]):
      where = tuple(j if a == batch_axis else slice(None) for a in range(3))
      expected[where] += muon_oracle.clip(g[where].astype(np.float64), 0.5)
  np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(
  ('specs', 'norms', 'clips'),
  [
    # By default only `a` is a matrix, and all others have one norm.
    (None, NORMS | {'stack': 1.5}, [0.7, 1.5]),
    (SPECS, NORMS, [0.7, 0.4, 0.4, 1.5]),
  ],
)
def test_sensitivity_is_that_of_all_groups_and_is_reached(specs, norms, clips):
  tx = transforms.per_matrix_clip(
    norms, normalize_by=8.0, weight_dimension_numbers=specs
  )
  bound = tx.sensitivity(params=PARAMS)
  assert bound == pytest.approx(np.sqrt(np.sum(np.square(clips))) / 8)
  relation = dp_accounting.NeighboringRelation
  assert tx.sensitivity(relation.REPLACE_ONE, params=PARAMS) == 2 * bound
  assert tx.sensitivity(relation.REPLACE_SPECIAL, params=PARAMS) == bound
  one = {k: np.full((7, *s), 1e4, np.float32) for k, s in SHAPES.items()}
  found = cases.norm(jax.jit(tx.update)(one, tx.init(PARAMS), PARAMS)[0])
  assert 0.999 * 7 * bound < found <= 7 * bound * (1 + 1e-6)  # float32


def test_sensitivity_says_what_it_needs():
  tx = transforms.per_matrix_clip(1.0)
  with pytest.raises(ValueError, match='params=None'):
    tx.sensitivity()
  with pytest.raises(ValueError, match='neighboring_relation'):
    tx.sensitivity('add', params=PARAMS)
  shapes = jax.eval_shape(lambda: PARAMS)
  assert tx.sensitivity(params=shapes) == 2**0.5  # A matrix, and the rest.


def test_nothing_comes_of_no_leaves():
  tx = transforms.per_matrix_clip(1.0)
  for empty in ({}, {'a': ()}):
    assert tx.update(empty, (), empty)[0] == empty
    assert tx.pre_clipping_transform(empty) == empty
