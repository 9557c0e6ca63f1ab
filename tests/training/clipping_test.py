"""Rules of clipping against dense oracles in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from prism_optax import _clip, training, transforms
from prism_optax._clipped_sum import settled, to_floats
from prism_optax._modules import StepContext
from tests import cases
from tests.cases import PARAMS, N

C = 4.0
LABELS = {'head': 'head', 'layer': 'adapters'}
GROUPS = training.GroupClipping(LABELS, {'head': 3.0, 'adapters': 4.0})


def bounded(rule, grads=None):
  """The sum over b = 1 of all records' bounded contributions."""
  clip = _clip.Clip(rule, C, 1.0, 7)

  @jax.jit
  def call(grads, state):
    sums, state = clip.sum(_clip.DENSE, grads, PARAMS, state)
    return sums.to_floats(), settled(state)

  grads = cases.gradients() if grads is None else grads
  sums, state = call(grads, clip.init(PARAMS))
  return [np.asarray(x) for x in jax.tree.leaves(sums)], state


def leaves():
  return [np.float64(x) for x in jax.tree.leaves(cases.gradients())]


def norms(arrays):
  return np.sqrt(sum((x**2).reshape(N, -1).sum(1) for x in arrays))


def assert_close(found, weights):
  for x, grads, w in zip(found, leaves(), weights, strict=True):
    np.testing.assert_allclose(
      x, np.tensordot(w, grads, 1), rtol=3e-5, atol=3e-4
    )


def test_automatic_clipping():
  found, _ = bounded(training.AutomaticClipping(0.5))
  assert_close(found, [C / (norms(leaves()) + 0.5)] * 3)


def test_groups_share_the_clip_norm():
  found, _ = bounded(GROUPS)
  head, *adapters = leaves()
  weights = [
    np.minimum(1, C * share / norms(group))
    for group, share in (([head], 0.6), (adapters, 0.8))
  ]
  assert np.ptp(weights[0]) > 0 < np.ptp(weights[1])
  assert_close(found, [weights[0], weights[1], weights[1]])


def test_shares_whose_squares_underflow():
  """They are 3 to 4 all the same: C is not that of each group."""
  tiny = {name: 1e-170 * x for name, x in GROUPS.shares.items()}
  rule = training.GroupClipping(GROUPS.labels, tiny)
  for one, other in zip(bounded(rule)[0], bounded(GROUPS)[0], strict=True):
    np.testing.assert_allclose(one, other, rtol=1e-6)  # Rounding of norms.


def test_groups_of_modules_that_are_stacked_together():
  """Two modules of one shape in two groups are rows of one stack."""
  params = {
    name: {'lora_a': jnp.eye(6, 2), 'lora_b': jnp.eye(2, 4)}
    for name in ('first', 'second')
  }

  def loss(params, frozen, x, y):
    del frozen
    first, second = params['first'], params['second']
    z = 50 * x @ first['lora_a'] @ first['lora_b']
    return jnp.sum((z + x @ second['lora_a'] @ second['lora_b'] - y) ** 2)

  shares = {'first': 1.0, 'second': 1e-3}
  labels = {'first': 'first', 'second': 'second'}
  rule = training.GroupClipping(labels, shares)
  clip = transforms.intrinsic_clip(1.0, rule=rule).stacked

  @jax.jit
  def sizes(params, x, y):
    step = StepContext(params, None)
    grads = jax.vmap(jax.grad(loss), (None, None, 0, 0))(params, None, x, y)
    out, _ = clip.update(grads, clip.init(step), step)
    tree = step.to_tree(to_floats(out))
    return [optax.tree.norm(tree[name]) for name in shares]

  one = sizes(params, *(x[:1] for x in cases.DATA))
  np.testing.assert_allclose(one, [1, 1e-3], rtol=1e-4)


def test_a_quantile_is_found_and_followed():
  """Without noise: C goes to the median of the norms; sums are in its unit."""
  rule = training.QuantileClipping(0.5, learning_rate=1.0, fraction_stddev=0.0)
  found, state = bounded(rule)
  size = norms(leaves())
  assert_close(found, [np.minimum(1 / C, 1 / size)] * 3)
  # b = 1 makes the mean of centred votes their sum.
  votes = np.sum(np.where(size <= C, 0.5, -0.5))
  wanted = C * np.exp(-(votes + 0.5 - 0.5))
  assert float(state.l2_clip_norm) == pytest.approx(
    np.clip(wanted, C * 1e-6, C * 1e6), rel=1e-4
  )
  private = cases.make(
    optax.sgd(0.0),
    clipping=dataclasses.replace(rule, fraction_stddev=0.05),
    l2_clip_norm=100.0,
    expected_batch_size=N,
    steps=30,
    noise_multiplier=3.0,
  )
  norm = cases.trained(private).optimizer[0].l2_clip_norm
  assert float(norm) == pytest.approx(np.median(size), rel=0.3)


def test_a_quantile_costs_noise_of_the_gradients():
  rule = training.QuantileClipping(fraction_stddev=0.05)
  own = _clip.gradients_noise_multiplier(rule, 1.0, 20)
  assert own**-2 + (2 * 20 * 0.05) ** -2 == pytest.approx(1.0)
  private = cases.make(optax.sgd(0.1), clipping=rule)
  assert private.noise_multiplier == 1.0
  for too_little in (0.02, 0.025):
    with pytest.raises(
      ValueError, match=r'fraction_stddev > 0\.025, the noise'
    ):
      cases.make(
        optax.sgd(0.1),
        clipping=training.QuantileClipping(fraction_stddev=too_little),
      )


@pytest.mark.parametrize(
  'clipping',
  [training.AutomaticClipping(), GROUPS, training.QuantileClipping()],
  ids=lambda x: type(x).__name__,
)
def test_records_that_are_not_finite_count_as_zero(clipping):
  grads = jax.tree.map(np.copy, cases.gradients())
  grads['head'][0, 0] = np.nan
  grads['layer']['lora_a'][1, 0, 0] = np.inf
  # The square overflows. Only in units of the largest entry it does not.
  automatic = isinstance(clipping, training.AutomaticClipping)
  grads['layer']['lora_b'][2] = np.nan if automatic else 1e30
  found, _ = bounded(clipping, grads)
  for leaf in jax.tree.leaves(grads):
    leaf[:3] = 0
  wanted, _ = bounded(clipping, grads)
  for x, y in zip(found, wanted, strict=True):
    np.testing.assert_array_equal(x, y)
