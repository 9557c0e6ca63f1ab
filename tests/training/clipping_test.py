"""Rules of clipping against dense oracles in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import training, transforms
from tests import cases
from tests.cases import PARAMS, N

C = 4.0
LABELS = {'head': 'head', 'layer': 'adapters'}
GROUPS = training.GroupClipping(LABELS, {'head': 3.0, 'adapters': 4.0})


def bounded(rule):
  """The sum of all records' bounded contributions, and the state."""
  private = cases.make(
    optax.sgd(1.0), clipping=rule, l2_clip_norm=C, noise_multiplier=0.0,
    expected_batch_size=N, steps=1,
  )  # fmt: skip
  state = cases.trained(private)
  pairs = zip(*map(jax.tree.leaves, (PARAMS, state.params)), strict=True)
  return [N * np.subtract(old, new, dtype=float) for old, new in pairs], state


def leaves():
  return [np.float64(x) for x in jax.tree.leaves(cases.gradients())]


def norms(arrays):
  return np.sqrt(sum((x**2).reshape(N, -1).sum(1) for x in arrays))


def assert_close(found, weights):
  for x, grads, w in zip(found, leaves(), weights, strict=True):
    # The parameters, of order one, are rounded; the sum has N records.
    wanted = np.tensordot(w, grads, 1)
    np.testing.assert_allclose(x, wanted, rtol=3e-5, atol=N * 3e-7)


@pytest.mark.slow
def test_automatic_clipping():
  found, _ = bounded(training.AutomaticClipping(0.5))
  assert_close(found, [C / (norms(leaves()) + 0.5)] * 3)


@pytest.mark.parametrize('scale', [1.0, 1e-170])
def test_groups_share_the_clip_norm(scale):
  """Also where the squares of shares underflow: they are still 3 to 4."""
  shares = {name: scale * x for name, x in GROUPS.shares.items()}
  found, _ = bounded(training.GroupClipping(LABELS, shares))
  head, *adapters = leaves()
  weights = [
    np.minimum(1, C * share / norms(group))
    for group, share in (([head], 0.6), (adapters, 0.8))
  ]
  assert np.ptp(weights[0]) > 0 < np.ptp(weights[1])
  assert_close(found, [weights[0], weights[1], weights[1]])
  with pytest.raises(
    ValueError, match=r'shares of one group or more, got \{\}'
  ):
    training.GroupClipping(LABELS, {})
  with pytest.raises(ValueError, match=r"got shares\['head'\]=0"):
    training.GroupClipping(LABELS, {'head': 0.0})
  clip = transforms.intrinsic_clip(C, rule=GROUPS)
  with pytest.raises(ValueError, match='labels to be a prefix of the tree'):
    clip.init({'another': cases.PARAMS})


def test_a_state_is_of_labels_and_not_of_the_function_that_gives_them():
  rules = [
    training.GroupClipping(lambda _: LABELS, GROUPS.shares) for _ in 'ab'
  ]
  one, other = (
    cases.make(optax.sgd(0.1), clipping=x, noise_multiplier=0.0) for x in rules
  )
  assert other.statement(one.init(cases.PARAMS)) == other.statement(
    other.init(cases.PARAMS)
  )


def test_groups_of_modules_that_are_stacked_together():
  """Two modules of one shape in two groups are rows of one stack."""
  pair = {'lora_a': jnp.eye(6, 2), 'lora_b': jnp.eye(2, 4)}
  params = {'first': pair, 'second': pair}
  shares = {'first': 1.0, 'second': 1e-3}
  rule = training.GroupClipping(lambda x: {k: k for k in x}, shares)
  clip = transforms.intrinsic_clip(1.0, rule=rule)

  @jax.jit
  def sizes(x, y):
    def loss(params, x, y):
      first, second = params['first'], params['second']
      z = 50 * x @ first['lora_a'] @ first['lora_b']
      return jnp.sum((z + x @ second['lora_a'] @ second['lora_b'] - y) ** 2)

    grads = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)
    out, _ = clip.update(grads, clip.init(params), params)
    return [optax.tree.norm(out[name]) for name in shares]

  one = sizes(*(x[:1] for x in cases.DATA))
  np.testing.assert_allclose(one, [1, 1e-3], rtol=1e-4)


def test_a_clip_norm_follows_a_quantile():
  """Towards the median of the norms; sums are in its unit.

  Nor is there any noise if the training has none.
  """
  rule = training.QuantileClipping(learning_rate=1.0, fraction_stddev=0.1)
  found, state = bounded(rule)
  size = norms(leaves())
  assert_close(found, [np.minimum(1 / C, 1 / size)] * 3)
  below = np.mean(size <= C)
  norm = float(state.optimizer[0].l2_clip_norm)
  assert norm == pytest.approx(C * np.exp(0.5 - below), rel=1e-4)
  clip = transforms.intrinsic_clip(C, rule=rule, prng_key=2**100)
  key = clip.init(cases.PARAMS).prng_key
  assert jax.random.key_data(key).shape == (4,)
  fast = bounded(training.QuantileClipping(learning_rate=1e3))[1].optimizer[0]
  assert fast.l2_clip_norm == pytest.approx(
    C * 10 ** (6 * np.sign(0.5 - below))
  )
