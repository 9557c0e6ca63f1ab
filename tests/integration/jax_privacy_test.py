"""The route through jax-privacy, against the real package.

Its clipped gradients with our coordinates are the clipped sums of our clip.
"""

import jax
import jax.numpy as jnp
import jax_privacy
import numpy as np
import pytest

import prism_optax
from tests import cases
from tests.oracles import oracles

CLIP, BATCH, SIZE, IN, OUT = 0.5, 12.0, 8, 7, 5


def _params(stack):
  rng = np.random.default_rng(0)
  pairs = [oracles.random_factors(rng, OUT, IN, 3) for _ in range(stack or 2)]
  if stack:
    pairs = [tuple(map(np.stack, zip(*pairs, strict=True)))]
  return cases.tree_of(pairs, np.ones(OUT), jnp.float32)


def _loss(params, x, y):
  """A sum over plain or stacked modules; one example."""
  total = params['extra']
  for name, pair in params.items():
    if name != 'extra':
      out = x @ pair['lora_a'] @ pair['lora_b']
      total = total + out.reshape(-1, OUT).sum(0)
  return jnp.sum(jnp.square(jnp.tanh(total) - y))


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
def test_clipped_grad_in_coordinates_is_the_intrinsic_clip(options, stack):
  params, rng = _params(stack), np.random.default_rng(1)
  sizes = np.geomspace(0.05, 3, SIZE)[:, None]  # Some are clipped, some not.
  x = np.float32(sizes * rng.standard_normal((SIZE, IN)))
  y = np.float32(rng.standard_normal((SIZE, OUT)))
  clip = prism_optax.intrinsic_clip(CLIP, normalize_by=BATCH)

  @jax.jit
  def both(is_padding):
    theirs = jax_privacy.clipped_grad(
      _loss, l2_clip_norm=CLIP, batch_argnums=(1, 2), keep_batch_dim=False,
      pre_clipping_transform=prism_optax.tangent_coordinates(params), **options,
    )(params, x, y, is_padding_example=is_padding)  # fmt: skip
    grads = jax.vmap(jax.grad(_loss), (None, 0, 0))(params, x, y)
    return theirs, clip.update(
      grads, clip.init(params), params, is_padding_example=is_padding
    )[0]

  theirs, ours = both(np.arange(SIZE) >= SIZE - 3)
  cases.assert_close(theirs, ours, 1e-6)
  # Between one clip norm and those of all records.
  assert CLIP < cases.norm(ours) * BATCH < (SIZE - 3) * CLIP
