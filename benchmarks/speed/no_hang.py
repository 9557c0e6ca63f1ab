"""Thousands of steps in every environment: the step cannot deadlock.

    python -m benchmarks.speed.no_hang

XLA on CPU runs independent operations on one thread pool, and LAPACK calls on
batches wait inside of it: two of them at once can wait for each other for ever.
A hang is no exception, so the steps run in processes of their own under a
timeout: with all flags of XLA that touch threads, one core and all, and several
numbers of BLAS threads. Twenty minutes on two CPU cores; prints a table, exits
with 1 if anything hung.
"""

import itertools
import os
import pathlib
import subprocess
import sys
import textwrap
import time

ROOT = pathlib.Path(__file__).parents[2]
THREADS = ('OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'MKL_NUM_THREADS')
FLAGS = (
  '',
  '--xla_cpu_multi_thread_eigen=false',
  '--xla_force_host_platform_device_count=4',
)
# Seconds without a hang: ten times what a loaded machine of two cores takes.
TIMEOUT = 1400
STEPS = 1000

PROGRAM = textwrap.dedent("""
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


def run(
  frames: str,
  steps: int,
  flags: str = '',
  threads: int | None = None,
  cores: int | None = None,
) -> subprocess.CompletedProcess:
  """Runs the steps in a process of its own.

  Args:
    frames: ``'cheap'``, or ``'align'``, which destroys orthogonal columns, so
      that every frame is a QR and an SVD.
    steps: Number of steps.
    flags: ``XLA_FLAGS``.
    threads: Number of threads of BLAS; None leaves it to the libraries.
    cores: Number of cores; None for all.

  Raises:
    subprocess.TimeoutExpired: If it hangs.
  """
  # As a user has it: no thread limits of whoever calls this.
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ('XLA_FLAGS', *THREADS)
  }
  environment |= {'PYTHONPATH': str(ROOT), 'XLA_FLAGS': flags}
  if threads is not None:
    environment |= dict.fromkeys(THREADS, str(threads))
  program = PROGRAM
  if cores is not None:
    # Before XLA counts them.
    limit = (
      f'os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:{cores}])'
    )
    program = f'import os\n{limit}\n{program}'
  return subprocess.run(
    [sys.executable, '-c', program, frames, str(steps)],
    env=environment,
    capture_output=True,
    text=True,
    check=False,
    timeout=TIMEOUT,
  )


def main() -> int:
  failed = 0
  print(
    f'{"frames":8}{"cores":>7}{"BLAS threads":>14}{"seconds":>9}  XLA_FLAGS'
  )
  for frames, cores, threads, flags in itertools.product(
    ('cheap', 'align'), (1, None), (None, 1, 8), FLAGS
  ):
    start = time.perf_counter()
    try:
      done = run(frames, STEPS, flags, threads, cores)
      right = done.returncode == 0 and done.stdout.endswith('done\n')
      said = f'{time.perf_counter() - start:.0f}' if right else 'FAILED'
    except subprocess.TimeoutExpired:
      right, said = False, 'HUNG'
    failed += not right
    print(
      f'{frames:8}{cores or "all":>7}{threads or "unset":>14}{said:>9}'
      f'  {flags}',
      flush=True,
    )
  return 1 if failed else 0


if __name__ == '__main__':
  sys.exit(main())
