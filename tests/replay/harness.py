"""A run that is recorded, and one with another record that is played to it.

Differential privacy compares two runs with the same secrets, one of which has
one record more. What they show must be the same, but for sums that noise is
added to; and those may differ by the sensitivity. After the first release the
runs would go apart, and nothing could be compared. So the second run is given
the releases of the first one in place of its own: from then on both are at the
same parameters, and every step is compared (Re:cord-play, arXiv:2602.17454).

How: while a :class:`Tape` is in use, ``seams.add_noise``, where all noise of
the package is added, hands to the host what enters, and takes back what is to
leave. So a program that is traced under a tape is compiled once, records and
plays.

What is compared is an :class:`Observation`: whatever someone outside might see,
in order, as text (batches' shapes and types, the rows of all other records,
programs that are traced and compiled, sizes and keys of the noise, bits of
every state, all that is printed, warned, logged or raised), and what entered
the noise, in units of its standard deviation.
"""

import collections
import contextlib
import dataclasses
import hashlib
import io
import itertools
import logging
import math
import os
import tempfile
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from tests.core import seams

# One rounding in each of the sums that are compared, and the lattice's step.
SLACK = 1e-6


@dataclasses.dataclass
class Release:
  """One addition of noise.

  Attributes:
    step: Number of the step in which it happened.
    entered: Every entry over the standard deviation of its noise, float64.
    left: The noisy arrays.
  """

  step: int
  entered: np.ndarray
  left: list[np.ndarray]


@dataclasses.dataclass
class Observation:
  """One run, as it looks from outside.

  Attributes:
    events: What happened, in order: the step, and a text.
    releases: Every addition of noise, in order.
    result: What the run returned, None if it raised.
  """

  events: list[tuple[int, str]] = dataclasses.field(default_factory=list)
  releases: list[Release] = dataclasses.field(default_factory=list)
  result: Any = None
  step: int = 0

  def note(self, text):
    self.events.append((self.step, text))


class Tape:
  """Records what enters the noise, and plays what left it."""

  def __init__(self):
    self.now = None
    self.played = None

  @contextlib.contextmanager
  def recording(self):
    """Within it, functions that are traced have their noise on this tape."""

    def taped(prng_key, tree, stddev, **marks):
      out = seams.add_noise(prng_key, tree, stddev, **marks)
      leaves, treedef = jax.tree.flatten(out)
      sums = jax.tree.leaves(tree, is_leaf=seams.is_sum)
      stddevs = stddev if isinstance(stddev, list | tuple) else [stddev]
      inputs = (
        jnp.stack(seams.words_of(prng_key)), sums,
        [jnp.asarray(s, jnp.float32) for s in stddevs], leaves,
      )  # fmt: skip
      shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
      if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(inputs)):
        played = io_callback(self._exchange, shapes, *inputs, ordered=True)
      else:
        played = [jnp.asarray(x) for x in self._exchange(*inputs)]
      return jax.tree.unflatten(treedef, played)

    with seams.noise_replaced(taped):
      yield

  def _exchange(self, words, sums, stddevs, out):
    """Called by the program: from what would leave to what does."""
    left = [np.asarray(x) for x in out]
    now, stddevs = self.now, [float(s) for s in stddevs]
    if now is None:  # A first run, for the compiler.
      return left
    shown = [f'{x.dtype}{list(x.shape)}' for x in left]
    key = hashlib.sha256(np.asarray(words).tobytes()).hexdigest()[:8]
    now.note(f'noise {key} of stddev {stddevs} on {shown}')
    each = stddevs if len(stddevs) == len(sums) else stddevs * len(sums)
    entered = [
      seams.in_float64(x).ravel() / s for x, s in zip(sums, each, strict=True)
    ]
    release = Release(now.step, np.concatenate(entered), left)
    number = len(now.releases)
    now.releases.append(release)
    if self.played is None or number >= len(self.played.releases):
      return left
    other = self.played.releases[number].left
    if list(map(_form, other)) != list(map(_form, left)):
      return left
    release.left = other
    return other

  def observe(self, run, played=None):
    """Runs, and returns what was seen.

    Args:
      run: Called with the observation, in which it may note events.
      played: A run before, whose releases leave in place of this one's.
    """
    now = Observation()
    self.now, self.played = now, played
    with _messages(now):
      try:
        now.result = run(now)
      except Exception as error:  # Whatever the data make of it.
        now.note(f'raised {type(error).__name__}: {error}')
      finally:
        self.now = self.played = None
    return now


