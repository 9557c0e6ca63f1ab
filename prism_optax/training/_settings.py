"""What a private training is made of."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import dp_accounting
import jax
import numpy as np
import optax

from prism_optax import _sums_of_records
from prism_optax._proofs._proof import Proof
from prism_optax._types import ArrayTree
from prism_optax.lora import InputMetric
from prism_optax.training._records import Form
from prism_optax.training._sampling import Sampling


class Release(Protocol):
  """What was released of the same records, such as a head of class means."""

  @property
  def event(self) -> dp_accounting.DpEvent: ...
  @property
  def entries(self) -> int: ...
  @property
  def dataset_size(self) -> int: ...
  @property
  def seeded(self) -> bool: ...


class Before(NamedTuple):
  """What was released about the same records before the training.

  Attributes:
    events: In the words of dp-accounting.
    entries: Number of entries that got noise.
    digest: What makes it other releases.
    words: For a statement.
    seeded: Whether somebody knows the noise of one of them.
  """

  events: tuple[dp_accounting.DpEvent, ...] = ()
  entries: int = 0
  digest: str = ''
  words: str = ''
  seeded: bool = False

  @classmethod
  def of(
    cls, metric: InputMetric | None, also: Sequence[Release], dataset_size: int
  ) -> 'Before':
    """An input metric and others.

    Raises:
      ValueError: For one that says less, or of another number of records.
    """
    releases: list[Release] = [] if metric is None else [metric]
    releases += also
    digest = hashlib.sha256()
    for release in releases:
      missing = [
        name
        for name in ('event', 'entries', 'dataset_size', 'seeded')
        if not hasattr(release, name)
      ]
      if missing:
        raise ValueError(
          'Expected a release that says its event, entries, dataset_size and'
          ' whether it is seeded, such as heads.LinearHead, got'
          f' {type(release).__name__} without {", ".join(missing)}. For another'
          ' mechanism compose events: accounting.epsilon of training.event()'
          ' and its own.'
        )
      if release.dataset_size != dataset_size:
        raise ValueError(
          'Expected a release of the records (or users) of this training, got'
          f' {type(release).__name__} of {release.dataset_size} for'
          f' {dataset_size=}.'
        )
      for x in map(np.asarray, jax.tree.leaves(release)):
        if x.dtype == object:
          raise ValueError(
            'Expected a release that is a pytree of arrays, got'
            f' {type(release).__name__}, in which there is no number.'
          )
        digest.update(f'{x.shape}{x.dtype}'.encode() + x.tobytes())
    words = [] if metric is None else ['an input metric']
    if also:
      words.append(f'{len(also)} release{"s" if len(also) > 1 else ""} before')
    return cls(
      tuple(x.event for x in releases),
      sum(x.entries for x in releases),
      digest.hexdigest() if releases else '',
      ''.join(f' and {x}' for x in words),
      any(x.seeded for x in releases),
    )


def check_declared(params: ArrayTree, releases: Sequence[Release]) -> None:
  """Refuses parameters that were released of the records, and not accounted.

  Raises:
    ValueError: Naming the leaf.
  """
  declared = {id(x) for x in jax.tree.leaves(releases)}
  for path, leaf in jax.tree.leaves_with_path(params):
    if _sums_of_records.is_remembered(leaf) and id(leaf) not in declared:
      raise ValueError(
        f'params{jax.tree_util.keystr(path)} was released by prism_optax.heads,'
        ' and that release is not accounted for: give it to make_private as'
        ' also=[head]. If it is of other records than these, give a copy.'
      )


class Settings(NamedTuple):
  """What the guarantee depends on, besides the data."""

  sampling: Sampling
  noise_multiplier: float
  steps: int
  delta: float
  l2_clip_norm: float
  clipping: str
  seeded: bool
  entries: int
  before: Before
  record: Form | None = None


class Parts(NamedTuple):
  """What a training is made of.

  Attributes:
    settings: What the guarantee depends on.
    transformation: Clip, noise and optimizer.
    gradients: ``gradients(params, frozen, examples)`` of many examples.
    shapes: Of the parameters.
    new_seed: Makes a seed of batches.
    put: Puts arrays on the devices.
    skip_padding: Whether micro-batches of padding are passed over.
    check: ``check(params, frozen, batch)`` proves by shapes that no record
      meets another, or refuses the loss.
    adapters: From what is trained to what the model takes.
    releases_per_step: How often a step adds noise: to the gradients, and to the
      votes of a quantile.
  """

  settings: Settings
  transformation: optax.GradientTransformationExtraArgs
  gradients: Callable[..., Any]
  shapes: Any
  new_seed: Callable[[], np.ndarray]
  put: Callable[[Any], Any]
  skip_padding: bool
  check: Callable[..., Proof]
  adapters: Callable[[Any], Any]
  releases_per_step: int
