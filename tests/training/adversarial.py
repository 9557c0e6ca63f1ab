"""Records that are made to break a training, for any declaration of a record.

:func:`records` has about 200 of them: wrong types, lengths and structures, NaN,
infinities, denormal and huge numbers, text, None, labels that are none,
duplicates, objects that lie, and errors that are raised while they are read.
Put them into a :class:`Source`, which raises what is an exception. Those of
:func:`in_form` have the declared structure, shapes and types, so that they can
stand in arrays too.
"""

import array
import collections
import contextlib
import datetime
import decimal
import enum
import fractions
import uuid
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np


class Odd(NamedTuple):
  """One record.

  Attributes:
    name: Says what is odd; no two have the same.
    record: The record. If it is an exception, reading it raises that.
  """

  name: str
  record: Any


class Source(Sequence):
  """A source of records that raises those that are exceptions."""

  def __init__(self, records):
    self._records = list(records)
    self.read = []  # Positions, in the order of reading.

  def __len__(self):
    return len(self._records)

  def __getitem__(self, place):
    self.read.append(place)
    record = self._records[place]
    if isinstance(record, BaseException):
      raise record
    return record


def records(form):
  """All of them.

  Args:
    form: Of one record: a tree of tuples, lists and dicts of
      ``jax.ShapeDtypeStruct``, or one of these.
  """
  found = [*in_form(form), *_of_leaves(form), *_of_structure(form)]
  found += [Odd(f'reading raises {i}', x) for i, x in enumerate(_ERRORS)]
  assert len({x.name for x in found}) == len(found)
  return found


def ordinary(form, seed=0):
  """A record of the form: normal numbers, and whole ones of 0 and 1."""
  rng = np.random.default_rng(seed)

  def made(x):
    whole = jnp.issubdtype(x.dtype, jnp.integer) or x.dtype == bool
    numbers = rng.integers(0, 2, x.shape) if whole else rng.normal(size=x.shape)
    return np.asarray(numbers).astype(x.dtype)

  return jax.tree.map(made, form)


def in_form(form):
  """Those that have the declared structure, shapes and types."""
  base = ordinary(form)
  leaves, treedef = jax.tree.flatten(base)
  thousand = [
    x * x.dtype.type(1000) if jnp.issubdtype(x.dtype, jnp.inexact) else x
    for x in leaves
  ]
  out = [
    Odd('ordinary', base),
    Odd('a duplicate', ordinary(form)),
    Odd('zeros', jax.tree.map(np.zeros_like, base)),
    Odd('a thousand times', jax.tree.unflatten(treedef, thousand)),
  ]
  for i, leaf in enumerate(leaves):
    for value in _values(leaf.dtype):
      full = np.full(leaf.shape, value).astype(leaf.dtype)
      made = {'all': full}
      if leaf.size > 1:
        made['one'] = leaf.copy()
        made['one'].reshape(-1)[0] = full.reshape(-1)[0]
      for many, x in made.items():
        whole = jax.tree.unflatten(treedef, [*leaves[:i], x, *leaves[i + 1 :]])
        out.append(Odd(f'leaf {i}, {leaf.dtype}, {many} of {value}', whole))
  return out


def _values(dtype):
  """Numbers of this type that break something."""
  if dtype.kind == 'b':
    return [False, True]
  if jnp.issubdtype(dtype, jnp.integer):
    low, high = (int(getattr(jnp.iinfo(dtype), x)) for x in ('min', 'max'))
    wanted = {0, 1, -1, -100, 127, 128, 255, 1000, 2**31 - 1, low, high}
    return sorted(x for x in wanted if low <= x <= high)
  info = jnp.finfo(dtype)
  bounds = [info.smallest_subnormal, info.tiny, info.max, info.min]
  root = float(info.max) ** 0.5  # Its square is at the end of the range.
  return [np.nan, np.inf, -np.inf, -0.0, *map(float, bounds), root]


class _Lies:
  """Has a shape and a type, warns, and hands out what it was given."""

  def __init__(self, given, shape=(), dtype=float):
    self._given, self.shape, self.dtype = given, shape, dtype

  def __array__(self, *args, **options):
    warnings.warn('private', stacklevel=1)
    if isinstance(self._given, BaseException):
      raise self._given
    return self if self._given is None else self._given


class NoAttributes:
  """Fails at every attribute."""

  def __getattribute__(self, name):
    raise RuntimeError(name)


class _Longer:
  """A sequence that says it is short."""

  def __len__(self):
    return 3

  def __getitem__(self, place):
    if place > 9:
      raise IndexError(place)
    return 1.0


class _Negative(list):
  def __len__(self):
    return self[0]


class _Number(enum.IntEnum):
  ONE = 1


class _Text(str):
  __slots__ = ()


class _Sub(np.ndarray):
  """An array that refuses to be computed with."""

  __array_ufunc__ = None

  def __array_finalize__(self, obj):
    pass

  def __getitem__(self, place):
    raise RuntimeError('no entry')


class _Raises(collections.abc.Mapping):
  """A mapping that has all keys, and no value."""

  def __init__(self, keys):
    self._keys = list(keys)

  def __getitem__(self, key):
    raise KeyError('private')

  def __iter__(self):
    return iter(self._keys)

  def __len__(self):
    return len(self._keys)


def _deleted():
  x = jnp.zeros(3)
  x.delete()
  return x


def _circle():
  x = [1.0]
  x.append(x)
  return x


def _nested(depth):
  return [_nested(depth - 1)] if depth else []


