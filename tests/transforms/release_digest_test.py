"""A digest of what is released reaches the noise, through every chain."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from tests.cases import PARAMS

ONE, OTHER = (np.arange(8, dtype=np.uint32) + i for i in (0, 1))


def noise():
  return prism_optax.tangent_privatizer(1.0, prng_key=3)


def foreign(*others):
  """A privatizer of others that takes the digest; nothing else about rows."""

  def update(updates, state, params=None, *, release_digest=None, **extra):
    assert tuple(extra) == others
    key = jax.random.fold_in(jax.random.key(0), release_digest[0])
    return optax.tree.random_like(key, updates, jax.random.normal), state

  init = optax.identity().init
  return optax.GradientTransformationExtraArgs(init, update)


CASES = {
  'prism_optax.chain': lambda: prism_optax.chain(
    noise(),
    optax.scale(0.5),  # Knows no argument beside.
    retract_elsewhere=True,
  ),
  'a foreign part of a chain': lambda: prism_optax.chain(
    foreign('is_padding_example'), retract_elsewhere=True
  ),
  'optax.partition': lambda: optax.partition(
    {'all': optax.chain(noise())},
    lambda tree: jax.tree.map(lambda _: 'all', tree),
  ),
  'dp_muon of a foreign privatizer': lambda: prism_optax.dp_muon(
    0.1, l2_clip_norms=1.0, privatizer=foreign(), steps=9,
    expected_batch_size=4, per_example_gradients=False,
  ),
  'a foreign privatizer': lambda: prism_optax.tangent_privatizer(
    privatizer=foreign(), steps=9
  ),
}  # fmt: skip


@pytest.mark.parametrize('case', CASES)
def test_it_passes_through(case):
  tx = optax.with_extra_args_support(CASES[case]())
  state = tx.init(PARAMS)

  @jax.jit
  def released(digest):
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    out, _ = tx.update(
      zeros, state, PARAMS, release_digest=digest,
      is_padding_example=jnp.zeros(4, bool),
    )  # fmt: skip
    return jax.tree.leaves(out)

  one, again, other = map(released, (ONE, ONE, OTHER))
  for x, y, z in zip(one, again, other, strict=True):
    np.testing.assert_array_equal(x, y)
    assert np.abs(x - z).max() > 1e-3
