"""What was released of the records before a training, and must be declared."""

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import dp_accounting
import jax
import numpy as np

from prism_optax import _identity
from prism_optax._proofs._equations import Program
from prism_optax._types import ArrayTree


class Release(Protocol):
  """An earlier release about the records of a training, with its event.

  Any object will do that has these attributes and is a pytree of the released
  arrays, so that ``jax.tree.leaves`` finds them. All of it is public. A
  training adds ``event`` to its own and cannot check it, so the attributes must
  be true.

  ==========================  =================================================
  an attribute is missing     ValueError that names it
  another ``dataset_size``    ValueError
  two of equal ``digest``     ValueError: one release, given twice
  two of one ``key_digest``   ValueError: in their difference noise cancels
  ==========================  =================================================

  Attributes:
    event: The mechanism, in the words of dp-accounting, for add-or-remove-one
      neighbours.
    entries: Number of entries that got noise.
    dataset_size: Number of records, or of users.
    seeded: Whether somebody knows the noise.
    digest: A text that names the released values: the same for the same values,
      another for others, such as a hash of their bytes.
    key_digest: The same for the key of the noise.
  """

  @property
  def event(self) -> dp_accounting.DpEvent: ...
  @property
  def entries(self) -> int: ...
  @property
  def dataset_size(self) -> int: ...
  @property
  def seeded(self) -> bool: ...
  @property
  def digest(self) -> str: ...
  @property
  def key_digest(self) -> str: ...


class ChangeOfVariables(Release, Protocol):
  """A :class:`Release` that says in which variables to train.

  The loss is ``loss(to_params(variables), ...)`` then, and gradients, clip,
  noise and steps are those of the variables.
  """

  def to_params(self, variables: ArrayTree) -> ArrayTree:
    """The parameters of the model, made of what is trained.

    A function of its argument and of released arrays alone, which JAX can trace
    and ``jax.vmap`` batch.

    Args:
      variables: The tree of what is trained.

    Returns:
      The tree that the loss takes.
    """


_SAID = ('event', 'entries', 'dataset_size', 'seeded', 'digest', 'key_digest')


class PriorReleases(NamedTuple):
  """What was released about the same records before the training.

  Attributes:
    events: In the words of dp-accounting.
    entries: Number of entries that got noise.
    digest: What makes it other releases.
    words: For a statement.
    seeded: Whether somebody knows the noise of one of them.
  """

  events: tuple[dp_accounting.DpEvent, ...]
  entries: int
  digest: str
  words: str
  seeded: bool

  @classmethod
  def of(
    cls,
    change: ChangeOfVariables | None,
    prior_releases: Sequence[Release],
    dataset_size: int,
  ) -> 'PriorReleases':
    """A change of variables, or None, and other releases.

    Raises:
      ValueError: For one that says less, is of another number of records, or
        has the values or the noise of another one.
    """
    named: dict[str, Release] = {}
    if change is not None:
      named['change_of_variables'] = change
    for i, release in enumerate(prior_releases):
      named[f'prior_releases[{i}]'] = release
    digest = hashlib.sha256()
    for name, release in named.items():
      said = _SAID if release is not change else ('to_params', *_SAID)
      _check_one(name, release, said, dataset_size)
      digest.update(f'{release.digest}\0{release.key_digest}\0'.encode())
      for x in map(np.asarray, jax.tree.leaves(release)):
        digest.update(f'{x.shape}{x.dtype}'.encode() + x.tobytes())
    _check_different(named)
    words = [] if change is None else ['a change of variables']
    if count := len(prior_releases):
      words.append(f'{count} prior release{"s" if count > 1 else ""}')
    releases = named.values()
    return cls(
      tuple(x.event for x in releases),
      sum(x.entries for x in releases),
      digest.hexdigest() if named else '',
      ''.join(f' and {x}' for x in words),
      any(x.seeded for x in releases),
    )


def _check_one(
  name: str, release: Release, said: tuple[str, ...], dataset_size: int
) -> None:
  kind = type(release).__name__
  missing = [x for x in said if not hasattr(release, x)]
  if missing:
    raise ValueError(
      f'Expected {name} to have {", ".join(said)}, got {kind} without'
      f' {", ".join(missing)}. For another mechanism compose events:'
      ' accounting.epsilon of training.event() and its own.'
    )
  if release.dataset_size != dataset_size:
    raise ValueError(
      f'Expected {name} to be of the records (or users) of this training, got'
      f' {kind} of {release.dataset_size} for {dataset_size=}.'
    )
  for attribute in ('digest', 'key_digest'):
    value = getattr(release, attribute)
    if not isinstance(value, str) or not value:
      raise ValueError(
        f'Expected {name} to have a {attribute}, by which it is told from other'
        f' releases, got {kind} with {attribute}={value!r}: give what the'
        ' release returned, not a copy made of its arrays alone.'
      )
  for x in map(np.asarray, jax.tree.leaves(release)):
    if x.dtype == object:
      raise ValueError(
        f'Expected {name} to be a pytree of arrays, got {kind}, in which there'
        ' is no number.'
      )


def _check_different(named: dict[str, Release]) -> None:
  """Refuses two releases that are one, or have one noise."""
  seen: dict[str, str] = {}
  for name, release in named.items():
    label = f'{name} ({type(release).__name__})'
    other = seen.setdefault(f'values {release.digest}', label)
    if other != label:
      raise ValueError(
        f'{other} and {label} are one release, of the same values: give it'
        ' once.'
      )
    other = seen.setdefault(f'key {release.key_digest}', label)
    if other != label:
      raise ValueError(
        f'{other} and {label} have noise of one key. Their difference has less'
        ' noise, or none, so no event describes both. Release one of them again'
        ' with another prng_key (best: None).'
      )


def check_declared(
  name: str, tree: ArrayTree, declared: Sequence[ArrayTree]
) -> None:
  """Refuses a release in a tree of arrays unless it is declared.

  Args:
    name: Of the tree, for the message.
    tree: Arrays; shapes, and what is traced, pass.
    declared: Releases.

  Raises:
    ValueError: Naming the leaf.
  """
  digests = {release.digest for release in declared}
  arrays = [x for release in declared for x in jax.tree.leaves(release)]

  def is_release(x: object) -> bool:
    return hasattr(x, 'key_digest')

  for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_release):
    if is_release(leaf):
      allowed = leaf.digest in digests
    else:
      allowed = not _identity.is_marked(leaf) or any(
        _identity.is_copy(leaf, x) for x in arrays
      )
    if not allowed:
      raise ValueError(
        f'{name}{jax.tree_util.keystr(path)} is a release, or a copy of one,'
        ' and that release is not accounted for: give it to make_private, as'
        ' prior_releases=[head]. If it is declared, give its kernel as a whole,'
        ' and choose or mix columns inside of loss. If it has seen none of the'
        ' records of this training, give head.kernel_for_other_records().'
      )


def constants_of(program: Program) -> Iterator[ArrayTree]:
  """The arrays that a program holds, such as those that a loss closes over."""
  yield from getattr(program, 'consts', ())
  for equation in program.eqns:
    for atom in equation.invars:
      if hasattr(atom, 'val'):
        yield atom.val
    for value in jax.tree.leaves(list(equation.params.values())):
      if hasattr(value, 'eqns'):
        yield from constants_of(value)
