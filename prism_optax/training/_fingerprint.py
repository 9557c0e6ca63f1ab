"""What a run is of: settings, environment, program and data, as digests.

The noise of a step depends on all four. So a key that is kept, copied or given
again is added to one sum only: where the sum would be another, the noise is.
Digests say whether two things are the same, and nothing else.
"""

import functools
import hashlib
import json
import os
import platform
import re
import weakref
from collections.abc import Iterable
from importlib import metadata
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.extend import core

from prism_optax._proofs._equations import Program
from prism_optax._randomness import _generators
from prism_optax._types import ArrayTree
from prism_optax.training._records import Records

# With one of these a GPU adds in the same order in each process.
_DETERMINISTIC = (
  '--xla_gpu_deterministic_ops',
  '--xla_gpu_exclude_nondeterministic_ops',
)
_PROCESSOR = ('model name', 'flags', 'Features', 'CPU part')
# Parameters of primitives that change no number.
_NAMES = {'name', 'debug_info', 'debug'}


class Fingerprint(NamedTuple):
  """What a state belongs to; (8,) uint32 each, zeros where not known yet.

  Attributes:
    settings: What the guarantee depends on: sampling, clip, noise, steps,
      delta, shapes of the parameters.
    environment: What rounds numbers its own way: backend, devices, layout of
      the batches, versions.
    program: Gradients, clip and optimizer, with the frozen weights. Known from
      the first step on.
    data: The records. Known from the first step on.
  """

  settings: np.ndarray
  environment: np.ndarray
  program: np.ndarray
  data: np.ndarray


UNKNOWN = np.zeros(8, np.uint32)


def words(*parts: bytes | str) -> np.ndarray:
  """A digest of some parts, (8,) uint32."""
  digest = hashlib.blake2b(digest_size=32)
  for part in parts:
    data = part.encode() if isinstance(part, str) else part
    digest.update(len(data).to_bytes(8, 'little') + data)
  return np.frombuffer(digest.digest(), np.uint32).copy()


def agreed(digest: np.ndarray) -> np.ndarray:
  """The digest of the first process, in all that train together.

  Noise that differed between the copies of one release would make several
  releases of it.
  """
  return np.asarray(multihost_utils.broadcast_one_to_all(digest), digest.dtype)


def release(
  fingerprint: Fingerprint, rows: np.ndarray, attempt: int
) -> np.ndarray:
  """What the noise of a step depends on besides its key and parameters.

  Args:
    fingerprint: Of the run.
    rows: A digest of the batch. The fingerprint has one of the data, but data
      may be edited after it was taken, and where it did not look.
    attempt: Number of the release of this step.
  """
  return words(*(x.tobytes() for x in (*fingerprint, rows)), str(attempt))


def differing(found: Fingerprint, wanted: Fingerprint) -> list[str]:
  """Names of parts that are known on both sides and are not the same."""
  return [
    name
    for name, x, y in zip(Fingerprint._fields, found, wanted, strict=True)
    if np.any(x) and np.any(y) and not np.array_equal(x, y)
  ]


