"""The trail that transformations in `optax.chain` follow."""

import gc

import jax
import jax.numpy as jnp
import optax
import pytest

import prism_optax
from prism_optax.transforms import _chain
from tests.oracles import problems
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')


@pytest.fixture
def followed(monkeypatch):
  """Whether each transformation went on with the stacks of the last one."""
  found = []
  follow = _chain.trail.follow

  def recorded(*args):
    result = follow(*args)
    found.append(result is not None)
    return result

  monkeypatch.setattr(_chain.trail, 'follow', recorded)
  return found


def test_other_parameters_are_no_trail(followed):
  problem, params = chains.problem_and_params()
  grads = chains.batch(problem, params)
  decay = prism_optax.add_decayed_factors(1.0)
  clip = chains.clip()

  def update(params, other):
    x, _ = clip.update(grads, clip.init(params), params)
    return decay.update(x, decay.init(params), other)[0]

  moved = jax.tree.map(lambda x: 1.5 * x, params)
  found = jax.jit(update)(params, moved)
  assert followed == [False]
  chains.assert_close(found, update(params, moved))
  jax.jit(lambda p: update(p, jax.tree.map(lambda x: x + 0.0, p)))(params)
  assert not any(followed)
  # The same arrays in another dict are the same parameters.
  jax.jit(lambda p: update(p, dict(p)))(params)
  assert followed[-1]


def test_updates_that_were_changed_are_no_trail(followed):
  problem, params = chains.problem_and_params()
  grads = chains.batch(problem, params)
  decay = prism_optax.add_decayed_factors(1.0)
  clip = chains.clip()

  def update(change, params):
    x, _ = clip.update(grads, clip.init(params), params)
    return decay.update(change(x), decay.init(params), params)[0]

  def doubled(x):
    return jax.tree.map(lambda leaf: 2.0 * leaf, x)

  def one_leaf(x):
    return x | {'extra': 2.0 * x['extra']}

  def swapped(x):
    return x | {'m0': x['m2'], 'm2': x['m0']}

  for change in (doubled, one_leaf, swapped):
    found = jax.jit(lambda p, change=change: update(change, p))(params)
    assert not followed.pop()
    chains.assert_close(found, update(change, params))
    followed.clear()
  jax.jit(lambda p: update(dict, p))(params)
  assert followed == [True]


def test_loops_and_branches_compute_what_is_computed_outside(followed):
  """Bodies close over arrays of the program around them, and give new ones."""
  problem, params = chains.problem_and_params()
  grads = chains.batch(problem, params)
  decay, clip = prism_optax.add_decayed_factors(1.0), chains.clip()

  def behind(x, params):
    return decay.update(x, decay.init(params), params)[0]

  def straight(params):
    return behind(clip.update(grads, clip.init(params), params)[0], params)

  def in_a_branch(params):
    x, _ = clip.update(grads, clip.init(params), params)
    return jax.lax.cond(
      params['extra'][0] < 1e9, lambda: behind(x, params), lambda: x
    )

  def in_a_loop(params):
    x, _ = clip.update(grads, clip.init(params), params)
    body = lambda total, _: (  # noqa: E731
      jax.tree.map(jnp.add, total, behind(x, params)), None
    )  # fmt: skip
    total, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, x), length=2)
    return jax.tree.map(lambda leaf: leaf / 2, total)

  def through_a_loop(params):
    """What comes out of a body has other names outside."""
    body = lambda _, __: (  # noqa: E731
      clip.update(grads, clip.init(params), params)[0], None
    )  # fmt: skip
    start = jax.tree.map(jnp.zeros_like, params)
    x, _ = jax.lax.scan(body, start, length=1)
    followed.clear()
    out = behind(x, params)
    assert followed == [False]
    return out

  expected = straight(params)
  for program in (in_a_branch, in_a_loop, through_a_loop):
    with jax.checking_leaks():
      found = jax.jit(program)(params)
    chains.assert_close(found, expected)
    gc.collect()
    assert _chain.trail._last is None


def test_nothing_is_left_behind(followed):
  """Neither by eager updates, nor by traced ones once they are traced."""
  tx = problems.chain_of(0.05, **chains.OPTIONS, chain=optax.chain)
  problem, params = chains.problem_and_params()
  grads, state = chains.batch(problem, params), tx.init(params)
  gc.collect()
  assert _chain.trail._last is None
  tx.update(grads, state, params)
  assert _chain.trail._last is None
  with jax.checking_leaks():
    jax.jit(tx.update)(grads, state, params)
  assert any(followed)
  gc.collect()
  assert _chain.trail._last is None


def test_a_program_that_fails_leaves_nothing_behind():
  clip = chains.clip()
  problem, params = chains.problem_and_params()
  grads = chains.batch(problem, params)

  def update(params):
    clip.update(grads, clip.init(params), params)
    raise RuntimeError('while tracing')

  with pytest.raises(RuntimeError, match='while tracing'):
    jax.jit(update)(params)
  gc.collect()
  assert _chain.trail._last is None
