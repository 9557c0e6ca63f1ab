"""Private LoRA of a random tiny gemma transformer (pip install gemma)."""

import jax
import jax.numpy as jnp
import optax
from gemma import gm, peft

import prism_optax
from prism_optax import lora

BATCH, LENGTH, VOCABULARY = 8, 6, 32
config = gm.nn.config.TransformerConfig(
  num_embed=VOCABULARY, embed_dim=8, hidden_dim=12, num_heads=2, head_dim=4,
  num_kv_heads=1, final_logit_softcap=None, use_post_attn_norm=True,
  use_post_ffw_norm=True, attention_types=[gm.nn.AttentionType.GLOBAL] * 2,
)  # fmt: skip
base = gm.nn.Transformer(config=config)
# In bfloat16, gemma's default, small updates are lost.
model = gm.nn.LoRA(rank=2, model=base, dtype=jnp.float32)
tokens = jax.random.randint(jax.random.key(0), (BATCH, LENGTH), 0, VOCABULARY)
frozen, params = peft.split_params(
  model.init(jax.random.key(1), tokens)['params']
)
print(lora.describe_pairs(params))
constants = {'l2_clip_norm': 1.0, 'expected_batch_size': BATCH}
tx = prism_optax.prism(1e-2, noise_multiplier=0.5, **constants)


def loss(params, frozen, tokens):
  variables = {'params': peft.merge_params(frozen, params)}
  logits = model.apply(variables, tokens[None]).logits[0, :-1]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, tokens[1:]
  ).mean()


per_example = jax.jit(jax.vmap(jax.grad(loss), (None, None, 0)))
grads = per_example(params, frozen, tokens)
updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
params = optax.apply_updates(params, updates)
