"""Declared sensitivity against measured, for whatever a record may hold.

The same randomness, neighbouring batches: what comes out moves by at most
``sensitivity(relation)``. Float32 and bfloat16 gradients; the slack is the
rounding of a sum of B terms, ``B eps`` of the bound.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dp_accounting import NeighboringRelation

import prism_optax
from prism_optax import lora
from tests import cases
from tests.oracles import oracles

SHAPES = [(9, 7, 3), (6, 11, 2)]
BATCH = 6
CLIP, DIVISOR = 0.7, 5.0
KINDS = (
  'normal', 'huge', 'overflow', 'tiny', 'zero', 'nan', 'inf', 'one_inf',
  'aligned', 'only_extra', 'only_one_module', 'mixed_scales', 'inside',
  'enormous',
)  # fmt: skip


def _record(rng, kind, params, aligned):
  """One example's factor gradients: not even those of any dense gradient."""
  tree = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
  if kind == 'huge':
    tree = jax.tree.map(lambda x: x * 1e15, tree)
  elif kind == 'overflow':
    tree = jax.tree.map(lambda x: x * 1e30, tree)
  elif kind == 'tiny':
    tree = jax.tree.map(lambda x: x * 1e-30, tree)
  elif kind == 'zero':
    tree = jax.tree.map(np.zeros_like, tree)
  elif kind == 'nan':
    tree['m0']['lora_a'][0, 0] = np.nan
  elif kind == 'inf':
    tree = jax.tree.map(lambda x: x * np.inf, tree)
  elif kind == 'one_inf':
    tree['extra'][0] = -np.inf
  elif kind == 'aligned':
    tree = jax.tree.map(lambda x: 3.0 * x, aligned)
  elif kind == 'only_extra':
    tree = jax.tree.map(np.zeros_like, tree)
    tree['extra'] = rng.normal(size=4) * 100
  elif kind == 'only_one_module':
    tree = {k: jax.tree.map(np.zeros_like, v) for k, v in tree.items()}
    tree['m1'] = {k: np.full(v.shape, 1e4) for k, v in params['m1'].items()}
  elif kind == 'inside':  # What the projection removes, and nothing else.
    tree = jax.tree.map(lambda x: 1e6 * np.asarray(x), params)
    for name in ('m0', 'm1', 'stack'):
      tree[name]['lora_a'] = np.zeros_like(tree[name]['lora_a'])
    tree['extra'] = np.zeros_like(tree['extra'])
  elif kind == 'enormous':  # Where one factor is zero, these are hidden.
    for name in ('m0', 'm1', 'stack'):
      tree[name]['lora_a'] = np.full_like(tree[name]['lora_a'], 3e38)
  elif kind == 'mixed_scales':
    tree['m0'] = jax.tree.map(lambda x: x * 1e12, tree['m0'])
    tree['extra'] = tree['extra'] * 1e-12
  return tree


def _parameters(rng, kind, shapes=SHAPES):
  condition = 1e4 if kind.startswith('ill') else 1.0
  factors = [oracles.random_factors(rng, *s, condition) for s in shapes]
  if kind.startswith('zero_start'):
    factors = [(np.zeros_like(left), right) for left, right in factors]
  if kind == 'lost':  # Nearly singular in every gauge.
    factors = [
      (left * ([1e-7] + [1.0] * (left.shape[1] - 1)), right @ np.ones_like(
        np.eye(right.shape[1])))
      for left, right in factors
    ]  # fmt: skip
  # A stacked module beside the plain ones.
  tree = cases.tree_of(factors, np.ones(4), jnp.float32)
  tree['stack'] = {
    'lora_a': jnp.asarray(rng.normal(size=(3, 8, 2)), jnp.float32),
    'lora_b': jnp.asarray(rng.normal(size=(3, 2, 5)), jnp.float32),
  }
  # Orthogonal columns, as behind a retraction: norms are taken in place.
  return lora.canonicalize(tree) if kind.endswith('canonical') else tree


