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
import itertools
import uuid
from collections.abc import Iterator, Sequence
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

  def __init__(self, records: Sequence[Any]) -> None:
    self._records = list(records)
    self.read: list[int] = []  # Positions, in the order of reading.

  def __len__(self) -> int:
    return len(self._records)

  def __getitem__(self, place: Any) -> Any:
    self.read.append(place)
    record = self._records[place]
    if isinstance(record, BaseException):
      raise record
    return record


def records(form: Any) -> list[Odd]:
  """All of them.

  Args:
    form: Of one record: a tree of tuples, lists and dicts of
      ``jax.ShapeDtypeStruct``, or one of these.
  """
  found = [*in_form(form), *_of_leaves(form), *_of_structure(form), *_errors()]
  names = [x.name for x in found]
  assert len(set(names)) == len(names)
  return found


def ordinary(form: Any, seed: int = 0) -> Any:
  """A record of the form: normal numbers, and whole ones of 0 and 1."""
  rng = np.random.default_rng(seed)

  def made(x: Any) -> np.ndarray:
    whole = _is(x, jnp.integer) or x.dtype == bool
    numbers = rng.integers(0, 2, x.shape) if whole else rng.normal(size=x.shape)
    return np.asarray(numbers).astype(x.dtype)

  return jax.tree.map(made, form)


def in_form(form: Any) -> list[Odd]:
  """Those that have the declared structure, shapes and types."""
  base = ordinary(form)
  out = [
    Odd('ordinary', base),
    Odd('a duplicate', ordinary(form)),
    Odd('zeros', jax.tree.map(np.zeros_like, base)),
    Odd('a thousand times', jax.tree.map(_times_a_thousand, base)),
  ]
  leaves, treedef = jax.tree.flatten(base)
  for i, leaf in enumerate(leaves):
    for value in _values(leaf.dtype):
      full = np.full(leaf.shape, value).astype(leaf.dtype)
      made = [(f'all of {value}', full)]
      if leaf.size > 1:
        one = leaf.copy()
        one.reshape(-1)[0] = full.reshape(-1)[0]
        made.append((f'one of {value}', one))
      for name, x in made:
        whole = jax.tree.unflatten(treedef, [*leaves[:i], x, *leaves[i + 1 :]])
        out.append(Odd(f'leaf {i}, {leaf.dtype}, {name}', whole))
  return out


def _is(x: Any, kind: Any) -> bool:
  return bool(jnp.issubdtype(x.dtype, kind))


def _times_a_thousand(x: np.ndarray) -> np.ndarray:
  return x if not _is(x, jnp.inexact) else (x * 1000).astype(x.dtype)


def _values(dtype: np.dtype) -> list[Any]:
  """Numbers of this type that break something."""
  if dtype.kind == 'b':
    return [False, True]
  if jnp.issubdtype(dtype, jnp.integer):
    info = jnp.iinfo(dtype)
    wanted = [0, 1, -1, -100, 127, 128, 255, 1000, 2**31 - 1]
    bounds = int(info.min), int(info.max)
    inside = [x for x in wanted if bounds[0] <= x <= bounds[1]]
    return sorted({*inside, *bounds})
  info = jnp.finfo(dtype)
  return [
    np.nan,
    np.inf,
    -np.inf,
    -0.0,
    float(info.smallest_subnormal),
    float(info.tiny),
    float(info.max),
    float(info.min),
    float(info.max) ** 0.5,  # Its square is at the end of the range.
  ]


class _Lies:
  """Has a shape and a type, and hands out what it was given."""

  def __init__(self, given: Any, shape: Any = (), dtype: Any = float) -> None:
    self._given, self.shape, self.dtype = given, shape, dtype

  def __array__(self, *args: Any, **options: Any) -> Any:
    if isinstance(self._given, BaseException):
      raise self._given
    return self if self._given is None else self._given


class _NoAttributes:
  """Fails at every attribute."""

  def __getattribute__(self, name: str) -> Any:
    raise RuntimeError(name)


class _Longer:
  """A sequence that says it is short."""

  def __len__(self) -> int:
    return 3

  def __getitem__(self, place: int) -> float:
    if place > 9:
      raise IndexError(place)
    return 1.0


class _Negative(list):
  def __len__(self) -> int:
    return self[0]


class _Number(enum.IntEnum):
  ONE = 1


class _Text(str):
  __slots__ = ()


class _Sub(np.ndarray):
  """An array that refuses to be computed with."""

  __array_ufunc__ = None

  def __array_finalize__(self, obj: Any) -> None:
    pass

  def __getitem__(self, place: Any) -> Any:
    raise RuntimeError('no entry')


def _deleted() -> jax.Array:
  x = jnp.zeros(3)
  x.delete()
  return x


