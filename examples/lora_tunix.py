"""Private LoRA in Tunix's `PeftTrainer` (pip install google-tunix)."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.sft import peft_trainer

from prism_optax import lora, prism, training


class PrivatePeftTrainer(peft_trainer.PeftTrainer):
  """A trainer whose optimizer's state is the whole private run.

  ``train`` takes the records, not batches of them. Checkpoints have the
  parameters in ``model_params``; ``optimizer_state`` is as secret as the data.
  """

  def __init__(self, model, private, config, **options):
    if config.gradient_accumulation_steps is not None:
      raise ValueError('Use training.Execution(microbatch_size=...) instead.')
    self.private = private
    holder = optax.GradientTransformation(self._start, self._refuse)
    super().__init__(model, holder, config, **options)

  def _start(self, params):
    # On devices, where checkpoints of this trainer expect all of a state.
    return jax.tree.map(jnp.asarray, self.private.init(params))

  def _refuse(self, updates, state, params=None):
    raise ValueError('Gradients are clipped and noised in private.step.')

  @property
  def state(self):
    return nnx.as_pure(self.optimizer.opt_state)

  def train(self, records, eval_ds=None):
    batches = self.private.batches(self.state, records)
    done = range(self.iter_steps)  # The loop passes over so many items.
    super().train(itertools.chain(done, batches), eval_ds, skip_jit=True)

  def jit_train_and_eval_step(self, skip_jit=False, cache_nnx_graph=False):
    _, evaluate = super().jit_train_and_eval_step(False, cache_nnx_graph)
    return self._private_step, evaluate  # `private.step` is jitted.

  def _private_step(self, batch):
    _, _, frozen = nnx.split(self.model, nnx.LoRAParam, ...)
    state = self.private.step(self.state, batch, frozen)
    on_devices = jax.tree.map(jnp.asarray, state)
    nnx.update(self.optimizer.opt_state, nnx.state(on_devices))
    nnx.update(self.model, state.params)
    untold = jnp.full((), jnp.nan)  # Loss and norm are not for logs.
    return untold, None, untold


def main(steps=4, **options):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(400, 8)).astype(np.float32)  # 400 private records.
  model = nnx.LoRALinear(8, 4, lora_rank=2, rngs=nnx.Rngs(0))
  graph, params, _ = nnx.split(model, nnx.LoRAParam, ...)
  print(lora.describe_pairs(params))

  def loss(params, frozen, x):
    return jnp.mean((nnx.merge(graph, params, frozen)(x) - x[:4]) ** 2)

  private = training.make_private(
    loss, params, optimizer=partial(prism, 1e-2), l2_clip_norm=1.0,
    noise_multiplier=1.0, expected_batch_size=32, dataset_size=len(x),
    steps=4, delta=1e-4, prng_key=options.pop('prng_key', None),
  )  # fmt: skip
  config = peft_trainer.TrainingConfig(
    eval_every_n_steps=2, max_steps=steps, **options
  )
  trainer = PrivatePeftTrainer(model, private, config)
  trainer.with_loss_fn(lambda model, x: jnp.mean((model(x) - x[:, :4]) ** 2))
  trainer.with_gen_model_input_fn(lambda x: {'x': x})
  trainer.train(x, eval_ds=[x[:8]])  # Of public records.
  print(private.statement(trainer.state))
  return trainer


if __name__ == '__main__':
  main()
