"""Whose a state is: refuses to use its keys for anything but its own run."""

import functools
import hashlib
import os

import jax
import numpy as np

from prism_optax._types import ArrayTree
from prism_optax.training import _fingerprint
from prism_optax.training._fingerprint import Fingerprint
from prism_optax.training._journal import Count, Journal
from prism_optax.training._program import described
from prism_optax.training._settings import Parts
from prism_optax.training._state import PARTS, TrainingState


class Owner:
  """What the states of a training belong to, and its journal.

  Attributes:
    settings: A digest of what the guarantee depends on, (8,) uint32.
  """

  def __init__(self, parts: Parts) -> None:
    words = repr((parts.settings, jax.tree.map(described, parts.shapes)))
    self.settings = _fingerprint.words(words)
    self._optimizer = _shapes(
      jax.eval_shape(parts.transformation.init, parts.shapes)
    )
    self._tags = parts.settings.tags
    self._sharding = parts.execution.batch_sharding
    self._journal = None if parts.journal is None else Journal(parts.journal)

  def begin(self, state: TrainingState) -> None:
    """Begins the journal of a run, unless there is one."""
    if self._journal is not None and jax.process_index() == 0:
      self._journal.begin(self.name(state))

  def check_state(self, state: TrainingState) -> None:
    """Refuses a state of other settings, or of another optimizer."""
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(state)):
      raise ValueError(
        'Expected a state with values, got a traced one: step is compiled'
        ' already and checks its state, so call it outside of jit.'
      )
    same = (
      isinstance(state, TrainingState)
      and isinstance(state.fingerprint, Fingerprint)  # Once it was one array.
      and np.array_equal(np.asarray(state.fingerprint.settings), self.settings)
    )
    if not same:
      tags = dict(self._tags)
      raise ValueError(
        'Expected a state of this training: of its init, or restored from a run'
        f' with the same settings ({PARTS["settings"]}'
        f'{f"; here {tags}" if tags else ""}). Got {type(state).__name__} of'
        ' another.'
      )
    if _shapes(state.optimizer) != self._optimizer:
      raise _another(['program'])

  def check_fits(self, state: TrainingState, found: Fingerprint) -> None:
    """Refuses to use the keys of a state for another sum."""
    other = _fingerprint.differing(state.fingerprint, found)
    if 'environment' in other:
      if self._journal is None:
        raise ValueError(
          'The state was made in another environment'
          f' ({PARTS["environment"]}), which rounds gradients in its own way. A'
          ' step done again here would be a second release, which nobody could'
          ' count. Go on where the run began; or begin a new run with'
          ' make_private(journal=path), which counts such releases, and account'
          ' for both runs.'
        )
      # What a program is made of differs by version, too.
      other = [x for x in other if x not in ('environment', 'program')]
    if other:
      raise _another(other)

  @functools.cached_property
  def environment(self) -> np.ndarray:
    """A digest of what rounds numbers its own way, (8,) uint32."""
    found = _fingerprint.environment(self._sharding, os.urandom(16).hex())
    return _fingerprint.agreed(_fingerprint.words(found))

  def written_down(
    self, state: TrainingState, found: Fingerprint, rows: np.ndarray
  ) -> int:
    """Number of the release of this step among those in the journal."""
    if self._journal is None:
      return 0
    attempt = 0
    if jax.process_index() == 0:
      params = np.asarray(_fingerprint.of_arrays(state.params))
      attempt = self._journal.record(
        self.name(state),
        int(state.step),
        _fingerprint.words(*(x.tobytes() for x in (*found, params, rows))),
      )
    return int(_fingerprint.agreed(np.array([attempt], np.uint32))[0])

  def count(self, state: TrainingState | None = None) -> Count:
    """What the journal has, of the run of a state or whose it is."""
    if self._journal is None:
      return Count()
    count = Count()
    if jax.process_index() == 0:
      run = None if state is None else self.name(state)
      count = self._journal.count(run)
    found = _fingerprint.agreed(np.array(count, np.uint32))
    return Count(*map(int, found))

  def name(self, state: TrainingState) -> bytes:
    """Says which run a state is of, and tells nothing of its seed."""
    seed = np.asarray(state.seed, np.uint32).tobytes()
    return hashlib.sha256(seed + self.settings.tobytes()).digest()


def _shapes(state: ArrayTree) -> list[tuple[int, ...]]:
  """Of the leaves alone, because trainers hold them in trees of their own."""
  return [np.shape(x) for x in jax.tree.leaves(state)]


def _another(parts: list[str]) -> ValueError:
  """For a state that began with something else."""
  return ValueError(
    'Expected the same as when the run began, got a difference in '
    + ' and '.join(f'{x} ({PARTS[x]})' for x in parts)
    + '. The keys of a state are for one run alone. Begin a new run with'
    ' init, and account for both.'
  )
