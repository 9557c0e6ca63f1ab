"""From data and the public form of a record to batches of that form.

What one record is must not act on a batch but through its gradient: neither its
type, which NumPy would give to all, nor its shape, nor an error that it raises.
So the form is declared, every record is brought to it by itself, and one that
does not fit counts as zero.
"""

import collections
import dataclasses
import errno
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax._types import ArrayTree
from prism_optax.training._sampling import Sampling

# Kinds of numbers, each of which holds those before it.
_KINDS = np.bool_, jnp.integer, jnp.floating, jnp.complexfloating
_BOOL, _FLOAT, _COMPLEX = 0, 2, 3

# Of an OSError: disk and network, which no content of a record causes.
_SYSTEM = (
  *(errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE),
  *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTUNREACH),
)
_IDS = bool, int, float, str, bytes, uuid.UUID
# Arrays (N, ...), or anything with `len` and integer look-up of one record.
DataLike: TypeAlias = ArrayTree | Sequence[ArrayTree]
# The id of the user of each record.
UsersLike: TypeAlias = Sequence[object] | np.ndarray | None
# Data that are arrays of all records; all else is looked up one by one.
_TREES = (tuple, dict, np.ndarray, jax.Array)


class _DoesNotFit(Exception):
  """A record does not fit its form. Caught within this file."""


@dataclasses.dataclass(frozen=True, repr=False)
class Form:
  """What is public of a record: its structure, shapes and types.

  Attributes:
    tree: Of ``jax.ShapeDtypeStruct``, in types that JAX computes with.
  """

  tree: ArrayTree

  @classmethod
  def declared(cls, record: ArrayTree) -> 'Form':
    """The form that a user declares.

    Raises:
      ValueError: Naming a leaf without shape and type, or not of numbers.
    """

    def leaf(path: tuple[object, ...], x: object) -> jax.ShapeDtypeStruct:
      if not (hasattr(x, 'shape') and hasattr(x, 'dtype')):
        raise ValueError(
          'Expected record to be a tree of jax.ShapeDtypeStruct(shape, dtype),'
          f' got record{jax.tree_util.keystr(path)}={x!r}.'
        )
      return _declared(x.shape, x.dtype)

    tree = jax.tree.map_with_path(leaf, record)
    if not jax.tree.leaves(tree):
      raise ValueError(f'Expected record to have a leaf, got {record!r}.')
    return cls(tree)

  @property
  def leaves(self) -> list[jax.ShapeDtypeStruct]:
    found: list[jax.ShapeDtypeStruct] = jax.tree.leaves(self.tree)
    return found

  @property
  def shapes(self) -> list[tuple[int, ...]]:
    return [x.shape for x in self.leaves]

  def __repr__(self) -> str:
    """The same in every process: it is part of a fingerprint."""
    each = [f'{x.dtype}{x.shape}' for x in self.leaves]
    return f'Form({jax.tree.structure(self.tree)}, {each})'

  def zeros(self, count: int) -> list[np.ndarray]:
    """Leaves (count, *shape): padding, for which no record is read."""
    return [np.zeros((count, *x.shape), x.dtype) for x in self.leaves]

  def leaves_of(self, record: ArrayTree) -> list[np.ndarray]:
    """The leaves of a record in this form.

    Raises:
      Exception: Of whatever kind, if the record does not fit.
    """
    out = []
    for x, wanted in zip(_matched(self.tree, record), self.leaves, strict=True):
      if isinstance(x, np.ma.MaskedArray):  # What is masked has no value.
        raise _DoesNotFit
      array = np.asarray(x)
      if array.shape != wanted.shape:
        raise _DoesNotFit
      rows, fits = converted(array[None], wanted.dtype)
      if not fits:
        raise _DoesNotFit
      out.append(rows[0])
    return out


def _declared(shape: Sequence[int], dtype: np.dtype) -> jax.ShapeDtypeStruct:
  """A leaf in the type that JAX has of it: int32 of int64, by default."""
  known = _kind(dtype) is not None
  if not known or dtype.itemsize > (8 if _kind(dtype) == _FLOAT else 16):
    raise ValueError(
      'Expected data of numbers, one shape for all records (tokens, padded to'
      f' a public length), got an array of dtype {dtype}.'
    )
  native = jax.dtypes.canonicalize_dtype(dtype.newbyteorder('='))
  return jax.ShapeDtypeStruct(tuple(shape), native)