def _circle() -> list[Any]:
  x: list[Any] = [1.0]
  x.append(x)
  return x


def _nested(depth: int) -> list[Any]:
  x: list[Any] = []
  for _ in range(depth):
    x = [x]
  return x


# In place of a leaf, whatever its form. Some fit some forms.
def _strangers() -> Iterator[tuple[str, Any]]:
  yield from {
    'None': None,
    'an empty text': '',
    'text': 'text',
    'a digit as text': '5',
    'a long text': 'x' * 100_000,
    'a lone surrogate': '\ud800',
    'a text of a subclass': _Text('a'),
    'bytes': b'\x00\xff',
    'a bytearray': bytearray(3),
    'a memoryview': memoryview(b'abc'),
    'an array of the library': array.array('d', [1.0, 2.0]),
    'True': True,
    'an int': 3,
    'a negative int': -1,
    '2 ** 31': 2**31,
    '2 ** 63': 2**63,
    '2 ** 64': 2**64,
    '-2 ** 63 - 1': -(2**63) - 1,
    'an int of 400 digits': 10**400,
    'an int of an enum': _Number.ONE,
    'a float': 3.5,
    'a NaN': float('nan'),
    'an infinity': float('-inf'),
    'a float beyond float32': 1e300,
    'a complex': 1 + 2j,
    'a decimal': decimal.Decimal('1.5'),
    'a fraction': fractions.Fraction(1, 3),
    'a date': datetime.date(2020, 1, 1),
    'a date of NumPy': np.datetime64('2020-01-01'),
    'a duration of NumPy': np.timedelta64(3, 's'),
    'an id': uuid.UUID(int=5),
    'an empty tuple': (),
    'an empty list': [],
    'an empty dict': {},
    'a set': {1, 2},
    'a dict': {'x': 1},
    'a generator': (x for x in range(3)),
    'a range': range(3),
    'a slice': slice(3),
    'an ellipsis': ...,
    'not implemented': NotImplemented,
    'a function': len,
    'a class': int,
    'an object': object(),
    'a ragged list': [[1.0], [1.0, 2.0]],
    'a list with None': [1.0, None],
    'a list with text': ['1', 2],
    'a list of digits as text': ['1', '2'],
    'a list with a masked number': [1.0, np.ma.masked],
    'a list with a huge int': [10**400, 1],
    'a list of two ends': [2**63, -1],
    'a list of itself': _circle(),
    'a list of a hundred lists': _nested(100),
    'a list without a length': _Negative([-1]),
    'a list that is longer than it says': _Longer(),
    'a masked number': np.ma.masked,
    'a structure of NumPy': np.zeros((), [('a', 'f4')]),
    'a void of NumPy': np.void(b'abcd'),
    'a huge view': np.broadcast_to(np.float32(1), (1 << 20, 1 << 20)),
    'a matrix': np.array([[1.0, 2.0]]).view(np.matrix),
    'a key': jax.random.key(0),
    'a deleted array': _deleted(),
    'a shape without numbers': jax.ShapeDtypeStruct((3,), np.float32),
    'an array that raises': _Lies(ValueError('private')),
    'an array that exits': _Lies(RecursionError('private')),
    'an array that is itself': _Lies(None),
    'an array of text': _Lies(np.array(['a', 'b'])),
    'an array that is a list': _Lies([1.0, 2.0]),
    'an object without attributes': _NoAttributes(),
  }.items()


def _changed(leaf: np.ndarray) -> Iterator[tuple[str, Any]]:
  """A leaf of another type or shape, with the same numbers where it can."""
  for dtype in (
    *('bool', 'int8', 'uint8', 'int32', 'int64', 'uint64', 'float16'),
    *('float32', 'float64', 'longdouble', 'complex64', 'object', 'U', 'S'),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.int4),
  ):
    with np.errstate(all='ignore'), contextlib.suppress(TypeError):
      yield f'as {np.dtype(dtype)}', leaf.astype(dtype)
  yield 'ten times as int32', np.full(leaf.shape, 10**9, np.int32)
  yield 'halves', np.full(leaf.shape, 0.5)
  yield 'minus ones', np.full(leaf.shape, -1)
  yield 'in other bytes', leaf.astype(np.float64).astype('>f8')
  yield 'as a list', leaf.tolist()
  yield 'as an array of JAX', jnp.asarray(leaf)
  yield 'as an array of a subclass', leaf.view(_Sub)
  yield 'as a masked array', np.ma.array(leaf)
  yield 'all masked', np.ma.array(leaf, mask=True)
  yield 'read-only', _read_only(leaf)
  yield 'with one axis more', leaf[None]
  yield 'with one axis behind', leaf[..., None]
  yield 'flat and longer', np.append(leaf, leaf)
  yield 'empty', leaf.reshape(-1)[:0]
  yield 'a lie of this shape', _Lies(np.zeros(7), leaf.shape, leaf.dtype)
  yield 'a lie of another shape', _Lies(leaf, (7,), np.int8)
  if leaf.ndim:
    yield 'longer by one', np.concatenate([leaf, leaf[:1]])
    yield 'shorter by one', leaf[:-1]
    yield 'a list, longer by one', [*leaf.tolist(), leaf[0].tolist()]
    yield 'with its axes turned', leaf.T
    yield 'backwards', leaf[::-1]


