"""Clip groups and the split of one noise multiplier over them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import accounting, transforms
from prism_optax.transforms import _matrix_clip

Dims = optax.contrib.MuonDimensionNumbers

PARAMS = {
  'bias': jnp.zeros(5),
  'head': {'b': jnp.zeros(3), 'w': jnp.zeros((5, 3))},
  'layers': jnp.zeros((4, 2, 7)),
}
SPECS = {
  'bias': None,
  'head': {'b': None, 'w': Dims()},
  'layers': Dims(reduction_axis=1, output_axis=2),
}


def test_none_in_a_tree_or_from_a_callable_is_no_matrix():
  """Only as the argument itself it is the default."""
  one = jnp.zeros((2, 3))
  assert _matrix_clip.clip_groups(1.0, one) == (
    _matrix_clip.clip_groups(1.0, one, Dims())
  )
  for given, params in [
    (lambda _: None, PARAMS), (lambda _: None, one), ([None], [one]),
    (dict.fromkeys(PARAMS), PARAMS),
  ]:  # fmt: skip
    (group,) = _matrix_clip.clip_groups(1.0, params, given)
    assert group.leaves == tuple(range(len(jax.tree.leaves(params))))


def test_prefixes_and_callables():
  norms = {'bias': 2.0, 'head': 2.0, 'layers': 3.0}  # A prefix.
  specs = {**SPECS, 'head': None}
  groups = _matrix_clip.clip_groups(norms, PARAMS, specs)
  assert [(g.l2_clip_norm, g.size) for g in groups] == [(3.0, 14), (2.0, 23)]
  # Of least energy: multipliers as the inverse root of norm and root of size.
  units = _matrix_clip.noise_units(groups, 4, noise_split='least_energy')
  ratio = (units[3] / 3) / (units[0] / 2)
  assert ratio == pytest.approx((2 * 23**0.5 / (3 * 14**0.5)) ** 0.5)
  prefix = {'bias': None, 'head': None, 'layers': SPECS['layers']}
  groups = _matrix_clip.clip_groups(1.0, PARAMS, lambda _: prefix)
  assert [g.leaves for g in groups] == [(3,), (0, 1, 2)]


@pytest.mark.parametrize(
  ('norms', 'specs', 'message'),
  [
    ({'bias': 1.0, 'head': 1.0}, None, 'l2_clip_norms'),
    (1.0, {'bias': None}, 'weight_dimension_numbers'),
    ({'bias': 1.0, 'head': 2.0, 'layers': 1.0}, SPECS, 'clipped together'),
    (1.0, {**SPECS, 'layers': Dims(0, 3)}, 'axes'),
    (1.0, {**SPECS, 'layers': Dims((0, 1), (1, 2))}, 'axes'),
    (1.0, {**SPECS, 'bias': Dims()}, 'axes'),
  ],
)
def test_what_does_not_fit_is_named(norms, specs, message):
  with pytest.raises(ValueError, match=message):
    _matrix_clip.clip_groups(norms, PARAMS, specs)


CLIPS, SIZES = [0.5, 1.0, 2.0, 2.0, 0.1], [400, 9, 25, 6400, 1]


def _energy(split):
  return sum(
    d * (s * c) ** 2 for s, c, d in zip(split, CLIPS, SIZES, strict=True)
  )


def test_no_split_of_the_same_multiplier_has_less_energy():
  best = _energy(
    transforms.split_noise_multiplier(
      1.7, CLIPS, SIZES, noise_split='least_energy'
    )
  )
  root = sum(c * math.sqrt(d) for c, d in zip(CLIPS, SIZES, strict=True))
  assert best == pytest.approx((1.7 * root) ** 2)  # The closed form.
  equal = transforms.split_noise_multiplier(1.7, CLIPS, SIZES)
  assert accounting.joint_noise_multiplier(equal) == pytest.approx(1.7)
  assert best < 0.6 * _energy(equal)
  rng = np.random.default_rng(0)
  for _ in range(200):
    budgets = rng.dirichlet(np.ones(len(CLIPS))) / 1.7**2
    assert _energy(budgets**-0.5) >= best * (1 - 1e-12)