def _form(x):
  return x.shape, x.dtype


# Listeners of jax.monitoring cannot be taken away again: there is one.
_listening = []


def _on_duration(event, *args, **kwargs):
  del args, kwargs
  if event.endswith(('trace_duration', 'compile_duration')):
    for note in _listening:
      note(f'jax {event.rsplit("/", 1)[-1]}')


jax.monitoring.register_event_duration_secs_listener(_on_duration)


@contextlib.contextmanager
def _messages(now):
  """Notes what is printed (by C, too), warned and logged, and compiled."""
  handler = logging.Handler()
  handler.emit = lambda record: now.note(
    f'logged {record.name}: {record.getMessage()}'
  )
  with contextlib.ExitStack() as stack:
    for number, redirect in (
      (1, contextlib.redirect_stdout),
      (2, contextlib.redirect_stderr),
    ):
      stack.enter_context(_printed(number, redirect, now.note))
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter('always')
    warnings.showwarning = lambda message, category, *args: now.note(
      f'warned {category.__name__}: {message}'
    )
    logging.getLogger().addHandler(handler)
    stack.callback(logging.getLogger().removeHandler, handler)
    _listening.append(now.note)
    stack.callback(_listening.remove, now.note)
    yield


@contextlib.contextmanager
def _printed(number, redirect, note):
  """Notes what goes to a stream of Python, and to the file below it."""
  with tempfile.TemporaryFile() as file, io.StringIO() as text:
    before = os.dup(number)
    os.dup2(file.fileno(), number)
    try:
      with redirect(text):
        yield
    finally:
      os.dup2(before, number)
      os.close(before)
      file.seek(0)
      said = text.getvalue() + file.read().decode(errors='replace')
      if said:
        note(f'printed to {number}: {said}')


def moved(one, other):
  """How far apart what entered the noise is, for each step.

  In standard deviations of the noise, over all releases of a step together: the
  inverse of the noise multiplier is what a Gaussian mechanism may show.
  Infinite where the releases cannot be compared.
  """
  steps = 1 + max([x.step for x in one.releases + other.releases], default=-1)
  squares = [0.0] * steps
  for x, y in itertools.zip_longest(one.releases, other.releases):
    if x is None or y is None or x.entered.shape != y.entered.shape:
      squares[(x or y).step] = math.inf
      continue
    with np.errstate(all='ignore'):
      square = float(np.sum((x.entered - y.entered) ** 2))
    squares[x.step] += square if math.isfinite(square) else math.inf
  return [math.sqrt(x) for x in squares]


def differences(one, other, noise_multiplier):
  """What tells the runs apart beyond what is accounted for; nothing, if right.

  Args:
    one: The run that was recorded.
    other: The run that it was played to, with one record more or less.
    noise_multiplier: Of everything that one step releases.
  """
  found = [
    f'step {step}: what enters the noise moves by'
    f' {size * noise_multiplier:.6g} times the sensitivity'
    for step, size in enumerate(moved(one, other))
    if not size * noise_multiplier <= 1 + SLACK
  ]
  before, after = (collections.Counter(x.events) for x in (one, other))
  found += [f'{_told(x)}: no more' for x in before - after]
  found += [f'{_told(x)}: new' for x in after - before]
  if before == after and one.events != other.events:
    found.append('what happened, happened in another order')
  return found


def without_reads(run):
  """The run but for which records were read: where they are others."""
  events = [x for x in run.events if not x[1].startswith('read ')]
  return dataclasses.replace(run, events=events)


def _told(event):
  return f'step {event[0]}: {event[1]}'


def digest(tree):
  """A text for structure, shapes, types and bits."""
  leaves, treedef = jax.tree.flatten(tree)
  bits = hashlib.sha256(str(treedef).encode())
  for x in leaves:
    if jnp.issubdtype(getattr(x, 'dtype', None), jax.dtypes.prng_key):
      x = jax.random.key_data(x)
    array = np.asarray(x)
    bits.update(f'{array.dtype}{array.shape}'.encode() + array.tobytes())
  return bits.hexdigest()[:16]


def shapes(tree):
  """A text for structure, shapes and types, weak ones included."""
  return str(jax.tree.map(lambda x: jax.typeof(x).str_short(), tree))
