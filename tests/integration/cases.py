"""A small model whose parameters are partly frozen, and its gradients."""

import jax
import jax.numpy as jnp
import optax

import prism_optax
from tests import cases

CLIP, BATCH, MULTIPLIER, SEED = 0.5, 8.0, 0.3, 7
STDDEV = MULTIPLIER * CLIP / BATCH


def params():
  return cases.PARAMS | {'frozen': cases.FROZEN}


def trainable(tree):
  return {name: x for name, x in tree.items() if name != 'frozen'}


def loss(tree, x):
  z = x @ tree['frozen'] + x @ tree['layer']['lora_a'] @ tree['layer']['lora_b']
  return jnp.sum(jnp.tanh(z + tree['head'] + 1) ** 2)


def batch():
  return cases.DATA[0][:6]


@jax.jit
def per_example_gradients(tree, x):
  return jax.vmap(jax.grad(loss), (None, 0))(tree, x)


def clip(normalize_by=BATCH):
  return prism_optax.intrinsic_clip(CLIP, normalize_by=normalize_by)


def privatizer(stddev=STDDEV):
  return prism_optax.tangent_privatizer(stddev, prng_key=SEED)


def prism():
  return prism_optax.prism(
    0.05, l2_clip_norm=CLIP, noise_multiplier=MULTIPLIER,
    expected_batch_size=BATCH, prng_key=SEED,
  )  # fmt: skip


def after_the_noise(learning_rate=0.5):
  """Without preconditioner: compiling is what these tests cost."""
  return optax.chain(
    optax.scale_by_learning_rate(learning_rate), prism_optax.retract()
  )


# What averages or hides gradients must not come in front of these.
CLIPS = {
  'intrinsic_clip': clip(),
  'prism': prism(),
  'per_matrix_clip': prism_optax.per_matrix_clip(1.0),
  'dp_muon': prism_optax.dp_muon(
    0.1, l2_clip_norms=1.0, noise_multiplier=1.0, expected_batch_size=8
  ),
}