def environment(sharding: jax.sharding.Sharding | None, nonce: str) -> str:
  """All that we can name that may round a gradient in another way.

  Args:
    sharding: Layout of the batches.
    nonce: Of the training, another one in each process.

  Returns:
    JSON, the same in every process on this machine. On a GPU kernels may be
    chosen anew by each process and add in an order of their own, so that the
    nonce is part of it, unless ``--xla_gpu_deterministic_ops=true`` is set.
  """
  client = jax.extend.backend.get_backend()
  found: dict[str, object] = {
    'backend': jax.default_backend(),
    'backend_version': client.platform_version,
    'devices': sorted(d.device_kind for d in jax.devices()),
    'processes': jax.process_count(),
    'sharding': _without_addresses(str(sharding)),
    'versions': [*map(_version, ('jax', 'jaxlib', 'prism_optax'))],
    'flags': [os.environ.get(x) for x in ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')],
  }
  if found['backend'] == 'gpu' and not any(
    f'{flag}=true' in os.environ.get('XLA_FLAGS', '') for flag in _DETERMINISTIC
  ):
    found['process'] = nonce
  if found['backend'] == 'cpu':  # Kernels are made for it, and split by cores.
    found['machine'] = [platform.machine(), _processor(), _cores()]
  return json.dumps(found)


def _version(package: str) -> str:
  try:
    return metadata.version(package)
  except metadata.PackageNotFoundError:  # On the path without installation.
    return 'unknown'


def _cores() -> int | None:
  """As many as XLA has threads."""
  if hasattr(os, 'sched_getaffinity'):  # Not on macOS and Windows.
    return len(os.sched_getaffinity(0))
  return os.cpu_count()


def _processor() -> str:
  """Model and instruction sets, where the system says them."""
  try:
    with open('/proc/cpuinfo', encoding='utf-8', errors='replace') as file:
      lines = {x.strip() for x in file if x.startswith(_PROCESSOR)}
  except OSError:
    return platform.processor()
  return '\n'.join(sorted(lines))


def program(traced: Program) -> bytes:
  """A digest of a program, the same in every process.

  It covers every equation, every constant by its value (learning rates, decays,
  arrays that a loss closes over) and the shapes and types of arguments. Names
  of functions and variables, and lines of source, do not count; neither does
  what a callback to Python does.

  Args:
    traced: A ``ClosedJaxpr``.
  """
  return _of_jaxpr(traced, {})


# The digests of jaxprs by their ids, beside the jaxprs.
Known: TypeAlias = dict[int, tuple[Program, bytes]]


def _of_jaxpr(jaxpr: Program, known: Known) -> bytes:
  if id(jaxpr) in known:
    return known[id(jaxpr)][1]
  consts = getattr(jaxpr, 'consts', ())
  inner = getattr(jaxpr, 'jaxpr', jaxpr)
  names: dict[core.Var, str] = {}

  def atom(x: core.Var | core.Literal) -> str:
    if isinstance(x, core.Literal):
      return f'{_of_type(x.aval)}={_of_value(x.val, known)}'
    if x not in names:
      names[x] = f'{len(names)}:{_of_type(x.aval)}'
    return names[x]

  def atoms(xs: Iterable[core.Var | core.Literal]) -> str:
    return ' '.join(map(atom, xs))

  digest = hashlib.blake2b(digest_size=32)

  def write(*parts: str) -> None:
    digest.update('\t'.join(parts).encode() + b'\n')

  write(atoms(inner.constvars), *(_of_value(x, known) for x in consts))
  write(atoms(inner.invars))
  for equation in inner.eqns:
    params = {k: v for k, v in equation.params.items() if k not in _NAMES}
    write(
      equation.primitive.name,
      _of_value(params, known),
      atoms(equation.invars),
      atoms(equation.outvars),
    )
  write(atoms(inner.outvars))
  found = digest.digest()
  known[id(jaxpr)] = jaxpr, found  # The object, so that its id stays its own.
  return found


# A program has thousands of values and few types, which are slow to write.
_of_type = functools.lru_cache(str)


def _of_value(x: Any, known: Known) -> str:
  """A parameter of a primitive, or a constant, without any address."""
  if hasattr(x, 'eqns') or hasattr(x, 'jaxpr'):
    return _of_jaxpr(x, known).hex()
  if isinstance(x, jax.Array | np.ndarray | np.generic):
    return _of_array(x)
  if isinstance(x, dict):
    pairs = sorted((str(k), _of_value(v, known)) for k, v in x.items())
    return repr(pairs)
  if isinstance(x, tuple | list):
    return f'({",".join(_of_value(y, known) for y in x)})'
  if isinstance(x, set | frozenset):
    return repr(sorted(_of_value(y, known) for y in x))
  # A rule of derivatives of JAX has its function inside, and cannot be called.
  if (callable(x) or hasattr(x, 'call_wrapped')) and not isinstance(x, type):
    return 'function'  # What it computes is in the equations.
  return _without_addresses(repr(x))


def _of_array(x: jax.Array | np.ndarray | np.generic) -> str:
  if isinstance(x, jax.Array) and (
    jnp.issubdtype(x.dtype, jax.dtypes.prng_key) or not x.is_fully_addressable
  ):
    values = np.asarray(of_arrays([x])).tobytes()
  else:
    values = np.ascontiguousarray(x).tobytes()
  digest = hashlib.blake2b(values, digest_size=32).hexdigest()
  return f'{x.dtype}{x.shape}{digest}'


def _without_addresses(text: str) -> str:
  return re.sub(r'0x[0-9a-fA-F]+', '0x', text)


class FrozenWeights:
  """A digest of arrays that are given again and again, taken once."""

  def __init__(self) -> None:
    self._last: tuple[list[weakref.ref[jax.Array]], bytes] | None = None

  def digest(self, tree: ArrayTree) -> bytes:
    leaves: list[ArrayTree] = jax.tree.leaves(tree)
    if self._last is not None and len(leaves) == len(self._last[0]):
      pairs = zip(leaves, self._last[0], strict=True)
      if all(x is reference() for x, reference in pairs):
        return self._last[1]
    values = np.asarray(of_arrays(tree)).tobytes()
    found = words(values, repr([_layout(x) for x in leaves])).tobytes()
    # Arrays of JAX do not change; all else may have been written to.
    if all(isinstance(x, jax.Array) for x in leaves):
      self._last = [weakref.ref(x) for x in leaves], found
    else:
      self._last = None
    return found


def _layout(x: object) -> tuple[object, ...]:
  """Into how many parts an array is cut, however its sharding is written."""
  if not isinstance(x, jax.Array):
    return ()
  return len(x.sharding.device_set), x.sharding.shard_shape(x.shape)


def of_arrays(tree: ArrayTree) -> jax.Array:
  """A digest of the bits of a tree of arrays, (8,) uint32; may be traced.

  Sums modulo 2^32 of a mix of each word with its place: the same on any device
  and under any sharding, and no array is moved. It tells apart what differs by
  accident (four sums of 32 bits); against somebody who makes collisions on
  purpose it would not hold.
  """
  digest: jax.Array = _joined([_sums(x) for x in jax.tree.leaves(tree)])
  return digest


# Odd, so that a product modulo 2^32 loses no bit.
_ODD = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], np.uint32)


