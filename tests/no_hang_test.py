"""The real step cannot deadlock: thousands of times, in a process of its own.

XLA on CPU runs independent operations on one thread pool, and LAPACK calls on
batches wait inside of it: two of them at once can wait for each other for ever.
A hang is no failure that pytest could see, so the steps run under a timeout.
"""

import os
import pathlib
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parents[1]
STEPS = 5000

_PROGRAM = textwrap.dedent("""
  import sys
  import jax, jax.numpy as jnp, optax, prism_optax

  align, steps = sys.argv[1] == 'align', int(sys.argv[2])
  key = jax.random.key(0)
  # Two groups of modules, 24 of them of one shape, and a head.
  def pair(i, n, m, r):
    a = jax.random.normal(jax.random.fold_in(key, i), (n, r)) / n**0.5
    return {'lora_a': a, 'lora_b': jnp.zeros((r, m))}
  params = {f'm{i}': pair(i, 48, 48, 8) for i in range(24)}
  params |= {f'w{i}': pair(100 + i, 48, 24, 4) for i in range(4)}
  params['head'] = jnp.zeros(48)

  def loss(p, x):
    h = x
    for i in range(24):
      h = h + jnp.tanh(h) @ p[f'm{i}']['lora_a'] @ p[f'm{i}']['lora_b'] / 5
    w = sum(h @ p[f'w{i}']['lora_a'] @ p[f'w{i}']['lora_b'] for i in range(4))
    return jnp.mean((h + p['head'] - 1) ** 2) + jnp.mean((w - 1) ** 2)

  parts = [
    prism_optax.intrinsic_clip(1.0, normalize_by=4),
    prism_optax.tangent_privatizer(0.1, prng_key=1),
    prism_optax.scale_by_rank_preconditioner(noise_stddev=0.1),
    optax.scale_by_learning_rate(1e-3),
    prism_optax.retract(align=align),
  ]
  tx = optax.chain(*parts)
  state = tx.init(params)

  @jax.jit
  def step(params, state, batch):
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  batch = jax.random.normal(key, (4, 48))
  for i in range(steps):
    params, state = step(params, state, batch)
    if i % 100 == 0:
      jax.block_until_ready(params)
      print(i, flush=True)
  assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params))
  print('done', flush=True)
""")


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize('frames', ['cheap', 'align'])
def test_thousands_of_steps_finish(frames):
  """`align` destroys orthogonal columns: each frame is a QR and an SVD."""
  steps = STEPS if frames == 'cheap' else STEPS // 2
  # As a user has it: no thread limits from the environment of the tests.
  clean = {
    k: v
    for k, v in os.environ.items()
    if k not in ('XLA_FLAGS', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS')
  }
  done = subprocess.run(
    [sys.executable, '-c', _PROGRAM, frames, str(steps)],
    env={**clean, 'PYTHONPATH': str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
    timeout=1400,
  )
  assert done.returncode == 0, done.stderr[-2000:]
  assert done.stdout.splitlines()[-1] == 'done'
