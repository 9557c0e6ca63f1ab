"""One record moves the sum by its bound, for records and norms of any size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import _clip, training, transforms

# Every size that float32 has, in one entry, in all, and mixed.
_SIZES = np.float32([
  *(0.0, 1e-45, 1e-39, 1.2e-38, 1e-37, 1e-30, 1e-25, 1e-20, 1e-18, 1e-10),
  *(0.3, 1.0, 7.0, 1e10, 1.8e19, 2e19, 1e25, 1e30, 8e37, 9e37, 3.4e38),
])  # fmt: skip
_rng = np.random.default_rng(0)
RECORDS = np.concatenate([
  _SIZES[:, None] * np.ones(6, np.float32),
  _SIZES[:, None] * np.eye(1, 6, dtype=np.float32),
  _SIZES[:, None] * np.float32([1, -0.5, 1e-3, -1e-20, 0, 0.7]),
  _rng.choice(_SIZES, (60, 6)) * _rng.choice([-1, 1], (60, 6)),
  np.where(np.eye(6) > 0, np.nan, 1.0),
  np.where(np.eye(6) > 0, -np.inf, 1e30),
  _rng.normal(size=(40, 6)) * 10.0 ** _rng.uniform(-37, 18, (40, 1)),
]).astype(np.float32)  # fmt: skip
NORMS = (1e-30, 1e-18, 1.0, 1e18, 1e30)
ROWS = [np.asarray('a'), np.asarray(['a', 'b'])]
RULES = {
  **{
    f'automatic {x:g}': training.AutomaticClipping(x)
    for x in (1e-300, 1e-45, 1e-38, 1e-18, 1e-6, 0.01, 1e30, 1e300)
  },
  'flat': _clip.FlatClipping(),
  'groups': training.GroupClipping(['a', 'b'], {'a': 1e-3, 'b': 1.0}),
}


def contributions(records, c):
  """What each rule makes of each record, over the clip norm."""
  out = {}
  for name, rule in RULES.items():
    # Two leaves of which the second is a stack of two.
    coordinates = _clip.Coordinates(
      lambda x: [x[:2], x[2:].reshape(2, 2)], lambda labels: ROWS
    )
    one = _clip.Clip(rule, c).contribution(coordinates, ['a', 'b'])
    out[name] = jax.vmap(one)(records)
  clip = transforms.per_matrix_clip(c / jnp.sqrt(2.0))
  each = clip.pre_clipping_transform
  out['each matrix'] = jax.vmap(
    lambda x: jax.tree.leaves(each({'v': x[:2], 'w': x[2:].reshape(2, 2)}))
  )(records)
  return out


def sizes(tree, c):
  leaves = [np.float64(x).reshape(len(RECORDS), -1) for x in tree]
  return np.linalg.norm(np.concatenate(leaves, 1) / c, axis=1)


@pytest.mark.parametrize(
  'jit', [True, pytest.param(False, marks=pytest.mark.slow)]
)
def test_no_record_is_longer_than_the_clip_norm(jit):
  call = jax.jit(contributions) if jit else contributions
  for c in NORMS if jit else NORMS[::4]:
    for rule, tree in call(RECORDS, jnp.float32(c)).items():
      moved = sizes(tree, np.float64(np.float32(c)))
      # NaN fails the comparison, too.
      assert (moved <= 1).all(), (c, rule, moved.max())
      assert not moved[~np.isfinite(RECORDS).all(1)].any()


# Each number but the first is below half of the last place of its square.
_DUST = 2.0**-12.51


@pytest.mark.parametrize('shapes', [[(13, 3, 13, 3)], [()] * 300])
@pytest.mark.parametrize(
  'rule',
  [
    _clip.FlatClipping(),
    training.AutomaticClipping(1e-30),
    training.GroupClipping('a', {'a': 1.0}),
  ],
  ids=['flat', 'automatic', 'groups'],
)
def test_many_small_numbers_are_not_lost_beside_a_large_one(rule, shapes):
  record = [np.full(shape, _DUST, np.float32) for shape in shapes]
  record[0].flat[0] = 1
  clip = _clip.Clip(rule)
  one = clip.contribution(_clip.DENSE, record)

  def in_a_loop(x):
    return jax.lax.map(one, jax.tree.map(lambda y: y[None], x))

  # As it is where gradients of several records are at hand, and in a loop.
  calls = [one] if len(shapes) > 1 else [one, jax.jit(in_a_loop)]
  for call in calls:
    parts = [np.ravel(np.float64(x)) for x in call(record)]
    assert 0.99999 < np.linalg.norm(np.concatenate(parts)) <= 1


def test_large_arrays_are_added_along_their_axes():
  found = _clip.summed(jnp.ones((2, 100, 100)), (1, 2))
  np.testing.assert_array_equal(found, [1e4, 1e4])


def test_automatic_clipping_is_its_formula_at_every_size():
  """Where neither record nor result is denormal, to rounding in float32."""
  ordinary = np.isfinite(RECORDS) & (np.abs(RECORDS) > 1.2e-38)
  ordinary = (ordinary | (RECORDS == 0)).all(1)
  kept = np.where(ordinary[:, None], np.float64(RECORDS), 0)
  size = np.linalg.norm(kept, axis=1)
  found = jax.jit(contributions)(RECORDS, jnp.float32(1.0))
  for name, rule in RULES.items():
    if name.startswith('automatic'):
      gamma = rule.stability if rule.stability > 1.2e-38 else 0  # Denormal.
      wanted = size / np.maximum(size + gamma, 1e-300)
      kept = ordinary & (wanted > 1e-30)
      np.testing.assert_allclose(
        sizes(found[name], 1.0)[kept], wanted[kept], rtol=3e-6
      )
