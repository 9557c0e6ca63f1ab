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
    treedef, [np.float32(rng.standard_normal(x.shape)) for x in leaves]
  )


def intrinsic_is_the_change_of_the_weight(layer: Layer) -> None:
  (z,) = lora.deltas(layer.params, layout=layer.layout, dense=True).values()
  x = np.eye(layer.inputs, dtype=np.float32)
  nothing = jax.tree.map(np.zeros_like, layer.params)
  apply = jax.jit(layer.apply)
  change = np.subtract(apply(layer.params, x), apply(nothing, x))
  assert z.shape == (change.shape[1], layer.inputs)
  # Sums of a few numbers of order one in float32.
  np.testing.assert_allclose(z.T, change, atol=2e-5)


def without_preconditioner(layout: Any = None):
  """Clip, noise and retraction: what reads the layout, and quickly compiled."""
  return prism_optax.chain(
    prism_optax.intrinsic_clip(1.0, normalize_by=BATCH),
    prism_optax.tangent_privatizer(0.5 / BATCH, prng_key=0),
    prism_optax.scale_by_learning_rate(0.1),
    prism_optax.retract(),
    layout=layout,
  )


def whole_prism(layout: Any = None):
  """The optimizer itself."""
  return prism_optax.prism(
    0.1,
    l2_clip_norm=1.0,
    noise_multiplier=0.5,
    expected_batch_size=BATCH,
    prng_key=0,
    layout=layout,
  )


def all_adapters_move(layer: Layer, make=without_preconditioner) -> Any:
  """One private step from per-example gradients; returns the new factors."""
  rng = np.random.default_rng(1)
  x = np.float32(rng.standard_normal((BATCH, layer.inputs)))

  def loss(params, x):
    return jnp.sum(jnp.sin(layer.apply(params, x[None])))

  grads = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(layer.params, x)
  leaves, treedef = jax.tree.flatten(layer.params)

  @jax.jit
  def update(grads, params):
    # Of leaves: layers of one shape are one program, whatever their tree.
    grads, params = (jax.tree.unflatten(treedef, t) for t in (grads, params))
    tx = make(layer.layout)
    updates, _ = tx.update(grads, tx.init(params), params)
    return jax.tree.leaves(jax.tree.map(jnp.add, params, updates))

  new = jax.device_get(update(jax.tree.leaves(grads), leaves))
  new = jax.tree.unflatten(treedef, new)
  for old, moved in zip(
    jax.tree.leaves(layer.params), jax.tree.leaves(new), strict=True
  ):
    assert np.all(np.isfinite(moved))
    assert np.all(np.any(old != moved, axis=-1))
  return new
