"""What a run is of, as digests: of arrays, programs and the environment."""

import builtins
import importlib.metadata
import io
import json
import os
import platform

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

from prism_optax.training import _fingerprint

WHOLE = jax.sharding.PartitionSpec()


def program(function, *arguments):
  return _fingerprint.program(jax.make_jaxpr(function)(*arguments))


def test_a_program_is_known_by_what_it_computes():
  x = np.ones((3, 2), np.float32)
  table = np.arange(6.0, dtype=np.float32).reshape(3, 2)

  def make(rate=0.1, table=table, steps=3):
    @jax.custom_vjp
    def inner(z):
      return jnp.sum(z * table) * rate

    inner.defvjp(lambda z: (inner(z), z), lambda z, g: (g * z * rate,))

    def whole(z):
      def body(carry, _):
        return carry + jax.nn.relu(inner(carry)), None

      return jax.lax.scan(jax.checkpoint(body), z, None, length=steps)[0]

    return lambda z: jax.jit(jax.grad(lambda y: whole(y).sum()))(z)

  def one(z):
    return 2 * z

  def renamed(z):
    return 2 * z

  def with_rule(back):
    function = jax.custom_vjp(lambda z: 3 * z)
    function.defvjp(lambda z: (3 * z, None), back)
    return function

  for of in (jax.jit, with_rule):
    assert program(of(one), x) == program(of(renamed), x)
  same = program(make(), x)
  assert program(make(table=jnp.asarray(table)), x) == same
  others = [
    program(make(rate=0.2), x),
    program(make(table=table + 1), x),
    program(make(steps=4), x),
    program(make(table=table.astype(np.float16)), x.astype(np.float16)),
  ]
  for seed in (0, 1):
    key = jax.random.key(seed)
    others.append(program(lambda z, key=key: z * jax.random.uniform(key), x))
  # A number that is in a parameter alone, and a word.
  others += [program(lambda z, i=i: z[i : i + 1], x) for i in (1, 2)]
  for word in ('highest', 'default'):
    others.append(program(lambda z, p=word: jnp.dot(z.T, z, precision=p), x))
  # The same equations, of which another one is the result.
  others += [program(lambda z, i=i: (2 * z, z + 1)[i], x) for i in (0, 1)]
  # An argument that no equation uses.
  others += [program(lambda z, _: z, x, y) for y in (x, x[0])]
  # It has sets of axes among its parameters.
  mesh = jax.make_mesh((1, 1), ('a', 'b'))
  mapped = jax.shard_map(one, mesh=mesh, in_specs=WHOLE, out_specs=WHOLE)
  assert len({same, *others, program(mapped, x)}) == 16
  # An object whose text has its address.
  marked = jax.extend.core.Primitive('marked')
  marked.def_abstract_eval(lambda x, **_: x)
  of = (program(lambda z: marked.bind(z, by=object()), x) for _ in range(2))
  assert len(set(of)) == 1
  # Of two sets that are equal one is walked in another order.
  assert _fingerprint._of_value({8, 0}, {}) == _fingerprint._of_value(
    {0, 8}, {}
  )


def test_processes_take_the_digest_of_the_first(monkeypatch):
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  monkeypatch.setattr(multihost_utils, 'broadcast_one_to_all', np.invert)
  assert not np.any(_fingerprint.agreed(~np.zeros(8, np.uint32)))


def test_a_digest_of_arrays_tells_bits_apart():
  of = jax.jit(_fingerprint.of_arrays)
  x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)
  x[0, 0] = 0.0
  flipped, moved = x.copy(), x.copy()
  flipped.view(np.uint32)[1, 2] ^= 1
  moved[[0, 1]] = moved[[1, 0]]
  signs = 1 - 2 * np.eye(12, dtype=np.float32).reshape(12, 3, 4)
  trees = [[x, 2 * x], [2 * x, x]]
  trees += [[y, 2 * x] for y in (flipped, moved, *(x * signs))]
  digests = [tuple(np.asarray(of(tree)).tolist()) for tree in trees]
  assert len(set(digests)) == len(trees)
  assert all(len(set(d)) == 8 for d in digests)
  # One word changes all of them: there is no short way to a collision.
  assert not set(digests[0]) & set(digests[2])
  # It is in saved states, which with another one would be of other data.
  assert digests[0] == (
    *(901642332, 4176500968, 3939387932, 3908676892),
    *(3670146423, 1922381763, 3929520531, 2987120647),
  )
  # MurmurHash3 of nothing with this seed, as it is published.
  assert int(_fingerprint._mixed(jnp.uint32(0xFFFFFFFF))) == 0x81F16F39