def _kind(dtype: object) -> int | None:
  """Where a type stands among the kinds of numbers; None for all else."""
  if not isinstance(dtype, np.dtype) or dtype.kind == 'm':
    return None  # A duration is an integer to NumPy.
  for i, kind in enumerate(_KINDS):
    if jnp.issubdtype(dtype, kind):
      return i
  return None


def _matched(form: ArrayTree, record: ArrayTree) -> list[ArrayTree]:
  """What stands in a record where the form has its leaves, in their order."""
  if isinstance(form, jax.ShapeDtypeStruct):
    return [record]
  if isinstance(form, dict):
    if not isinstance(record, Mapping) or len(record) != len(form):
      raise _DoesNotFit
    ordered = isinstance(form, collections.OrderedDict)
    keys = form if ordered else sorted(form)  # The order of JAX.
    if not all(key in record for key in keys):  # Some make what they lack.
      raise _DoesNotFit
    return [x for key in keys for x in _matched(form[key], record[key])]
  if isinstance(form, tuple | list):
    if not isinstance(record, tuple | list) or len(record) != len(form):
      raise _DoesNotFit
    return [
      x
      for part, own in zip(form, record, strict=True)
      for x in _matched(part, own)
    ]
  treedef: jax.tree_util.PyTreeDef = jax.tree.structure(form)
  found: list[ArrayTree] = treedef.flatten_up_to(record)
  return found


def converted(
  rows: np.ndarray, dtype: np.dtype
) -> tuple[np.ndarray, np.ndarray]:
  """Numbers in another type, row by row.

  Floats are rounded. To whole numbers and truth values a row is converted if
  all its values stay what they are, and does not fit otherwise.

  Args:
    rows: (n, ...), of any type.
    dtype: Of numbers.

  Returns:
    The rows in ``dtype``, and which of them fit, (n,).
  """
  fits = np.ones(len(rows), bool)
  if rows.dtype == dtype:
    return rows, fits
  old, new = _kind(rows.dtype), _kind(dtype)
  assert new is not None  # A form has numbers only.
  if old is None or (old == _COMPLEX and new < _COMPLEX):
    return np.zeros(rows.shape, dtype), ~fits
  if rows.dtype.kind == 'V':  # bfloat16, int4: not all casts are known of them.
    rows = rows.astype(np.float64 if old == _FLOAT else np.int64)
  if new >= _FLOAT:
    return rows.astype(dtype), fits
  low, high = 0, 1
  if new != _BOOL:
    info = jnp.iinfo(dtype)
    low, high = int(info.min), int(info.max)
  if old == _FLOAT:
    if rows.dtype.itemsize < 8:
      rows = rows.astype(np.float64)  # Which has the powers of two below.
    inside = (rows >= float(low)) & (rows < float(high + 1))
    inside = inside & (rows == np.floor(rows))
  else:
    rows = rows.astype(np.uint8) if old == _BOOL else rows
    own = np.iinfo(rows.dtype)
    inside = (rows >= max(low, own.min)) & (rows <= min(high, own.max))
  fits = np.asarray(inside.all(axis=tuple(range(1, inside.ndim))))
  return np.where(inside, rows, 0).astype(dtype), fits


# From positions of records (n,) to leaves (n, ...), and which of them fit.
Reader = Callable[[np.ndarray], tuple[list[np.ndarray], np.ndarray]]