def _distance(x, y):
  squares = [
    np.sum((np.float64(a) - np.float64(b)) ** 2)
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
  ]
  return np.sqrt(sum(squares))


@jax.jit
def _clip(params, records, padding):
  tx = prism_optax.intrinsic_clip(CLIP, normalize_by=DIVISOR)
  return tx.update(
    records, tx.init(params), params, is_padding_example=padding
  )[0]


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  'start',
  [
    'well',
    'ill, canonical',
    *(
      pytest.param(x, marks=pytest.mark.slow)
      for x in ('well, canonical', 'ill', 'zero_start, canonical')
    ),
    'zero_start',
    'lost',
  ],
)
def test_intrinsic_clip_moves_by_at_most_its_sensitivity(start, dtype):
  rng = np.random.default_rng(0)
  params = _parameters(rng, start)
  tx = prism_optax.intrinsic_clip(CLIP, normalize_by=DIVISOR)
  clip = functools.partial(_clip, params)
  aligned = jax.tree.map(lambda x: rng.normal(size=x.shape), params)

  def batch_of(records):
    return jax.tree.map(lambda *x: np.stack(x).astype(dtype), *records)

  nobody = np.zeros(BATCH, bool)
  last = np.arange(BATCH) == BATCH - 1
  slack = 1 + BATCH * 1.2e-7
  moved = []
  for kind in KINDS:
    others = [
      _record(rng, str(rng.choice(KINDS)), params, aligned)
      for _ in range(BATCH - 1)
    ]
    one = batch_of([*others, _record(rng, kind, params, aligned)])
    two = batch_of([*others, _record(rng, 'aligned', params,
                    jax.tree.map(np.negative, aligned))])  # fmt: skip
    with_it, without = clip(one, nobody), clip(one, last)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(with_it)), kind
    add_remove = _distance(with_it, without)
    replaced = _distance(with_it, clip(two, nobody))
    assert add_remove <= tx.sensitivity() * slack, kind
    assert replaced <= slack * tx.sensitivity(
      NeighboringRelation.REPLACE_ONE
    ), kind
    moved.append(replaced)
  # The bound is met: opposite records move the sum by all of it.
  assert max(moved) > 0.999 * 2 * CLIP / DIVISOR


@pytest.mark.slow
def test_many_aligned_examples_add_up_without_losing_the_bound():
  """4,096 equal records of full norm: neighbours at the far end of a sum."""
  rng = np.random.default_rng(1)
  params = _parameters(rng, 'well')
  tx = prism_optax.intrinsic_clip(1.0)
  one = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
  size = 4096
  batch = jax.tree.map(
    lambda x: np.broadcast_to(np.float32(9 * x), (size, *x.shape)), one
  )

  @jax.jit
  def clip(batch, padding):
    return tx.update(
      batch, tx.init(params), params, is_padding_example=padding
    )[0]

  full = clip(batch, np.zeros(size, bool))
  for i in (0, size // 2, size - 1):
    without = clip(batch, np.arange(size) == i)
    assert _distance(full, without) <= 1 + size * 1.2e-7


@pytest.mark.slow
def test_neither_shape_nor_control_flow_depends_on_a_record():
  """One compiled program for all records: a trace cannot branch on them."""
  rng = np.random.default_rng(2)
  # The shape of the stack: a whole optimizer of three would be compiled long.
  params = _parameters(rng, 'well', [(5, 8, 2)] * 2)
  tx = prism_optax.prism(
    0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=BATCH,
    prng_key=0,
  )  # fmt: skip
  state = tx.init(params)
  traces = []

  @jax.jit
  def update(grads, state):
    traces.append(1)
    return tx.update(grads, state, params)

  aligned = jax.tree.map(lambda x: rng.normal(size=x.shape), params)
  for kind in KINDS:
    records = [_record(rng, kind, params, aligned) for _ in range(BATCH)]
    grads = jax.tree.map(lambda *x: np.stack(x).astype(np.float32), *records)
    updates, _ = update(grads, state)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates)), kind
  assert len(traces) == 1
