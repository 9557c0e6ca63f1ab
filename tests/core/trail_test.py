"""The trail that transformations in `optax.chain` follow."""

import functools
import gc
import threading

import jax
import jax.numpy as jnp
import pytest

import prism_optax
from prism_optax import lora
from prism_optax.transforms import _chain
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')


@pytest.fixture
def followed(monkeypatch):
  """Whether each transformation went on with the stacks of the last one."""
  found = []
  origin_of = _chain._origin_of

  def recorded(*args):
    result = origin_of(*args)
    found.append(result is not None)
    return result

  monkeypatch.setattr(_chain, '_origin_of', recorded)
  return found


@functools.cache
def parts():
  """Parameters, gradients of examples, the clip, and the decay behind it.

  The two also by themselves, compiled: between two programs there is no trail.
  """
  problem, params = chains.problem_and_params()
  grads = chains.batch(problem, params)
  clip, decay = chains.clip(), prism_optax.add_decayed_factors(1.0)

  def clipped(params):
    return clip.update(grads, clip.init(params), params)[0]

  def decayed(x, params):
    return decay.update(x, decay.init(params), params)[0]

  return params, clipped, decayed, jax.jit(clipped), jax.jit(decayed)


@pytest.mark.slow
def test_other_parameters_are_no_trail(followed):
  params, clipped, decayed, clip_alone, decay_alone = parts()

  def update(params, other):
    return decayed(clipped(params), other)

  moved = jax.tree.map(lambda x: 1.5 * x, params)
  found = jax.jit(update)(params, moved)
  assert followed == [False]
  chains.assert_close(found, decay_alone(clip_alone(params), moved))
  jax.eval_shape(
    lambda p: update(p, jax.tree.map(lambda x: x + 0.0, p)), params
  )
  assert not any(followed)
  # The same arrays in another dict are the same parameters.
  jax.eval_shape(lambda p: update(p, dict(p)), params)
  assert followed[-1]


def test_updates_that_were_changed_are_no_trail(followed):
  params, clipped, decayed, clip_alone, decay_alone = parts()

  def update(change, params):
    return decayed(change(clipped(params)), params)

  def doubled(x):
    return jax.tree.map(lambda leaf: 2.0 * leaf, x)

  def one_leaf(x):
    return x | {'extra': 2.0 * x['extra']}

  def swapped(x):
    return x | {'m0': x['m1'], 'm1': x['m0']}

  changes = doubled, one_leaf, swapped
  all_found = jax.jit(lambda p: [update(change, p) for change in changes])
  for change, found in zip(changes, all_found(params), strict=True):
    chains.assert_close(found, decay_alone(change(clip_alone(params)), params))
  # Three times, and once more where the decay by itself is first traced here.
  assert len(followed) >= 3
  assert not any(followed)
  followed.clear()
  jax.eval_shape(lambda p: update(dict, p), params)
  assert followed == [True]


def test_the_sum_is_exact_whatever_happens_in_between(followed):
  """Two chains in turn, of which one starts again; and another tree dies."""
  params, clipped, *_ = parts()
  noise = chains.noise()

  def update(params):
    one, other = clipped(params), clipped(params)
    clipped(params)  # Nobody takes it.
    return [
      noise.update(x, noise.init(params), params)[0] for x in (one, other)
    ]

  jax.eval_shape(update, params)
  assert followed == [True, True]


def test_threads_do_not_meet():
  """Each finds its own sum, while the other is between its clip and noise."""
  params, clipped, *_ = parts()
  meet, found = threading.Barrier(2, timeout=60), []

  def trace():
    def update(params):
      x = clipped(params)
      meet.wait()
      origin = _chain._origin_of(x, params, None)
      meet.wait()
      found.append(origin is not None and origin.step.params is params)
      return x

    with jax.enable_x64(True):  # It is one of each thread.
      jax.eval_shape(update, params)

  threads = [threading.Thread(target=trace) for _ in range(2)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert found == [True, True]


def test_a_tree_of_the_very_arrays_of_its_sum(followed):
  """One module, which is a stack already: no reshaping makes a new array."""
  axes = lora.Layout(2, 2, (0,), (0,))
  layout = [lora.Pair('right', 'left', axes)]
  params = {'left': jnp.ones((2, 4, 1)), 'right': jnp.ones((2, 3, 1))}
  clip = prism_optax.intrinsic_clip(1.0, layout=layout)
  noise = prism_optax.tangent_privatizer(1.0, prng_key=7, layout=layout)

  def update(params):
    grads = jax.tree.map(lambda x: x[None], params)
    x, _ = clip.update(grads, clip.init(params), params)
    out, _ = noise.update(x, noise.init(params), params)
    return out

  jax.eval_shape(update, params)
  assert followed == [True]
  gc.collect()
  assert not _chain._origins


def test_a_branch_keeps_nothing_of_the_sum():
  """What was taken in it belongs to its program."""
  params, clipped, decayed, *_ = parts()

  def update(params):
    x = clipped(params)
    inside = lambda: decayed(x, params)  # noqa: E731
    chosen = jax.lax.cond(params['extra'][0] < 0, inside, lambda: x)
    assert _chain._origin_of(x, params, None).stacks._floats is None
    return chosen

  jax.eval_shape(update, params)


def test_a_tree_is_forgotten_with_its_first_array():
  tree = [jnp.ones(2), jnp.ones(3)]
  _chain._remember(tree, [], None)
  del tree[0]
  assert not _chain._origins