def reader(data: DataLike, form: Form | None) -> tuple[Form, int, Reader]:
  """The form of the records, their number, and what reads some of them.

  Args:
    data: A tuple or dict (any tree of these) of arrays (N, ...), one array, or
      anything with ``len`` and integer look-up of one record.
    form: None for arrays, which show it.

  Returns:
    The form, N, and the reader.

  Raises:
    ValueError: For data that are neither, a source without a form, arrays of
      another form.
  """
  if isinstance(data, _TREES):
    return _of_arrays(data, form)
  if not (hasattr(data, '__len__') and hasattr(data, '__getitem__')):
    raise ValueError(
      'Expected data to be arrays, or a source with len(data) and data[i]: the'
      ' batches are drawn here, by chance; a loader that has made batches of'
      f' its own (shuffled, in turn) is accounted otherwise. Got {type(data)}.'
    )
  if form is None:
    raise ValueError(
      'Expected make_private(..., record=...) for data that are no arrays: the'
      ' public form of one record, such as record=(jax.ShapeDtypeStruct((128,),'
      " 'int32'), jax.ShapeDtypeStruct((), 'int32')). It is not read off a"
      f' record, because every record is private. Got data of {type(data)}.'
    )
  known = form

  def read(places: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    out, fits = known.zeros(len(places)), np.zeros(len(places), bool)
    for row, place in enumerate(places):
      try:
        leaves = known.leaves_of(data[int(place)])
      except Exception as error:
        if _is_of_the_system(error):
          raise
        continue
      fits[row] = True
      for x, leaf in zip(out, leaves, strict=True):
        x[row] = leaf
    return out, fits

  return form, len(data), read


def _is_of_the_system(error: Exception) -> bool:
  """Whether disk or network failed: nothing that a record is, causes that.

  Such an error has to stop the run: a record that is blank today and there
  tomorrow, when the step is done again, would get the same noise twice.
  """
  if isinstance(error, ConnectionError | TimeoutError):
    return True
  return isinstance(error, OSError) and error.errno in _SYSTEM


def _of_arrays(data: ArrayTree, form: Form | None) -> tuple[Form, int, Reader]:
  leaves: list[ArrayTree] = jax.tree.leaves(data)
  treedef: jax.tree_util.PyTreeDef = jax.tree.structure(data)
  arrays = [_array(x) for x in leaves]
  lengths = {x.shape[:1] for x in arrays}
  if len(lengths) != 1 or () in lengths:
    raise ValueError(
      'Expected data to be arrays with one entry of their first axis for each'
      f' record, got {len(arrays)} leaves of {len(lengths)} lengths. A source'
      ' of records that is no array is a list, not a tuple.'
    )
  own = Form(
    jax.tree.unflatten(
      treedef, [_declared(x.shape[1:], x.dtype) for x in arrays]
    )
  )
  if form is not None:
    if jax.tree.structure(form.tree) != treedef or form.shapes != own.shapes:
      raise ValueError(
        f'Expected arrays of records of the form {form}, which make_private'
        f' got as record, got {own}.'
      )
    own = form

  def read(places: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    out, fits = [], np.ones(len(places), bool)
    for x, wanted in zip(arrays, own.leaves, strict=True):
      rows, own_fits = converted(x[places], wanted.dtype)
      out.append(rows)
      fits &= own_fits
    return out, fits

  return own, len(arrays[0]), read


def _array(x: ArrayTree) -> np.ndarray:
  """An array of all records.

  Raises:
    ValueError: If some of it is masked.
  """
  if isinstance(x, np.ma.MaskedArray):
    raise ValueError(
      'Expected arrays without a mask, got numpy.ma: fill it, x.filled(...).'
    )
  return np.asarray(x)


def _of_users(
  users: Sequence[object] | np.ndarray, size: int
) -> list[np.ndarray]:
  """The positions of the records of each user, users as they first appear.

  Equal ids are one user. Ids of a list are looked at one by one: of all of them
  NumPy would make texts or floats if one of them is, and by that tell others
  apart, or not. What is no id (None, NaN, a list) is one and the same id.

  Raises:
    ValueError: If there is not one id for each record.
  """
  ids = users if isinstance(users, list | tuple) else _array(users)
  if (ids.shape if isinstance(ids, np.ndarray) else (len(ids),)) != (size,):
    raise ValueError(
      'Expected users to have one id for each record, got another number of'
      ' them, or of axes.'
    )
  if isinstance(ids, np.ndarray) and ids.dtype.kind in 'biufcSUMm':
    ids = np.unique(ids, return_inverse=True)[1]  # NaN equals NaN.
  numbers: dict[object, int] = {}
  of_record = [numbers.setdefault(_id(x), len(numbers)) for x in ids]
  order = np.argsort(of_record, kind='stable')
  ends = np.cumsum(np.bincount(np.asarray(of_record, np.int64)))
  return np.split(order, ends[:-1]) if size else []


def _id(x: object) -> object:
  """An id that can be compared with others; None for what is none."""
  try:
    if isinstance(x, np.generic | np.ndarray | jax.Array):
      x = None if isinstance(x, np.ma.MaskedArray) else x.item()
    return x if type(x) in _IDS and x == x else None
  except Exception:
    return None


class Records:
  """The data of a run: records, or users with theirs.

  Places are drawn, ``sampling.dataset_size`` of them. The first has the first
  record (or user), and so on; places beyond the last one are empty, and records
  beyond the last place are never drawn. So neither what is drawn nor any error
  depends on how many there are.

  Args:
    sampling: How batches are drawn.
    data: See :func:`reader`.
    users: None, or the id of the user of each record, (N,).
    form: Of one record; None for arrays.

  Attributes:
    form: Of one record.
    size: How many records there are. Private.
    is_source: Whether records are looked up one by one.
    of_user: None, or the positions of the records of each user. Private.

  Raises:
    ValueError: For data without a form, or ids that are not one for a record.
  """

  def __init__(
    self,
    sampling: Sampling,
    data: DataLike,
    users: UsersLike,
    form: Form | None,
  ) -> None:
    most = sampling.examples_per_user
    if (users is None) != (most is None):
      raise ValueError(
        'Expected users, an id for each record, if and only if'
        f' examples_per_user is given, got examples_per_user={most} and users='
        f'{"None" if users is None else "ids"}.'
      )
    self.form, self.size, self._read = reader(data, form)
    self.is_source = not isinstance(data, _TREES)
    self._most, self._places = most, sampling.dataset_size
    self.of_user = None if users is None else _of_users(users, self.size)

  def collect(
    self, places: np.ndarray, choose: Callable[[int, int], np.ndarray]
  ) -> tuple[ArrayTree, np.ndarray, np.ndarray | None]:
    """The examples of one batch, its padding, and which of a user's are there.

    Args:
      places: (B,), -1 where nothing was drawn.
      choose: ``choose(place, count)``, the positions of some of the ``count``
        records of the user at a place.

    Returns:
      Examples, a tree of leaves (B, ...), or with users (B, most, ...), zeros
      where no record is; (B,), True where none is; None, or with users (B,
      most), True where one is. Their memory is new, and no source's.
    """
    if self.of_user is None:
      examples, fits = self.at(np.where(places < self.size, places, -1))
      return examples, ~fits, None
    records = np.full((len(places), self._most or 1), -1)
    for i, place in enumerate(places):
      if 0 <= place < len(self.of_user):
        own = self.of_user[place]
        chosen = own[choose(int(place), len(own))]
        records[i, : len(chosen)] = chosen
    examples, fits = self.at(records)
    return examples, np.asarray(~fits.any(1)), fits

  def misfits(self) -> np.ndarray:
    """The positions of all records that never count, sorted."""
    parts = np.array_split(np.arange(self.size), self.size // 1024 + 1)
    fits = np.concatenate([self.at(x)[1] for x in parts])
    if self.of_user is None:
      fits[self._places :] = False
    else:
      for own in self.of_user[self._places :]:
        fits[own] = False
    return np.flatnonzero(~fits)

  def at(self, records: np.ndarray) -> tuple[ArrayTree, np.ndarray]:
    """Records at positions of any shape, zeros for -1 and what does not fit."""
    rows = np.flatnonzero(records >= 0)
    leaves = self.form.zeros(records.size)
    fits = np.zeros(records.size, bool)
    # A warning about one record is as much of a release as an error.
    with warnings.catch_warnings(), np.errstate(all='ignore'):
      warnings.simplefilter('ignore')
      found, fits[rows] = self._read(records.ravel()[rows])
    for x, own in zip(leaves, found, strict=True):
      x[rows] = own
      x[~fits] = 0
    examples = jax.tree.unflatten(
      jax.tree.structure(self.form.tree),
      [x.reshape(*records.shape, *x.shape[1:]) for x in leaves],
    )
    return examples, fits.reshape(records.shape)
