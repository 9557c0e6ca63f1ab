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
MODULES = 'm0', 'm1', 'stack'
BATCH = 6
CLIP, DIVISOR = 0.7, 5.0


def _with(value):
  """Where one factor is zero, gradients of the other are hidden."""

  def spoil(tree):
    for name in MODULES:
      tree[name]['lora_a'] = np.full_like(tree[name]['lora_a'], value)
    return tree

  return spoil


def _set(name, value):
  def spoil(tree):
    leaf = tree[name]['lora_a'] if name == 'm0' else tree[name]
    leaf.flat[0] = value
    return tree

  return spoil


def _only(name, value):
  return lambda tree: (
    jax.tree.map(np.zeros_like, tree)
    | {name: jax.tree.map(lambda x: np.full_like(x, value), tree[name])}
  )


def _times(factor):
  return lambda tree: jax.tree.map(lambda x: x * factor, tree)


# Of factor gradients that need not be those of any dense gradient.
KINDS = {
  'normal': _times(1.0), 'huge': _times(1e15), 'overflow': _times(1e30),
  'tiny': _times(1e-30), 'zero': _times(0.0), 'inf': _times(np.inf),
  'nan': _set('m0', np.nan), 'one inf': _set('extra', -np.inf),
  'aligned': None, 'only extra': _only('extra', 100.0),
  'only one module': _only('m1', 1e4), 'enormous': _with(3e38),
  'mixed scales': lambda tree: tree | {
    'm0': _times(1e12)(tree['m0']), 'extra': 1e-12 * tree['extra']
  },
  # What the projection removes, and nothing else.
  'inside': lambda tree: _with(0.0)(_times(1e6)(tree)) | {
    'extra': np.zeros_like(tree['extra'])
  },
}  # fmt: skip


def _record(rng, kind, params, aligned):
  """One example's factor gradients."""
  if kind == 'aligned':
    return _times(3.0)(aligned)
  if kind == 'inside':
    return KINDS[kind](jax.tree.map(np.array, params))
  return KINDS[kind](jax.tree.map(lambda x: rng.normal(size=x.shape), params))


def _parameters(rng, kind):
  condition = 1e4 if kind.startswith('ill') else 1.0
  factors = [oracles.random_factors(rng, *s, condition) for s in SHAPES]
  if kind.startswith('zero_start'):
    factors = [(np.zeros_like(left), right) for left, right in factors]
  if kind == 'lost':  # Nearly singular in every gauge.
    factors = [
      (x * ([1e-7] + [1.0] * (x.shape[1] - 1)), y @ np.ones([y.shape[1]] * 2))
      for x, y in factors
    ]
  # A stacked module beside the plain ones.
  tree = cases.tree_of(factors, np.ones(4), jnp.float32)
  stack = {'lora_a': np.zeros((3, 8, 2)), 'lora_b': np.zeros((3, 2, 5))}
  tree['stack'] = cases.normal(stack, 1, dtype=np.float32)
  # Orthogonal columns, as behind a retraction: norms are taken in place.
  return lora.canonicalize(tree) if kind.endswith('canonical') else tree


@jax.jit
def _clip(params, records, padding):
  tx = prism_optax.intrinsic_clip(CLIP, normalize_by=DIVISOR)
  state = tx.init(params)
  return tx.update(records, state, params, is_padding_example=padding)[0]


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(
  'start',
  [
    'well', 'ill, canonical', 'zero_start', 'lost',
    *(
      pytest.param(x, marks=pytest.mark.slow)
      for x in ('well, canonical', 'ill', 'zero_start, canonical')
    ),
  ],
)  # fmt: skip
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
      _record(rng, str(rng.choice([*KINDS])), params, aligned)
      for _ in range(BATCH - 1)
    ]
    opposite = jax.tree.map(
      np.negative, _record(rng, 'aligned', params, aligned)
    )
    one = batch_of([*others, _record(rng, kind, params, aligned)])
    two = batch_of([*others, opposite])
    with_it, without = clip(one, nobody), clip(one, last)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(with_it)), kind
    add_remove = cases.norm(jax.tree.map(np.subtract, with_it, without))
    replaced = cases.norm(jax.tree.map(np.subtract, with_it, clip(two, nobody)))
    assert add_remove <= tx.sensitivity() * slack, kind
    assert replaced <= slack * tx.sensitivity(
      NeighboringRelation.REPLACE_ONE
    ), kind
    moved.append(replaced)
  # The bound is met: opposite records move the sum by all of it.
  assert max(moved) > 0.999 * 2 * CLIP / DIVISOR
