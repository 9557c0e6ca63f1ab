"""Time of a whole private training step: PRISM beside the alternatives.

    python benchmarks/speed/step_time.py [--rank 8] [--batch 32] [--runs 20]

The MiniLM encoder (weights of all-MiniLM-L6-v2 where its package is installed,
otherwise random ones in the same shapes) with adapters on all dense layers and
a linear head, on random tokens. The same clip, micro-batches and data for all
methods, run in turn; ratios within a round. The clip is jax-privacy's, which
takes any number of micro-batches. The same with the clip in the chain of the
optimizer, for a batch whose gradients are held at once, which come from vmap or
from one backward pass of the batch. Non-private AdamW takes one plain
backward pass of the batch. ``--noise`` measures only PRISM's step as it is and
with sums and noise as floats, beside what is stored. Results go to
``benchmarks/results/step_time_<platform>.json``.
"""

import argparse
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'examples')]

from finetuning import sampling, training  # noqa: E402
from finetuning.models import classifier, minilm, weights  # noqa: E402

import prism_optax  # noqa: E402
from benchmarks.common import results, timing  # noqa: E402
from benchmarks.speed import clipped_step, update_time  # noqa: E402


def model(rank):
  """(graph, trainable, frozen, whether the weights are the real ones)."""
  lora = minilm.LoraConfig(rank=rank)
  rngs = nnx.Rngs(0)
  try:
    encoder, real = minilm.load(weights.find(None), lora, rngs), True
  except (ImportError, OSError, ValueError):
    encoder, real = (
      minilm.Encoder(minilm.ALL_MINILM_L6_V2, lora, rngs=rngs),
      False,
    )
  network = classifier.Classifier(
    encoder, encoder.hidden_size, 2, temperature=1.0, rngs=rngs
  )
  return *classifier.split(network), real


def private_step(name, graph, params, frozen, batch, size, microbatch):
  carried, step = clipped_step.make(
    name,
    training.make_loss(graph),
    params,
    batch=size,
    microbatch=microbatch,
    has_aux=True,
  )
  return timing.Step(step, carried, (frozen, batch))


def per_example_gradients(graph, batched):
  """``f(params, batch, frozen)``, by vmap or from one backward pass."""
  if batched:

    def losses(params, batch, frozen):
      logits = nnx.merge(graph, params, frozen)(batch.inputs)
      return optax.softmax_cross_entropy_with_integer_labels(
        logits, batch.labels
      )

    return prism_optax.lora.per_example_gradients(losses)
  loss = training.make_loss(graph)

  def one(params, example, frozen):
    return loss(params, frozen, jax.tree.map(lambda x: x[None], example))[0]

  return jax.vmap(jax.grad(one), (None, 0, None))


def chained_step(tx, graph, params, frozen, batch, batched):
  """A chain that is given the gradients of all examples at once."""
  gradients = per_example_gradients(graph, batched)

  def step(carried, fixed):
    params, state = carried
    frozen, batch = fixed
    updates, state = tx.update(gradients(params, batch, frozen), state, params)
    return optax.apply_updates(params, updates), state

  params = prism_optax.lora.canonicalize(params)
  return timing.Step(step, (params, tx.init(params)), (frozen, batch))


def chains(size):
  """PRISM with its own clip, which reads them in place, and DP-AdamW."""
  return {
    'prism': prism_optax.prism(
      1e-3,
      l2_clip_norm=1.0,
      noise_multiplier=1.0,
      expected_batch_size=size,
      prng_key=jax.random.key(0),
    ),
    'dp-adamw': optax.chain(
      optax.contrib.differentially_private_aggregate(1.0, 1.0, 0),
      optax.adamw(1e-3),
    ),
  }


def noises(size):
  """PRISM spelled out, with exact sums and noise and with those of floats."""
  rate = prism_optax.scale_by_learning_rate
  return {
    name: update_time.spelled_out(
      functools.partial(
        prism_optax.chain, prism_optax.intrinsic_clip(1.0, normalize_by=size)
      ),
      rate,
      **noise,
    )
    for name, noise in (
      ('exact', {}),
      ('floats', {'noise': update_time.float_noise}),
    )
  }


def measure_noises(args, graph, params, frozen, batch):
  """The two in turn, with gradients from vmap and from one backward pass."""
  steps = {
    f'{name}, {kind}': chained_step(tx, graph, params, frozen, batch, batched)
    for name, tx in noises(args.batch).items()
    for kind, batched in (('vmap', False), ('one backward', True))
  }
  times = timing.in_turn(steps, args.runs, progress=True)
  rows = timing.table(
    steps, times, {x: f'floats, {x}' for x in ('vmap', 'one backward')}
  )
  found = {
    'environment': results.environment(), 'rank': args.rank[0],
    'batch': args.batch, 'length': args.length, 'runs': args.runs,
    'methods': rows,
  }  # fmt: skip
  print(f'Written to {results.save("step_time_noise", found)}')


def plain_step(graph, params, frozen, batch):
  adamw = optax.adamw(1e-3)
  loss = training.make_loss(graph)

  def step(carried, fixed):
    params, state = carried
    grads = jax.grad(lambda p: loss(p, *fixed)[0])(params)
    updates, state = adamw.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return timing.Step(step, (params, adamw.init(params)), (frozen, batch))


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--rank', type=int, nargs='+', default=[8])
  parser.add_argument('--batch', type=int, default=32)
  parser.add_argument('--microbatch', type=int, default=32)
  parser.add_argument('--length', type=int, default=48)
  parser.add_argument('--runs', type=int, default=20)
  parser.add_argument(
    '--noise', action='store_true', help='only exact noise beside floats'
  )
  args = parser.parse_args()
  rng = np.random.default_rng(0)
  batch = sampling.Batch(
    jnp.asarray(rng.integers(1000, 30000, (args.batch, args.length))),
    jnp.asarray(rng.integers(0, 2, args.batch)),
  )
  if args.noise:
    graph, params, frozen, _ = model(args.rank[0])
    measure_noises(args, graph, params, frozen, batch)
    return
  found = {'environment': results.environment(), 'ranks': {}}
  for rank in args.rank:
    graph, params, frozen, real = model(rank)
    steps = {'adamw, not private': plain_step(graph, params, frozen, batch)}
    for name in ('dp-adamw', 'prism', 'dp-muon'):
      steps[name] = private_step(
        name, graph, params, frozen, batch, args.batch, args.microbatch
      )
    for name, tx in chains(args.batch).items():
      for kind, batched in (('vmap', False), ('one backward', True)):
        steps[f'{name}, clip in the chain, {kind}'] = chained_step(
          tx, graph, params, frozen, batch, batched
        )
    times = timing.in_turn(steps, args.runs, progress=True)
    print(f'\nrank {rank}, batch {args.batch}, length {args.length}')
    rows = timing.table(
      steps, times, {'dp-adamw': 'dp-adamw', 'adamw': 'adamw, not private'}
    )
    found['ranks'][rank] = {'real weights': real, 'methods': rows}
  print(f'Written to {results.save("step_time", found)}')


if __name__ == '__main__':
  main()
