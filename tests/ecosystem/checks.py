"""What every library's adapters must do, on the real packages.

A case is one layer that is linear in its input: its trainable factors, and how
to apply it. What the layer adds for the unit vectors is the change of its
weight, against which the intrinsic variable is checked.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import prism_optax
from prism_optax import lora

BATCH = 4


class Layer(NamedTuple):
  """A layer with adapters.

  Attributes:
    params: Its trainable factors, all random (none zero).
    apply: ``apply(params, x)``, x (b, n) to (b, m).
    inputs: n.
    layout: What is passed to our functions.
  """

  params: Any
  apply: Callable[[Any, jax.Array], jax.Array]
  inputs: int
  layout: Any = None


def randomised(params: Any, seed: int = 0) -> Any:
  """Normal entries in the shapes of ``params``, float32."""
  leaves, treedef = jax.tree.flatten(params)
  rng = np.random.default_rng(seed)
  return jax.tree.unflatten(
    treedef,
    [jnp.asarray(rng.standard_normal(x.shape), jnp.float32) for x in leaves],
  )


def intrinsic_is_the_change_of_the_weight(layer: Layer) -> None:
  (z,) = lora.deltas(layer.params, layout=layer.layout, dense=True).values()
  x = jnp.eye(layer.inputs)
  nothing = jax.tree.map(jnp.zeros_like, layer.params)
  change = layer.apply(layer.params, x) - layer.apply(nothing, x)
  assert z.shape == (change.shape[1], layer.inputs)
  # Sums of a few numbers of order one in float32.
  np.testing.assert_allclose(z.T, change, atol=2e-5)


def all_adapters_move(layer: Layer) -> Any:
  """One private step from per-example gradients; returns the new factors."""
  rng = np.random.default_rng(1)
  x = jnp.asarray(rng.standard_normal((BATCH, layer.inputs)), jnp.float32)

  def loss(params, x):
    return jnp.sum(jnp.sin(layer.apply(params, x[None])))

  grads = jax.vmap(jax.grad(loss), (None, 0))(layer.params, x)
  tx = prism_optax.prism(
    0.1,
    l2_clip_norm=1.0,
    noise_multiplier=0.5,
    expected_batch_size=BATCH,
    layout=layer.layout,
  )
  updates, _ = tx.update(grads, tx.init(layer.params), layer.params)
  new = jax.tree.map(jnp.add, layer.params, updates)
  for old, moved in zip(
    jax.tree.leaves(layer.params), jax.tree.leaves(new), strict=True
  ):
    assert jnp.all(jnp.isfinite(moved))
    assert jnp.all(jnp.any(old != moved, axis=-1))
  return new
