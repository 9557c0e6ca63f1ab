"""Trainings that are small, and how they are run on a tape."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import prism_optax
from prism_optax import contrib, training
from tests import cases as shared
from tests.core import seams
from tests.replay import harness
from tests.training import adversarial

N, B, STEPS, MOST = 8, 4, 3, 3
# Who each record is of, where eight users have some each.
USERS = np.repeat(np.arange(N), [1, 5, 3, 2, 4, 3, 5, 2])
SIGMA = 2.0
# No batch is full. The first place is drawn in the last two steps, and the last
# place in the first step and the last one.
KEY = 35
PLACES = (0, N - 1)

_rng = np.random.default_rng(0)
PARAMS = {
  'bias': jnp.zeros(2),
  'layer': {
    'lora_a': jnp.asarray(_rng.normal(size=(3, 1)), jnp.float32),
    'lora_b': jnp.asarray(_rng.normal(size=(1, 2)), jnp.float32),
  },
}
FORM = {
  'x': jax.ShapeDtypeStruct((3,), np.float32),
  'pixels': jax.ShapeDtypeStruct((3,), np.uint8),
  'label': jax.ShapeDtypeStruct((), np.int32),
}
GRADIENT = jax.tree.map(
  lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), PARAMS
)


def losses(params, records):
  """Of floats, of integers that wrap, and of a label; with copies of params."""
  pair = params['layer']
  pixels = (records['pixels'] - 128).astype(jnp.float32) / 16
  z = jnp.einsum(
    'bi,bir,bro->bo', records['x'] + pixels, pair['lora_a'], pair['lora_b']
  )
  z += params['bias']
  chosen = jax.nn.one_hot(records['label'], 2) * z
  return jax.nn.logsumexp(z, -1) - jnp.sum(chosen, -1) + jnp.sum(z**2, -1)


def loss(params, record):
  """The same of one record."""
  one = jax.tree.map(lambda x: jnp.asarray(x)[None], (params, record))
  return losses(*one)[0]


def of_gradients(params, record):
  """Its gradient is the record."""
  return optax.tree.vdot(params, record)


OPTIMIZERS = {
  'adam': optax.adam(0.1),
  'prism': functools.partial(prism_optax.prism, 0.1),
  'published_prism': functools.partial(prism_optax.published_prism, 0.1),
  'prism_muon': functools.partial(contrib.prism_muon, 0.1),
  'dp_muon': functools.partial(prism_optax.dp_muon, 0.1),
}
CLIPS = {
  'flat': None,
  'automatic': training.AutomaticClipping(),
  'groups': training.GroupClipping(
    {'bias': 'b', 'layer': 'l'}, {'b': 1.0, 'l': 3.0}
  ),
  'quantile': training.QuantileClipping(fraction_stddev=0.5),
}


def make(optimizer='adam', clip='flat', **options):
  """A training of three steps."""
  constants = {
    'loss': loss, 'params': PARAMS, 'expected_batch_size': B, 'dataset_size': N,
    'noise_multiplier': SIGMA, 'prng_key': KEY, 'steps': STEPS,
    'clipping': CLIPS[clip] if isinstance(clip, str) else clip,
  }  # fmt: skip
  return shared.make(OPTIMIZERS[optimizer], **constants | options)


def listed(form, count=N):
  """Ordinary records."""
  return [adversarial.ordinary(form, seed) for seed in range(count)]


def stacked(records):
  """Arrays of records, for a loss of one argument."""
  return (jax.tree.map(lambda *xs: np.stack(xs), *records),)


def odd_gradients():
  """Records that are gradients of every size, whole or in one entry."""
  yield from adversarial.in_form(GRADIENT)
  base = adversarial.ordinary(GRADIENT, 99)
  leaves, treedef = jax.tree.flatten(base)
  for scale in 10.0 ** np.array([-44, -38, -30, -23, -21, -19, -9, 9, 19, 38]):
    with np.errstate(all='ignore'):
      whole = [(x * scale).astype(np.float32) for x in leaves]
    yield adversarial.Odd(f'times {scale}', jax.tree.unflatten(treedef, whole))
    for i in range(len(leaves)):
      one = [np.zeros_like(x) for x in leaves]
      one[i].reshape(-1)[0] = scale
      yield adversarial.Odd(
        f'{scale} in leaf {i} alone', jax.tree.unflatten(treedef, one)
      )


class Offences(NamedTuple):
  """What odd records give away.

  Attributes:
    found: From the name of a record to what tells that it is there.
    farthest: How far one of them moves what enters the noise, over the
      sensitivity.
  """

  found: dict[str, list[str]]
  farthest: float


@dataclasses.dataclass
class Case:
  """A training whose step is compiled once, on a tape.

  Attributes:
    private: The training.
    records: Of all places, a list.
    arrays: Whether they are given to it as arrays.
    users: None, or who each record is of.
    proved: Whether what goes before a first step, checks and proofs, is done,
      and the tape is compared with the run without it.
  """

  private: training.PrivateTraining
  records: list[Any]
  arrays: bool = False
  users: Any = None
  proved: bool = True

  def __post_init__(self):
    self.tape = harness.Tape()
    self._like = self.private.init(PARAMS)
    self._start = shared.saved(self._like)
    plain = None
    if self.proved:
      plain = self.observe(self.records, 0, taped=False)
      assert plain.result is not None, plain.events
    # Nothing is proved of a step on a tape, whose noise may be anything.
    seams.trace_again(self.private)
    self.without(0)  # For the compiler.
    recorded = self.observe(self.records, 0)
    assert len(recorded.releases) >= STEPS, recorded.events
    # To be on a tape changes nothing. But it is another program: some CPUs
    # round it in another way, and bits of parameters decide on the next noise.
    # A step moves by some hundredths.
    if plain is not None:
      shared.assert_close(recorded.result[0], plain.result[0], 1e-6)

  def without(self, place):
    """The run in which the record, or the user, at a place is not there."""
    if self.arrays:  # In which all numbers are there.
      return self.observe(self.records, place, absent=True)
    return self.observe(self._with(place, None), place)

  def with_odd(self, place, record, played):
    """The run with another record at a place, or with all of a user's."""
    return self.observe(self._with(place, record), place, played=played)

  def with_count(self, user, record, count, played):
    """The run in which a user has so many records, all of them this one."""
    before, mine = self.users, self.users == user
    first = np.flatnonzero(mine)[0]  # Users are in the order of appearance.
    records = [x for x, own in zip(self.records, mine, strict=True) if not own]
    records[first:first] = [record] * count
    self.users = np.insert(before[~mine], first, [user] * count)
    try:
      return self.observe(records, user, played=played)
    finally:
      self.users = before

  def _with(self, place, record):
    owners = range(len(self.records)) if self.users is None else self.users
    return [
      record if owner == place else x
      for owner, x in zip(owners, self.records, strict=True)
    ]

  def offences(self, odds, places=PLACES, noise_multiplier=SIGMA):
    """What each of some records gives away.

    Args:
      odds: The records. Each is put into every place, in turn.
      places: Where.
      noise_multiplier: Of the training.
    """
    found, farthest = {}, 0.0
    for place in places:
      played = self.without(place)
      drawn = self.drawn(place)
      for odd in odds:
        other = self.with_odd(place, odd.record, played)
        far = harness.moved(played, other)
        told = harness.differences(played, other, noise_multiplier)
        if any(x and not y for x, y in zip(far, drawn, strict=False)):
          told.append('it acts where it is not drawn')
        if told:
          found[f'{odd.name}, at {place}'] = told
        farthest = max([farthest, *(noise_multiplier * x for x in far)])
    return Offences(found, farthest)

  def drawn(self, place):
    """In which steps a place is drawn."""
    sampling, seed = self.private.parts.settings.sampling, self._start.seed
    return [place in sampling.draw(seed, step) for step in range(STEPS)]

  def observe(self, records, place, *, absent=False, played=None, taped=True):
    """A run in which the record at a place is the odd one.

    Args:
      records: The data.
      place: Of the odd one.
      absent: It is not there: where it was drawn there is padding.
      played: A run before.
      taped: Whether programs that are traced have their noise on the tape.
    """
    sampling = self.private.parts.settings.sampling

    def run(now):
      source = adversarial.Source(records)
      data = stacked(records) if self.arrays else source
      state, after = shared.restored(self._start, self._like), []
      batches = self.private.batches(state, data, users=self.users)
      now.note(f'{len(batches)} batches')
      for step, batch in enumerate(batches):
        now.note(f'read {source.read}')
        del source.read[:]
        odd = sampling.draw(state.seed, step) == place
        if absent:
          batch = _without(batch, odd)
        now.note(f'batch {harness.shapes(batch.examples)}')
        rows = batch.examples, batch.is_padding_example, batch.is_present
        if len(batch.is_padding_example) == len(odd):
          rows = jax.tree.map(lambda x, odd=odd: np.asarray(x)[~odd], rows)
        now.note(f'others {harness.digest(rows)}')
        state = self.private.step(state, batch)
        now.note(f'state {harness.digest((state.params, state.optimizer))}')
        jax.effects_barrier()  # What it prints is printed.
        after.append(jax.device_get(state.params))
        now.step += 1
      return after

    with (
      self.tape.recording() if taped else contextlib.nullcontext(),
      seams.one_digest(),  # The same noise for all data.
    ):
      return self.tape.observe(run, played)


