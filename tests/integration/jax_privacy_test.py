"""The route through jax-privacy, against the real package.

Its clipped gradients, samplers, privatizers, accountants and auditor around our
transformations, compared with the chain that needs none of them.
"""

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import optax
import pytest

import prism_optax
from tests import cases
from tests.oracles import oracles

CLIP, BATCH, STDDEV = 0.5, 12.0, 0.02
SIZE, IN, OUT = 8, 7, 5


def _params(stack=None):
  rng = np.random.default_rng(0)
  shape = (OUT, IN, 3)
  if stack:
    pairs = [oracles.random_factors(rng, *shape) for _ in range(stack)]
    factors = [tuple(np.stack(x) for x in zip(*pairs, strict=True))]
  else:
    factors = [oracles.random_factors(rng, *shape) for _ in range(2)]
  return cases.tree_of(factors, np.ones(OUT), jnp.float32)


def _loss(params, x, y):
  """A sum over plain or stacked modules; one example."""
  total = params['extra']
  for name, pair in params.items():
    if name != 'extra':
      out = x @ pair['lora_a'] @ pair['lora_b']
      total = total + out.reshape(-1, OUT).sum(0)
  return jnp.sum(jnp.square(jnp.tanh(total) - y))


def _data(seed=1, size=SIZE):
  rng = np.random.default_rng(seed)
  sizes = np.geomspace(0.05, 3, size)[:, None]  # Some are clipped, some not.
  x = jnp.asarray(sizes * rng.standard_normal((size, IN)), jnp.float32)
  return x, jnp.asarray(rng.standard_normal((size, OUT)), jnp.float32)


def _after_the_clip(stddev=STDDEV, privatizer=None):
  noise = (
    prism_optax.tangent_privatizer(stddev, prng_key=5)
    if privatizer is None
    else prism_optax.tangent_privatizer(
      privatizer=privatizer, steps='unlimited'
    )
  )
  return optax.chain(
    noise,
    prism_optax.scale_by_rank_preconditioner(noise_stddev=stddev),
    optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )


def _train(params, tx, grads_of, steps=3):
  state = tx.init(params)

  @jax.jit
  def step(params, state, x, y, is_padding):
    updates, state = tx.update(
      grads_of(params, x, y, is_padding), state, params
    )
    return optax.apply_updates(params, updates), state

  is_padding = jnp.arange(SIZE) >= SIZE - 3
  for t in range(steps):
    params, state = step(params, state, *_data(t), is_padding)
  return params


def _their_gradients(**options):
  def grads_of(params, x, y, is_padding):
    return jax_privacy.clipped_grad(
      _loss, l2_clip_norm=CLIP, batch_argnums=(1, 2), keep_batch_dim=False,
      pre_clipping_transform=prism_optax.tangent_coordinates(params), **options,
    )(params, x, y, is_padding_example=is_padding)  # fmt: skip

  return grads_of


def _our_gradients(params, x, y, is_padding):
  per_example = jax.vmap(jax.grad(_loss), (None, 0, 0))(params, x, y)
  clip = prism_optax.intrinsic_clip(CLIP, normalize_by=BATCH)
  return clip.update(
    per_example, clip.init(params), params, is_padding_example=is_padding
  )[0]


def _assert_same(got, want):
  """Z and the other leaves; factors only up to rounding in their gauge."""
  for x, y in zip(cases.products_of(got), cases.products_of(want), strict=True):
    # Three float32 steps of 0.05; moments divide by noise of 0.02.
    np.testing.assert_allclose(x, y, atol=3e-5)
  np.testing.assert_allclose(got['extra'], want['extra'], atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize('stack', [None, 4])
@pytest.mark.parametrize(
  'options',
  [
    {'normalize_by': BATCH},
    {'normalize_by': BATCH, 'microbatch_size': 2},
    # Then the sum has sensitivity 1: the divisor brings back C / b.
    {'normalize_by': BATCH / CLIP, 'rescale_to_unit_norm': True},
  ],
)
def test_clipped_grad_and_the_chain_equal_pure_optax(options, stack):
  params = _params(stack)
  want = _train(params, _after_the_clip(), _our_gradients)
  got = _train(params, _after_the_clip(), _their_gradients(**options))
  _assert_same(got, want)
  moved = cases.products_of(params)[0] - cases.products_of(got)[0]
  assert np.abs(moved).max() > 0.01
