"""Trainings that are small and have one of everything, and how they are run."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import prism_optax
from prism_optax import training
from tests.replay import harness

N, B, STEPS, MOST = 8, 4, 3, 3
SIGMA = 2.0
# Draws place 0 in the last two steps and place 7 in the first and the last; no
# batch is full.
KEY = 35
PLACES = (0, 7)

_rng = np.random.default_rng(0)
PARAMS = {
  'bias': jnp.zeros(2),
  'layer': {
    'lora_a': jnp.asarray(_rng.normal(size=(3, 1)), jnp.float32),
    'lora_b': jnp.asarray(_rng.normal(size=(1, 2)), jnp.float32),
  },
}


def _normal(*shape):
  return _rng.normal(size=shape).astype(np.float32)


# Eight records, a dict of arrays.
RECORDS = {
  'x': _normal(N, 3),
  'pixels': _rng.integers(0, 256, (N, 3)).astype(np.uint8),
  'label': _rng.integers(0, 2, N).astype(np.int32),
}
# Eight records that are their own gradients.
GRADIENTS = {
  'bias': _normal(N, 2),
  'layer': {'lora_a': _normal(N, 3, 1), 'lora_b': _normal(N, 1, 2)},
}


def loss(params, record):
  """Of floats, of integers that wrap, and of a label."""
  pair = params['layer']
  pixels = (record['pixels'] - 128).astype(jnp.float32) / 256
  z = (record['x'] + pixels) @ pair['lora_a'] @ pair['lora_b'] + params['bias']
  return jax.nn.logsumexp(z) - z[record['label']] + jnp.sum(z**2)


def of_gradients(params, record):
  """Its gradient is the record."""
  return optax.tree.vdot(params, record)


OPTIMIZERS = {
  'adam': optax.adam(0.1),
  'prism': functools.partial(prism_optax.prism, 0.1),
  'published': functools.partial(prism_optax.published_prism, 0.1),
  'prism_muon': functools.partial(prism_optax.prism_muon, 0.1),
  'dp_muon': functools.partial(prism_optax.dp_muon, 0.1),
}
CLIPS = {
  'flat': training.FlatClipping(),
  'automatic': training.AutomaticClipping(),
  'groups': training.GroupClipping(
    {'bias': 'b', 'layer': 'l'}, {'b': 1.0, 'l': 3.0}
  ),
  'quantile': training.QuantileClipping(fraction_stddev=0.5),
}


def make(optimizer='adam', clip='flat', **options):
  """A training of three steps."""
  constants = {
    'l2_clip_norm': 1.0,
    'expected_batch_size': B,
    'dataset_size': N,
    'steps': STEPS,
    'delta': 1e-5,
    'noise_multiplier': SIGMA,
    'prng_key': KEY,
  }
  return training.make_private(
    options.pop('loss', loss),
    options.pop('params', PARAMS),
    optimizer=OPTIMIZERS[optimizer],
    clipping=CLIPS[clip] if isinstance(clip, str) else clip,
    **constants | options,
  )


class Listed(list):
  """A list of records that notes which of them are read."""

  note: Callable[[str], None] = staticmethod(lambda text: None)

  def __getitem__(self, i):
    self.note(f'read {i}')
    return super().__getitem__(i)


def listed(tree):
  """The records of arrays, one by one."""
  return Listed(
    jax.tree.map(lambda x: x[i], tree) for i in range(len(jax.tree.leaves(tree)[0]))
  )


@dataclasses.dataclass
class Case:
  """A training on a tape, compiled once.

  Attributes:
    private: The training.
    data: Of all records, a tree of arrays or a list.
    users: None, or who each record is of.
  """

  private: training.PrivateTraining
  data: Any
  users: Any = None

  def __post_init__(self) -> None:
    self.tape = harness.Tape()
    self._like = self.private.init(PARAMS)
    self._start = jax.tree.map(_saved, self._like)
    # For the compiler, and for what is made once only.
    self.observe(self.data, PLACES[0])

  def drawn(self, place: int) -> list[bool]:
    """In which steps a record is drawn."""
    return [place in self._places(step) for step in range(STEPS)]

  def _places(self, step: int) -> np.ndarray:
    return self.private.parts.settings.sampling.draw(self._start.seed, step)[0]

  def observe(self, data, place, *, absent=False, played=None):
    """A run with these data, where the record at a place is the odd one.

    Args:
      data: Records.
      place: Of the odd one.
      absent: It is not there: where it was drawn there is padding.
      played: A run before.
    """

    def run(now):
      if isinstance(data, Listed):
        data.note = now.note
      state = jax.tree.map(_restored, self._start, self._like)
      batches = self.private.batches(state, data, users=self.users)
      now.note(f'{len(batches)} batches')
      for step, batch in enumerate(batches):
        odd = self._places(step) == place
        if absent:
          batch = _without(batch, odd)
        others = jax.tree.map(
          lambda x: np.asarray(x)[~odd],
          (batch.examples, batch.is_padding_example, batch.is_present),
        )
        now.note(f'batch {harness.shapes(batch.examples)}')
        now.note(f'others {harness.digest(others)}')
        state = self.private.step(state, batch)
        now.note(f'state {harness.digest((state.params, state.optimizer))}')
        now.next_step()
      return state.params

    with self.tape.recording():
      return self.tape.observe(run, played)


def _without(batch, row):
  """The batch with padding in a row."""

  def blank(x):
    x = np.array(x)
    x[row] = 0
    return jnp.asarray(x)

  return dataclasses.replace(
    batch,
    examples=jax.tree.map(blank, batch.examples),
    is_padding_example=jnp.asarray(np.asarray(batch.is_padding_example) | row),
  )


def _saved(x):
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  return np.asarray(x).copy()


def _restored(x, like):
  if isinstance(like, np.ndarray):
    return x
  if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
  return jnp.array(x)


def with_record(data, place, record):
  """The data with another record at a place, a list or arrays."""
  if isinstance(data, Listed):
    new = Listed(data)
    list.__setitem__(new, place, record)
    return new

  def put(x, value):
    x = x.copy()
    x[place] = value
    return x

  return jax.tree.map(put, data, record)