def _without(batch, row):
  """The batch with padding in a row."""

  def blank(x):
    if x is None:
      return None
    mask = row.reshape(-1, *(1,) * (x.ndim - 1))
    return np.where(mask, 0, x).astype(x.dtype)

  parts = {
    'examples': jax.tree.map(blank, batch.examples),
    'is_padding_example': np.asarray(batch.is_padding_example) | row,
    'is_present': blank(batch.is_present),
  }
  return dataclasses.replace(batch, **jax.device_put(parts))


@dataclasses.dataclass
class OneRelease:
  """One release of a sum over all records, before any training.

  Attributes:
    release: From arrays of all records to what is released.
    records: Of all places, a list.
    zero: A record that adds nothing.
    noise_multiplier: Of the release.
  """

  release: Callable[[Any], Any]
  records: list[Any]
  zero: Any
  noise_multiplier: float = SIGMA

  def __post_init__(self):
    self.tape = harness.Tape()
    self._observe(self.zero)  # For the compiler.

  def _observe(self, record, played=None):
    (data,) = stacked([*self.records[:-1], record])

    def run(now):
      out = self.release(data)
      now.note(f'released {harness.digest(out)}')
      return out

    with self.tape.recording():
      return self.tape.observe(run, played)

  def offences(self, odds):
    """What each of some records gives away, at the last place."""
    played = self._observe(self.zero)
    assert played.result is not None, played.events
    found, farthest = {}, 0.0
    for odd in odds:
      other = self._observe(odd.record, played)
      if told := harness.differences(played, other, self.noise_multiplier):
        found[odd.name] = told
      (far,) = harness.moved(played, other)
      farthest = max(farthest, self.noise_multiplier * far)
    return Offences(found, farthest)
