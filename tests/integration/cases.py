"""A small model whose parameters are partly frozen, and its gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import prism_optax

CLIP, BATCH, MULTIPLIER, SEED = 0.5, 8.0, 0.3, 7
STDDEV = MULTIPLIER * CLIP / BATCH
IN, OUT, RANK = 4, 3, 2


def params():
  """{'frozen', 'head', 'lora': {'lora_a', 'lora_b'}}."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return np.float32(rng.standard_normal(shape))

  return {
    'frozen': normal(IN, OUT),
    'head': normal(OUT),
    'lora': {'lora_a': normal(IN, RANK), 'lora_b': normal(RANK, OUT)},
  }


def trainable(tree):
  return {name: x for name, x in tree.items() if name != 'frozen'}


def loss(tree, x):
  weight = tree['frozen'] + tree['lora']['lora_a'] @ tree['lora']['lora_b']
  return jnp.sum(jnp.tanh(x @ weight + tree['head']) ** 2)


def batch(seed=1, size=6):
  rng = np.random.default_rng(seed)
  return np.float32(rng.standard_normal((size, IN)))


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