def _read_only(leaf: np.ndarray) -> np.ndarray:
  leaf = leaf.copy()
  leaf.flags.writeable = False
  return leaf


def _of_leaves(form: Any) -> Iterator[Odd]:
  """Records one of whose leaves is another, the first or the last."""
  base = ordinary(form)
  leaves, treedef = jax.tree.flatten(base)

  def whole(i: int, x: Any) -> Any:
    return jax.tree.unflatten(treedef, [*leaves[:i], x, *leaves[i + 1 :]])

  for i in sorted({0, len(leaves) - 1}):
    for name, x in _changed(leaves[i]):
      yield Odd(f'leaf {i} {name}', whole(i, x))
  for name, x in _strangers():
    yield Odd(f'leaf 0 is {name}', whole(0, x))
  if leaves[-1] is not leaves[0]:
    for name in ('None', 'text', 'an int of 400 digits', 'a ragged list'):
      x = dict(_strangers())[name]
      yield Odd(f'leaf {len(leaves) - 1} is {name}', whole(-1 % len(leaves), x))


class _Raises(collections.abc.Mapping):
  """A mapping that has all keys, and no value."""

  def __init__(self, keys: Any) -> None:
    self._keys = list(keys)

  def __getitem__(self, key: Any) -> Any:
    raise KeyError('private')

  def __iter__(self) -> Iterator[Any]:
    return iter(self._keys)

  def __len__(self) -> int:
    return len(self._keys)


def _of_structure(form: Any) -> Iterator[Odd]:
  """Records of another structure."""
  base = ordinary(form)
  leaves = jax.tree.leaves(base)
  for name, x in {
    'None': None,
    'text': 'text',
    'a number': 5,
    'an empty tuple': (),
    'an empty list': [],
    'an empty dict': {},
    'an object': object(),
    'a lie': _Lies(ValueError('private')),
    'an object without attributes': _NoAttributes(),
    'a list of its leaves': leaves,
    'a tuple of its leaves': tuple(leaves),
    'a dict of its leaves': dict(enumerate(leaves)),
    'its first leaf': leaves[0],
    'in a tuple': (base,),
    'in a list': [base],
    'in a dict': {'record': base},
    'with one more': (*leaves, leaves[0]),
    'without the last': tuple(leaves[:-1]),
    'the other way round': tuple(leaves[::-1]),
    'a named tuple': collections.namedtuple(
      'Named', [f'x{i}' for i in range(len(leaves))]
    )(*leaves),
    'a dict of keys that do not compare': {1: leaves[0], 'a': leaves[0]},
    'a dict that raises': _Raises('xy'),
    'leaves as lists': jax.tree.map(lambda x: x.tolist(), base),
    'leaves of JAX': jax.tree.map(jnp.asarray, base),
  }.items():
    yield Odd(f'record is {name}', x)
  if isinstance(base, dict):
    key = next(iter(base))
    others = {k: x for k, x in base.items() if k != key}
    yield Odd('record has a key too many', base | {'more': leaves[0]})
    yield Odd('record lacks a key', others)
    yield Odd('record has another key', others | {f'{key}x': base[key]})
    yield Odd('record has its keys turned', dict(reversed(base.items())))
    yield Odd('record is an ordered dict', collections.OrderedDict(base))
    yield Odd('record has a default', collections.defaultdict(int, others))
    yield Odd('record raises at its keys', _Raises(base))


def _errors() -> Iterator[Odd]:
  """Records that are not read: exceptions of a source about one of them."""
  yield from (
    Odd(f'reading raises {type(error).__name__}, {i}', error)
    for i, error in zip(
      itertools.count(),
      [
        ValueError('private'),
        TypeError('private'),
        KeyError('private'),
        IndexError('private'),
        AttributeError('private'),
        ZeroDivisionError('private'),
        AssertionError('private'),
        StopIteration('private'),
        RecursionError('private'),
        MemoryError('private'),
        NotImplementedError('private'),
        UnicodeDecodeError('utf-8', b'\xff', 0, 1, 'private'),
        OSError('image file is truncated'),
        FileNotFoundError(2, 'private'),
        UserWarning('private'),
        ExceptionGroup('private', [ValueError('private')]),
      ],
      strict=False,
    )
  )
