"""Poisson batches of one shape, drawn from a secret seed and the step.

The guarantee rests on batches that are random and unseen. Each one is a
function of the seed and of the step, so that a resumed run draws what the
interrupted one would have drawn, and no generator has to be saved.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _validate


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
  """One padded batch. Only :meth:`PrivateTraining.batches` makes one.

  Attributes:
    examples: Tree of arrays (padded size, ...); with users (padded size,
      examples per user, ...).
    is_padding_example: (padded size,), True where nothing was drawn.
    is_present: None, or with users (padded size, examples per user), True for
      records that count.
    step: The number of the step that it was drawn for.
    run: Says which run it belongs to.
    data: A digest of the data that it was drawn from, (8,) uint32.
  """

  examples: Any
  is_padding_example: jax.Array
  is_present: jax.Array | None
  step: int
  run: bytes
  data: np.ndarray


class Sampling(NamedTuple):
  """How batches are drawn.

  Attributes:
    expected_batch_size: b.
    dataset_size: N, of records, or of users.
    padded_batch_size: More than that is cut, by chance.
    microbatch_size: Padding fills whole micro-batches.
    examples_per_user: None, or the most that a user contributes to one batch.
  """

  expected_batch_size: int
  dataset_size: int
  padded_batch_size: int
  microbatch_size: int | None
  examples_per_user: int | None

  @property
  def probability(self) -> float:
    return self.expected_batch_size / self.dataset_size

  @property
  def truncated_batch_size(self) -> int | None:
    """The size of a full batch, if a batch can be cut to it."""
    fits = self.padded_batch_size >= self.dataset_size
    return None if fits else self.padded_batch_size

  def draw(self, seed: np.ndarray, step: int) -> tuple[np.ndarray, Any]:
    """Positions of one batch, (padded size,), -1 where there is none.

    Args:
      seed: Words of 32 bits, secret.
      step: The number of the step, from 0.

    Returns:
      The positions, and the generator for further choices of this step.
    """
    rng = np.random.default_rng(
      np.random.SeedSequence([int(x) for x in seed], spawn_key=(step,))
    )
    # So many of N independent places; which ones is uniform given how many.
    drawn = rng.binomial(self.dataset_size, self.probability)
    size = min(drawn, self.padded_batch_size)  # Cut by chance.
    places = np.full(self.padded_batch_size, -1, np.int64)
    places[:size] = rng.choice(
      self.dataset_size, size, replace=False, shuffle=False
    )
    # A micro-batch takes every so-many-th row.
    parts = self.microbatch_size or self.padded_batch_size
    return places.reshape(-1, parts).T.ravel(), rng


def padded_batch_size(
  expected_batch_size: int, dataset_size: int, multiple: int
) -> int:
  """The default size of a batch, six standard deviations above the expected.

  Fewer would be cheaper to compute and dearer in privacy: in a batch that is
  cut one record can push out another. The size is a multiple of ``multiple``.
  """
  rest = 1 - expected_batch_size / dataset_size
  size = expected_batch_size + 6 * math.sqrt(expected_batch_size * rest)
  return -(-min(dataset_size, math.ceil(size)) // multiple) * multiple


Reader = Callable[[np.ndarray], Any]


def _numbers(leaf: Any) -> np.ndarray:
  array = np.asarray(leaf)
  if array.dtype.kind not in 'biufcV':
    raise ValueError(
      'Expected data of numbers, one shape for all records (tokens, padded to'
      f' a public length), got an array of dtype {array.dtype}.'
    )
  return array


def reader(data: Any) -> tuple[int, Reader]:
  """The number of records, and a function that collects some of them.

  Args:
    data: A tuple or dict (any tree of these) of arrays (N, ...), one array, or
      anything with ``len`` and integer look-up of one record: a list, a
      ``datasets.Dataset``, a ``grain`` source.

  Returns:
    N, and ``read(places)``: a tree of arrays (places, ...).
  """
  if isinstance(data, tuple | dict | np.ndarray | jax.Array):
    leaves: list[Any] = jax.tree.leaves(data)
    arrays, treedef = [_numbers(x) for x in leaves], jax.tree.structure(data)
    sizes = sorted({len(x) if x.ndim else 0 for x in arrays})
    if len(sizes) != 1:
      raise ValueError(
        'Expected data to be arrays with one entry of their first axis for'
        f' each record, got first axes of {sizes}.'
      )
    return sizes[0], lambda places: jax.tree.unflatten(
      treedef, [x[places] for x in arrays]
    )
  if not (hasattr(data, '__len__') and hasattr(data, '__getitem__')):
    raise ValueError(
      'Expected data to be arrays, or a source with len(data) and data[i]: the'
      ' batches are drawn here, by chance; a loader that has made batches of'
      f' its own (shuffled, in turn) is accounted otherwise. Got {type(data)}.'
    )

  def read(places: np.ndarray) -> Any:
    records = [data[int(i)] for i in places]
    return jax.tree.map(
      lambda *xs: _numbers(_stacked(xs)),
      *records,
      is_leaf=lambda x: isinstance(x, list),  # Numbers of one array.
    )

  return len(data), read


def _stacked(records: tuple[Any, ...]) -> np.ndarray:
  shapes = sorted({np.shape(x) for x in records})
  if len(shapes) > 1:
    raise ValueError(
      'Expected records of one shape: pad them to a public length.'
    )
  return np.stack(records)


class Records:
  """The data of a run: records, or users with theirs.

  Args:
    sampling: How batches are drawn.
    data: See :func:`reader`.
    users: None, or the id of the user of each record, (N,).

  Raises:
    ValueError: If the data are not of the declared size.
  """

  def __init__(self, sampling: Sampling, data: Any, users: Any) -> None:
    most = sampling.examples_per_user
    size, self._read = reader(data)
    self._most = most or 1
    unit, found = 'records', size
    self._of_user: list[np.ndarray] | None = None
    if (users is None) != (most is None):
      raise ValueError(
        'Expected users, an id for each record, if and only if'
        f' examples_per_user is given, got examples_per_user={most} and users='
        f'{"None" if users is None else "ids"}.'
      )
    if users is not None:
      ids = np.asarray(users)
      if ids.shape != (size,):
        raise ValueError(
          f'Expected users to have one id for each of {size} records, got the'
          f' shape {ids.shape}.'
        )
      _, numbers = np.unique(ids, return_inverse=True)
      order = np.argsort(numbers, kind='stable')
      ends = np.cumsum(np.bincount(numbers))
      self._of_user = np.split(order, ends[:-1]) if size else []
      unit, found = 'users', len(self._of_user)
    if found != sampling.dataset_size:
      raise ValueError(
        f'The training was made for dataset_size={sampling.dataset_size}'
        f' {unit}, got data of {found}. The number is public: epsilon and'
        ' batches follow from it.'
      )

  def collect(
    self, places: np.ndarray, rng: np.random.Generator
  ) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """The examples of one batch, its padding, and which of a user's are there.

    Args:
      places: Positions of records or users, -1 where there is none.
      rng: For the choice of a user's records.
    """
    drawn, present = places >= 0, None
    places = np.where(drawn, places, 0)
    if self._of_user is not None:
      places, present = self._of_users(places, self._of_user, rng)
    flat = self._read(places.ravel())

    def shaped(x: np.ndarray) -> np.ndarray:
      # Zeros where nothing was drawn: no record stands there.
      x = x.reshape(*places.shape, *x.shape[1:])
      mask = drawn.reshape(-1, *(1,) * (x.ndim - 1))
      return np.where(mask, x, 0).astype(x.dtype)

    return jax.tree.map(shaped, flat), ~drawn, present

  def _of_users(
    self, users: np.ndarray, of_user: list[np.ndarray], rng: np.random.Generator
  ) -> tuple[np.ndarray, np.ndarray]:
    """Some records of each user, by chance, and which of them are there."""
    records = np.zeros((len(users), self._most), np.int64)
    present = np.zeros((len(users), self._most), bool)
    for i, user in enumerate(users):
      own = rng.permutation(of_user[user])[: self._most]
      # A user's own first record stands where it has no more: a made-up one
      # could have a gradient that is not finite.
      records[i] = own[0]
      records[i, : len(own)], present[i, : len(own)] = own, True
    return records, present


class Batches:
  """The batches of a run, from a state's step to the last one.

  Iterating again gives the same batches again. ``len`` is their number.

  Attributes:
    steps: The numbers of their steps.
    draw: From the number of a step to its batch.
  """

  def __init__(self, steps: range, draw: Callable[[int], Batch]) -> None:
    self.steps = steps
    self.draw = draw

  def __len__(self) -> int:
    return len(self.steps)

  def __iter__(self) -> Iterator[Batch]:
    return map(self.draw, self.steps)


def check(sampling: Sampling) -> None:
  """Refuses sizes that do not fit.

  Raises:
    ValueError: Naming them.
  """
  b, size = sampling.expected_batch_size, sampling.dataset_size
  _validate.integer('dataset_size', size, 1)
  _validate.integer('expected_batch_size', b, 1)
  if b > size:
    raise ValueError(
      f'Expected expected_batch_size <= dataset_size, got {b} and {size}.'
    )
  _validate.integer('padded_batch_size', sampling.padded_batch_size, 1)
  for name in ('microbatch_size', 'examples_per_user'):
    value = getattr(sampling, name)
    if value is not None:
      _validate.integer(name, value, 1)
  part = sampling.microbatch_size or 1
  if sampling.padded_batch_size % part:
    raise ValueError(
      'Expected padded_batch_size to be a multiple of microbatch_size, got'
      f' {sampling.padded_batch_size} and {part}.'
    )


def put_on_device(sharding: jax.sharding.Sharding | None) -> Callable[..., Any]:
  """Puts a tree of arrays on the devices, split along the first axis."""
  if sharding is None:
    return lambda tree: jax.tree.map(jnp.asarray, tree)
  return lambda tree: jax.device_put(tree, sharding)