def _strangers():
  """In place of a leaf, whatever its form. Some fit some forms."""
  return [
    # The first four are tried in the last leaf, too.
    None, 'text', 10**400, [[1.0], [1.0, 2.0]],
    # Texts and bytes.
    '', '5', 'x' * 100_000, '\ud800', _Text('a'), b'\x00\xff', bytearray(3),
    memoryview(b'abc'), array.array('d', [1.0, 2.0]), np.void(b'abcd'),
    # Numbers.
    True, 3, -1, 2**31, 2**63, 2**64, -(2**63) - 1, _Number.ONE, 3.5,
    float('nan'), float('-inf'), 1e300, 1 + 2j, decimal.Decimal('1.5'),
    fractions.Fraction(1, 3), datetime.date(2020, 1, 1), uuid.UUID(int=5),
    np.datetime64('2020-01-01'), np.timedelta64(3, 's'), np.ma.masked,
    # Collections.
    (), [], {}, {1, 2}, {'x': 1}, (x for x in range(3)), range(3), slice(3),
    [1.0, None], ['1', 2], ['1', '2'], [1.0, np.ma.masked], [10**400, 1],
    [2**63, -1], _circle(), _nested(100), _Negative([-1]), _Longer(),
    # Objects.
    ..., NotImplemented, len, int, object(), jax.random.key(0), _deleted(),
    jax.ShapeDtypeStruct((3,), np.float32), NoAttributes(),
    # Arrays.
    np.zeros((), [('a', 'f4')]), np.array([[1.0, 2.0]]).view(np.matrix),
    np.broadcast_to(np.float32(1), (1 << 20, 1 << 20)),
    _Lies(ValueError('private')), _Lies(RecursionError('private')),
    _Lies(None), _Lies(np.array(['a', 'b'])), _Lies([1.0, 2.0]),
  ]  # fmt: skip


def _changed(leaf):
  """A leaf of another type or shape, with the same numbers where it can."""
  out = []
  for dtype in (
    *('bool', 'int8', 'uint8', 'int32', 'int64', 'uint64', 'float16'),
    *('float32', 'float64', 'longdouble', 'complex64', 'object', 'U', 'S'),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4),
  ):
    with np.errstate(all='ignore'), contextlib.suppress(TypeError):
      out.append(leaf.astype(dtype))
  read_only = leaf.copy()
  read_only.flags.writeable = False
  out += [
    np.full(leaf.shape, 10**9, np.int32), np.full(leaf.shape, 0.5),
    np.full(leaf.shape, -1), leaf.astype(np.float64).astype('>f8'),
    leaf.tolist(), jnp.asarray(leaf), leaf.view(_Sub), np.ma.array(leaf),
    np.ma.array(leaf, mask=True), read_only, leaf[None], leaf[..., None],
    np.append(leaf, leaf), leaf.reshape(-1)[:0],
    _Lies(np.zeros(7), leaf.shape, leaf.dtype), _Lies(leaf, (7,), np.int8),
  ]  # fmt: skip
  if leaf.ndim:
    longer = np.concatenate([leaf, leaf[:1]])
    listed = [*leaf.tolist(), leaf[0].tolist()]
    out += [longer, leaf[:-1], listed, leaf.T, leaf[::-1]]
  return out


def _of_leaves(form):
  """Records one of whose leaves is another, the first or the last."""
  leaves, treedef = jax.tree.flatten(ordinary(form))
  last = len(leaves) - 1
  for i in sorted({0, last}):
    for kind, others in (
      ('another', _changed(leaves[i])),
      ('a stranger', _strangers()[: 4 if i else None]),
    ):
      for number, x in enumerate(others):
        whole = jax.tree.unflatten(treedef, [*leaves[:i], x, *leaves[i + 1 :]])
        yield Odd(f'leaf {i} is {kind}, {type(x).__name__} {number}', whole)


def _of_structure(form):
  """Records of another structure."""
  base = ordinary(form)
  leaves = jax.tree.leaves(base)
  named = collections.namedtuple('Named', [f'x{i}' for i in range(len(leaves))])
  others = [
    'text', None, 5, (), [], {}, object(), _Lies(ValueError('private')),
    NoAttributes(), leaves, tuple(leaves), dict(enumerate(leaves)), leaves[0],
    (base,), [base], {'record': base}, (*leaves, leaves[0]),
    tuple(leaves[:-1]), tuple(leaves[::-1]), named(*leaves),
    {1: leaves[0], 'a': leaves[0]}, _Raises('xy'),
    jax.tree.map(lambda x: x.tolist(), base), jax.tree.map(jnp.asarray, base),
  ]  # fmt: skip
  if isinstance(base, dict):
    key = next(iter(base))
    rest = {k: x for k, x in base.items() if k != key}
    others += [
      base | {'more': leaves[0]}, rest, rest | {f'{key}x': base[key]},
      dict(reversed(base.items())), collections.OrderedDict(base),
      collections.defaultdict(int, rest), _Raises(base),
    ]  # fmt: skip
  for i, x in enumerate(others):
    yield Odd(f'record is {type(x).__name__} {i}', x)


# Of a source about one of its records, which is not read.
_ERRORS = [
  *(
    kind('private')
    for kind in (
      *(ValueError, TypeError, KeyError, IndexError, AttributeError),
      *(ZeroDivisionError, AssertionError, StopIteration, RecursionError),
      *(MemoryError, NotImplementedError, UserWarning),
    )
  ),
  UnicodeDecodeError('utf-8', b'\xff', 0, 1, 'private'),
  OSError('image file is truncated'),
  FileNotFoundError(2, 'private'),
  ExceptionGroup('private', [ValueError('private')]),
]
