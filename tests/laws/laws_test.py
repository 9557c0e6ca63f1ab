"""The laws that every transformation has, from the table of all of them.

Data, keys and gauges are arguments of one program for each row. Parameters and
state are given away with every call: that they may be is one of the laws.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import cases
from tests.laws import table
from tests.laws.table import PROBLEM, ROWS
from tests.oracles import oracles

NOBODY = np.zeros(PROBLEM.batch, bool)


def _rows(law=lambda row: True):
  fast = [name for name, row in ROWS.items() if not row.slow]
  every = [name for name, row in ROWS.items() if law(row)]
  return cases.fast_first('name', fast, every)


def _points(zero=None):
  """Factors of all modules, and the other leaf."""
  factors, extra = PROBLEM.start()
  if zero is not None:
    factors[0] = tuple(x * (i != zero) for i, x in enumerate(factors[0]))
  return factors, extra


def _tree(factors, extra):
  return jax.device_get(PROBLEM.params(factors, extra, jnp.float32))


def _incoming(name, params, step=0):
  """Of one dense gradient: in every gauge what that gauge makes of it."""
  if ROWS[name].examples:
    at = PROBLEM.dense(_tree(*_points()))
    grads = PROBLEM.gradients(step, at)
    return jax.device_get(PROBLEM.factor_gradients(params, grads))
  return jax.device_get(
    PROBLEM.coordinates(params, PROBLEM.ambient_noise(step))
  )


class _Compiled:
  """A row, compiled once; its first state is on the host for all laws."""

  def __init__(self, name):
    self.row, self.name = ROWS[name], name
    tx = self.tx = self.row.make(1)
    params = _tree(*_points())
    state = tx.init(jax.tree.map(jnp.array, params))

    def update(grads, state, params, padding):
      more = {'is_padding_example': padding} if self.row.examples else {}
      return tx.update(grads, state, params, **more)

    self.update = jax.jit(update, donate_argnums=(1, 2))
    self.state, self.saved = state, cases.saved(state)

  def __call__(self, params, grads, state=None, padding=NOBODY):
    """Updates on the host, and the state, also there."""
    saved = self.saved if state is None else state
    state = cases.restored(saved, self.state)
    out, state = self.update(
      grads, state, jax.tree.map(jnp.array, params), padding
    )
    return jax.device_get(out), cases.saved(state)


compiled = functools.cache(_Compiled)


def _usual(name):
  params = _tree(*_points())
  return compiled(name), params, _incoming(name, params)


def _differs(one, other):
  return any(
    not np.array_equal(x, y)
    for x, y in zip(*map(jax.tree.leaves, (one, other)), strict=True)
  )


def test_every_public_transformation_has_a_row():
  assert table.public_transformations() == set(ROWS) | table.OTHERS


@pytest.mark.slow
@_rows()
def test_parameters_and_state_may_be_given_away_and_keep_their_types(name):
  """From the first step on: no buffer of the initial state is there twice."""
  run, params, grads = _usual(name)
  params = jax.tree.map(jnp.array, params)
  state = run.tx.init(params)
  updates, after = run.update(grads, state, params, NOBODY)
  old, new = (run.state, _tree(*_points())), (after, updates)
  for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True):
    assert (x.shape, x.dtype) == (y.shape, y.dtype)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


@_rows()
def test_parameters_in_bfloat16_have_states_in_float32(name):
  tx = ROWS[name].make(1)
  wide = _tree(*_points())
  params, grads = (
    jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)
    for tree in (wide, _incoming(name, wide))
  )
  state = jax.eval_shape(tx.init, params)
  updates, after = jax.eval_shape(tx.update, grads, state, params)
  types = jax.tree.map(lambda x: x.dtype, (state, after))
  assert types[0] == types[1]
  assert all(x.dtype != jnp.bfloat16 for x in jax.tree.leaves(after))
  want = jnp.bfloat16 if ROWS[name].narrow else jnp.float32
  assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(want)}


@_rows()
def test_accelerators_multiply_float32_as_float32(name):
  """Not in bfloat16. Lowered for machines that need not be there."""
  run, params, grads = _usual(name)
  traced = run.update.trace(grads, run.state, params, NOBODY)
  text = traced.lower(lowering_platforms=('cuda', 'tpu')).as_text()
  products = [x for x in text.splitlines() if 'stablehlo.dot_general' in x]
  assert all('[HIGHEST, HIGHEST]' in x for x in products)


@_rows(lambda row: row.noise)
def test_noise_is_of_the_key_and_of_the_step(name):
  run, params, grads = _usual(name)
  one, state = run(params, grads)
  again, _ = run(params, grads, cases.saved(ROWS[name].make(1).init(params)))
  cases.assert_same_bits(one, again)
  other, _ = run(params, grads, cases.saved(ROWS[name].make(2).init(params)))
  second, _ = run(params, grads, state)
  assert _differs(one, other)
  assert _differs(one, second)


@_rows(lambda row: row.examples)
@pytest.mark.parametrize('bad', [np.nan, np.inf, 3e38])
def test_an_example_that_is_not_finite_is_one_that_is_not_there(name, bad):
  """3e38 is finite, its square is not. No leaf may keep half an example."""
  run, params, grads = _usual(name)
  second = np.arange(PROBLEM.batch) == 1
  want, _ = run(params, grads, padding=second)
  for spoiled in range(len(jax.tree.leaves(grads))):
    leaves, treedef = jax.tree.flatten(jax.tree.map(np.array, grads))
    leaves[spoiled][1].flat[0] = bad
    found, _ = run(params, jax.tree.unflatten(treedef, leaves))
    cases.assert_same_bits(found, want)


@_rows(lambda row: row.examples)
def test_what_is_in_padding_does_not_matter_nor_does_the_order(name):
  run, params, grads = _usual(name)
  padding = np.array([0, 1, 0, 1], bool)
  want, _ = run(params, grads, padding=padding)
  odd = jax.tree.map(
    lambda x: np.where(
      padding.reshape(-1, *[1] * (x.ndim - 1)), np.float32(np.nan), x
    ),
    grads,
  )
  cases.assert_same_bits(run(params, odd, padding=padding)[0], want)
  turned = jax.tree.map(lambda x: x[::-1], odd)
  found, _ = run(params, turned, padding=padding[::-1])
  # With noise sums are on its lattice, and exact.
  cases.assert_close(found, want, 0 if ROWS[name].noise else 1e-6)


@_rows(lambda row: row.examples)
def test_a_batch_of_padding_adds_nothing(name):
  run, params, grads = _usual(name)
  odd = jax.tree.map(lambda x: np.full_like(x, np.nan), grads)
  found, _ = run(params, odd, padding=~NOBODY)
  leaves = jax.tree.leaves(found)
  assert np.isfinite(np.concatenate(leaves, None)).all()
  # The noise, or nothing.
  assert all(np.any(x) == ROWS[name].noise for x in leaves)


@_rows(lambda row: row.gauge)
def test_the_matrix_is_the_same_in_every_gauge(name):
  """Over two steps at points far apart, each in two gauges."""
  run = compiled(name)
  rng = np.random.default_rng(3)
  states, found = [None, None], []
  for step in range(2):
    factors = [oracles.random_factors(rng, *x, 3.0) for x in PROBLEM.shapes]
    extra = rng.normal(size=5)
    others = [
      oracles.change_gauge(x, oracles.random_gauge(rng, x[0].shape[1], 10.0))
      for x in factors
    ]
    found = []
    for i, pairs in enumerate((factors, others)):
      params = _tree(pairs, extra)
      if step == 0:
        states[i] = cases.saved(run.tx.init(params))
      out, states[i] = run(params, _incoming(name, params, step), states[i])
      # The last transformation gives steps of factors: where they lead.
      found.append(
        PROBLEM.dense(jax.tree.map(np.add, params, out))
        if name == 'retract'
        else PROBLEM.embed(params, out)
      )
  one, other = found
  size = max(np.abs(x).max() for x in one.modules)
  for x, y in zip(one.modules, other.modules, strict=True):
    # float32, a gauge of condition ten, and moments that divide.
    np.testing.assert_allclose(x, y, atol=2e-4 * size)


@_rows()
@pytest.mark.parametrize('zero', [0, 1])
def test_a_zero_factor_leaves_all_finite(name, zero):
  """The default of every LoRA library, and the other way round."""
  run = compiled(name)
  params = _tree(*_points(zero))
  state = None
  for step in range(2):
    out, state = run(params, _incoming(name, params, step), state)
    for x in jax.tree.leaves(out):
      assert np.isfinite(x).all()
    # Of tangent coordinates those are zero that the factor does not show.
    if (run.row.gauge and name != 'retract') or 'privatizer' in name:
      assert not out['m0'][('lora_a', 'lora_b')[zero]].any()