@jax.jit  # A model has hundreds of arrays and few shapes.
def _sums(array: jax.Array) -> jax.Array:
  """The four sums of an array."""
  bits = _bits(jnp.asarray(array))
  place = _mixed(_generators.positions(bits.shape) + jnp.uint32(1))
  # All at once, because a program for each takes longer to compile.
  mixed = _mixed(bits * _ODD.reshape(4, *[1] * bits.ndim) ^ place)
  return jnp.sum(mixed, range(1, mixed.ndim), dtype=jnp.uint32)


@jax.jit
def _joined(sums: list[jax.Array]) -> jax.Array:
  """The digest of arrays with these sums: a polynomial of them, mixed."""
  places = range(len(sums))[::-1]
  powers = np.array([pow(0x01000193, i, 2**32) for i in places], np.uint32)
  words = jnp.concatenate([jnp.zeros(0, jnp.uint32), *sums]).reshape(-1, 4)
  total = jnp.sum(words * powers[:, None], 0, dtype=jnp.uint32)
  return jnp.concatenate([total, _mixed(total + jnp.uint32(1))])


def _mixed(x: jax.Array) -> jax.Array:
  """MurmurHash3's last step: each bit that comes out depends on all of them."""
  for shift, odd in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(odd)
  out: jax.Array = x ^ (x >> jnp.uint32(16))
  return out


def _bits(x: jax.Array) -> jax.Array:
  """The array as words of 32 bits."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag])
  if not jnp.issubdtype(x.dtype, jnp.floating):
    if x.dtype.itemsize > 4:
      return jax.lax.bitcast_convert_type(x, jnp.uint32)
    return x.astype(jnp.uint32)  # Narrow integers and bool.
  kinds = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint32}
  size = jnp.finfo(x.dtype).bits
  if size not in kinds:
    x, size = x.astype(jnp.float32), 32
  return jax.lax.bitcast_convert_type(x, kinds[size]).astype(jnp.uint32)


# Records of a source that are looked at.
PLACES = 256
_BLOCK = 1024  # Records that are read at once.
# Tells the choice of places from the batches, which have the step here.
_SPAWN_KEY = tuple(b'DIGEST')


def data_digest(records: Records, seed: np.ndarray) -> np.ndarray:
  """A digest of the records, and of who they belong to, under a secret seed.

  Nobody without the seed learns anything from it (keyed BLAKE2b). Records are
  read as batches read them, in their declared form: what does not fit is one
  constant, and no record raises, warns, or takes more than its form.

  ==============================  =============================================
  arrays                          every record counts, in one pass
  another source                  ``PLACES`` = 256 records at places chosen by
                                  the seed. A change of k of N records passes
                                  unseen with the probability
                                  ``(1 - k / N)^256``: 8 % for one in a hundred,
                                  and nearly 1 for a single record of many
  users                           which records belong together, and in which
                                  order; not what the ids are
  ==============================  =============================================

  Args:
    records: The data of a run.
    seed: Words of 32 bits, secret.

  Returns:
    (8,) uint32.
  """
  seed = np.ascontiguousarray(seed, np.uint32)
  digest = hashlib.blake2b(key=seed.tobytes(), digest_size=32)
  digest.update(f'{records.size} records of {records.form}'.encode())
  places = np.arange(records.size)
  if records.is_source and records.size > PLACES:
    rng = np.random.default_rng(
      np.random.SeedSequence(seed.tolist(), spawn_key=_SPAWN_KEY)
    )
    places = rng.choice(records.size, PLACES, replace=False)
  for part in np.array_split(places, len(places) // _BLOCK + 1):
    examples, fits = records.at(part)
    for x in (*jax.tree.leaves(examples), fits):
      digest.update(np.ascontiguousarray(x).tobytes())
  for own in records.of_user or ():
    digest.update(f'{len(own)} records of a user'.encode() + own.tobytes())
  return np.frombuffer(digest.digest(), np.uint32).copy()
