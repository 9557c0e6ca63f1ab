"""What XLA compiles for accelerators, ahead of time and without any.

    pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt libtpu
    python -m benchmarks.speed.lowered [--only h200 ...]

One update, of noise and AdamW and of ``prism``, for an NVIDIA H200, for a chip
of a TPU v5e and for the CPU: kernels that a step launches, branches decided on
the way, calls of a solver (SVD, eigenvalues), loops, temporary memory, and how
long it takes to compile. Counted is the path of ordinary inputs, see
``benchmarks/common/hlo.py``. It says nothing of seconds: kernels differ. The
modules are 24 of 384 x 384 at rank 8, 60 large ones at rank 16, and 180 with
the shapes of Gemma 3 4B at rank 16, as leaves of their own and stacked. Rows go
to ``benchmarks/results/lowered.json`` as they are finished; a minute each.
"""

import collections
import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any

# None is there: neither is looked for.
os.environ |= {'CUDA_VISIBLE_DEVICES': '-1', 'TPU_SKIP_MDS_QUERY': '1'}
os.environ |= {'JAX_PLATFORMS': 'cpu'}

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.common import hlo, runner
from benchmarks.speed import update_time

# Of an H200, as XLA describes a device: from NVIDIA's data sheet and the
# properties of its architecture (compute capability 9.0).
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  memory_bandwidth: 4800000000000
  device_memory_size: 151397597184
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 }
device_description_str: "NVIDIA H200"
"""
_WIDTH, _HIDDEN, _QUERIES, _KEYS = 2560, 10240, 2048, 1024
# (outputs, inputs) of query, key, value, output, up and down, thirty times.
GEMMA = [
  (_QUERIES, _WIDTH), (_KEYS, _WIDTH), (_KEYS, _WIDTH), (_WIDTH, _QUERIES),
  (_HIDDEN, _WIDTH), (_WIDTH, _HIDDEN),
] * 30  # fmt: skip
Shapes = Sequence[tuple[int, int]]
WORKLOADS: dict[str, tuple[Shapes, int, bool]] = {
  'small': (*update_time.WORKLOADS['small'][:2], False),
  'large': (*update_time.WORKLOADS['large'][:2], False),
  'gemma': (GEMMA, 16, False),
  'gemma, stacked': (GEMMA, 16, True),
}


def device(target: str) -> Any:
  """One device of a kind, to compile for."""
  if target == 'cpu':
    return jax.devices()[0]
  if target == 'tpu':
    topology = topologies.get_topology_desc(
      platform='tpu', topology_name='v5e:2x2', chips_per_host_bounds=(2, 2, 1)
    )
  else:
    topology = topologies.get_topology_desc(
      platform='cuda', topology='1x1x1', target_config=H200
    )
  return topology.devices[0]


def shapes_of(shapes: Shapes, rank: int, stacked: bool) -> Any:
  """A tree of factors, as shapes; modules of one shape stacked, or not."""
  counts = collections.Counter(shapes) if stacked else None
  groups = (
    [((), shape) for shape in shapes]
    if counts is None
    else [((count,), shape) for shape, count in counts.items()]
  )
  return {
    f'm{i}': {
      'lora_a': jax.ShapeDtypeStruct((*lead, inputs, rank), jnp.float32),
      'lora_b': jax.ShapeDtypeStruct((*lead, rank, outputs), jnp.float32),
    }
    for i, (lead, (outputs, inputs)) in enumerate(groups)
  }


METHODS = {
  'noise + adamw': update_time.noisy_adamw,
  'prism': lambda: update_time.prism(prng_key=jax.random.key(0)),
}


def measure(target: str, modules: str, method: str) -> dict[str, Any]:
  """One row."""
  params = shapes_of(*WORKLOADS[modules])
  tx = METHODS[method]()

  def step(carried, grads):
    params, state = carried
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  mesh = jax.sharding.Mesh([device(target)], ('x',))
  sharding = NamedSharding(mesh, PartitionSpec())
  (carried, grads) = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
    ((params, jax.eval_shape(tx.init, params)), params),
  )
  lowered = jax.jit(step, donate_argnums=0).lower(carried, grads)
  start = time.perf_counter()
  compiled = lowered.compile()
  seconds = time.perf_counter() - start
  temporary = compiled.memory_analysis().temp_size_in_bytes
  return {
    **dataclasses.asdict(hlo.cost(compiled.as_text())),
    'temporary megabytes': temporary / 2**20,
    'compile seconds': seconds,
  }


if __name__ == '__main__':
  runner.main(
    __doc__,
    'lowered',
    [
      {'target': target, 'modules': modules, 'method': method}
      for target in ('cpu', 'h200', 'tpu')
      for modules in WORKLOADS
      for method in METHODS
    ],
    measure,
    by_device=False,
  )