@pytest.mark.parametrize(
  'dtype', ['bool', 'int8', 'uint16', 'int4', 'bfloat16', 'float16',
            'float8_e4m3fn', 'float4_e2m1fn', 'int64', 'float64', 'complex64',
            'key<fry>']
)  # fmt: skip
def test_arrays_of_any_type_have_a_digest(dtype):
  first = {'int64': [0, 2**40], 'float64': [1, 1 + 2**-40]}.get(dtype, [0, 1])
  with jax.enable_x64('t64' in dtype):
    if dtype == 'key<fry>':
      pair = map(jax.random.key, first)
    else:
      pair = (jnp.asarray([x, 1, 0]).astype(dtype) for x in first)
    one, other = (np.asarray(_fingerprint.of_arrays([x])) for x in pair)
  assert (one.shape, one.dtype) == ((8,), np.uint32)
  assert not np.array_equal(one, other)


def test_frozen_weights_are_read_once_unless_they_may_change(monkeypatch):
  calls, digest = [], _fingerprint.of_arrays
  monkeypatch.setattr(
    _fingerprint, 'of_arrays', lambda x: calls.append(1) or digest(x)
  )
  weights = _fingerprint.FrozenWeights()
  x, y = jnp.arange(3.0), np.arange(3.0, dtype=np.float32)
  one = weights.digest([x])
  assert weights.digest([x]) == one
  assert len(calls) == 1
  assert weights.digest([x + 1]) != one
  assert weights.digest([x, x]) != weights.digest([x, x + 1])
  for tree in ([y], [x, y]):
    before = weights.digest(tree)
    y += 1
    assert weights.digest(tree) != before


def test_an_environment_that_says_little_has_a_name(monkeypatch):
  """On macOS and Windows, and where the package is not installed."""

  def fails(*_, **__):
    raise FileNotFoundError

  def not_installed(name):
    raise importlib.metadata.PackageNotFoundError(name)

  monkeypatch.delattr(os, 'sched_getaffinity', raising=False)
  monkeypatch.setattr(builtins, 'open', fails)
  monkeypatch.setattr(importlib.metadata, 'version', not_installed)
  found = json.loads(_fingerprint.environment(None, 'a'))
  assert found['versions'] == ['unknown'] * 3
  machine = [platform.machine(), platform.processor(), os.cpu_count()]
  assert found['machine'] == machine
  # Of a processor what changes from one second to the next does not count.
  lines = b'flags: avx\ncpu MHz: 7 \xff\n'

  def opened(_, **kind):
    return io.TextIOWrapper(io.BytesIO(lines), **kind)

  monkeypatch.setattr(builtins, 'open', opened)
  # The cores of this process.
  monkeypatch.setattr(os, 'sched_getaffinity', {0: 'abc'}.get, raising=False)
  found = json.loads(_fingerprint.environment(None, 'a'))
  assert found['machine'][1:] == ['flags: avx', 3]


def test_a_gpu_that_may_add_in_any_order_is_another_one_in_each_process(
  monkeypatch,
):
  """So a step that is done again there is refused, or counted by a journal."""
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  for flags, same in (('', False), ('--xla_gpu_deterministic_ops=true', True)):
    monkeypatch.setenv('XLA_FLAGS', flags)
    one, other = (_fingerprint.environment(None, x) for x in 'ab')
    assert (one == other) is same


def test_a_digest_with_a_word_of_zeros_is_known():
  one, other = (np.array([0, x], np.uint32) for x in (1, 2))
  found = _fingerprint.Fingerprint(one, one, one, other)
  wanted = found._replace(program=other, data=_fingerprint.UNKNOWN[:2])
  assert _fingerprint.differing(found, wanted) == ['program']
