"""Bugs that were there once, or are like them: the harness sees each."""

import contextlib
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import _clip, _lattice, training
from prism_optax.training import _private, _records, _sampling, _seen
from tests.replay import cases, harness
from tests.replay.cases import FORM, GRADIENT, Case, N
from tests.training import adversarial

pytestmark = pytest.mark.slow

LAST = N - 1  # Drawn in the first and the last step.


def told(case, record, place=LAST):
  """What one record gives away there."""
  case.without(place)  # For the compiler: what it made may be gone again.
  odd = adversarial.Odd('it', record)
  return case.offences([odd], [place]).found.get(f'it, at {place}', [])


def assert_tells(found, *words):
  """Each of these words is somewhere in what tells the runs apart."""
  assert found
  for word in words:
    assert any(word in x for x in found), (word, found)


def with_leaf(name, value):
  return adversarial.ordinary(FORM) | {name: value}


def on_a_list(**options):
  made = cases.make(record=FORM, **options)
  return Case(made, cases.listed(FORM), proved=False)


@functools.cache
def right():
  return on_a_list()


def but(module, **changed):
  """A module with other functions in it."""
  return types.SimpleNamespace(**vars(module) | changed)


def test_nothing_is_told_of_the_code_as_it_is():
  assert not told(right(), adversarial.ordinary(FORM, 9))


class _Stacks(_records.Records):
  """As records were collected once: NumPy finds one type for all of them."""

  fill = -1  # Which record is read where there is none; -1 for zeros.

  def __init__(self, sampling, data, users, form):
    super().__init__(sampling, data, users, form)
    self._source = data

  def at(self, records):
    places = np.where(records < 0, self.fill, records)
    read = [None if i < 0 else self._source[int(i)] for i in places]
    there = np.array([x is not None for x in read])
    rows = jax.tree.map(
      lambda *xs: np.stack(xs), *(x for x in read if x is not None)
    )

    def placed(x):
      out = np.zeros((len(records), *x.shape[1:]), x.dtype)
      out[there] = x
      out[records < 0] = 0
      return out

    return jax.tree.map(placed, rows), there & (records >= 0)


class _PadsWithTheFirst(_Stacks):
  fill = 0


def test_the_type_of_one_record_becomes_that_of_all(monkeypatch):
  monkeypatch.setattr(_private, 'Records', _Stacks)
  case = on_a_list()
  assert not told(case, adversarial.ordinary(FORM, 9))
  wide = with_leaf('pixels', np.int32([1, 2, 3]))
  # The others wrap in uint8, and do not in int32.
  assert_tells(told(case, wide), "'pixels': 'int32[8,3]'", 'the sensitivity')


def test_the_first_record_is_read_for_padding(monkeypatch):
  monkeypatch.setattr(_private, 'Records', _PadsWithTheFirst)
  case = on_a_list()
  wide = with_leaf('pixels', np.int32([1, 2, 3]))
  assert not case.drawn(0)[0]
  found = told(case, wide, 0)
  assert_tells(found, "step 0: batch {'l", 'it acts where it is not drawn')


def test_a_record_that_does_not_fit_raises(monkeypatch):
  monkeypatch.setattr(_records, '_is_of_the_system', lambda error: True)
  for name, value in (('x', np.zeros(4)), ('label', None), ('x', 'text')):
    played = right().observe(right().records, LAST)
    other = right().with_odd(LAST, with_leaf(name, value), played)
    found = harness.differences(played, other, cases.SIGMA)
    assert_tells(found, 'raised _DoesNotFit', 'moves by inf')


def test_a_number_that_is_too_large_warns(monkeypatch):
  nothing = contextlib.nullcontext
  quiet = but(np, errstate=lambda **options: nothing())
  monkeypatch.setattr(_records, 'np', quiet)
  warn = types.SimpleNamespace(
    catch_warnings=nothing, simplefilter=lambda action: None
  )
  monkeypatch.setattr(_records, 'warnings', warn)
  found = told(right(), with_leaf('x', np.full(3, 1e300)))
  assert_tells(found, 'warned RuntimeWarning: overflow encountered in cast')


def test_padding_is_left_out(monkeypatch):
  """The size of a batch is how many were drawn; it is compiled anew."""

  class Trims(_records.Records):
    def collect(self, places, choose):
      examples, is_padding, present = super().collect(places, choose)
      here = ~is_padding
      rows = jax.tree.map(lambda x: x[here], (examples, is_padding))
      return *rows, present

  monkeypatch.setattr(_private, 'Records', Trims)
  played = right().without(LAST)
  other = right().with_odd(LAST, adversarial.ordinary(FORM, 9), played)
  found = harness.differences(played, other, cases.SIGMA)
  assert_tells(found, "'x': 'float32[1,3]'}: no more", "float32[2,3]'}: new")


def test_one_generator_chooses_for_all_users(monkeypatch):
  """How many records one has decides which of another's are chosen."""
  now = {'step': -1}

  def choose(self, seed, step, place, count):
    del place
    if step != now['step']:
      now.update(step=step, rng=np.random.default_rng([*seed, step]))
    return now['rng'].permutation(count)[: self.examples_per_user]

  monkeypatch.setattr(_sampling.Sampling, 'choose', choose)
  case = Case(
    cases.make(record=FORM, examples_per_user=cases.MOST),
    cases.listed(FORM, len(cases.USERS)),
    users=cases.USERS,
    proved=False,
  )
  record = adversarial.ordinary(FORM, 9)
  assert not told(case, record, 0)  # As many records as before.
  played = case.without(0)
  found = [
    x
    for count in (2, 4)
    for x in harness.differences(
      harness.without_reads(played),
      harness.without_reads(case.with_count(0, record, count, played)),
      cases.SIGMA,
    )
  ]
  assert_tells(found, 'others ')


def _dispatch(params, records):
  """Experts by a product with zeros and ones, and zero times NaN is NaN."""
  chosen = jax.nn.one_hot(jnp.arange(N), N)
  return cases.losses(params, records | {'x': chosen @ records['x']})


def test_records_meet_in_a_loss_of_a_batch():
  options = {'record': FORM, 'loss': _dispatch, 'batched_loss': True}
  made = cases.make(**options)
  state = made.init(cases.PARAMS)
  (batch, *_) = made.batches(state, cases.listed(FORM))
  with pytest.raises(ValueError, match='depend on that record alone'):
    made.step(state, batch)
  case = Case(cases.make(**options), cases.listed(FORM), proved=False)
  assert not told(case, adversarial.ordinary(FORM, 9))
  found = told(case, with_leaf('x', np.float32([0, np.nan, 0])))
  # In the last step there are three others, all of which it takes away.
  assert_tells(found, 'step 2: what enters the noise moves by')


class _Underflows(training.AutomaticClipping):
  """As it was: the squares of entries of 1e-23 are zero."""

  def _factors(self, leaves, l2_clip_norm, known):
    squared = _clip.squared_norm(leaves, l2_clip_norm)
    counts = jnp.isfinite(squared)
    norm = jnp.sqrt(jnp.where(counts, squared, 1))
    weight = 1 / (norm + self.stability / l2_clip_norm)
    return _clip.Factors(leaves, [weight] * len(leaves), counts)


def on_gradients(clip, **options):
  made = cases.make('adam', clip, loss=cases.of_gradients, **options)
  return Case(made, cases.listed(GRADIENT), arrays=True, proved=False)


@pytest.mark.parametrize(('stability', 'norm'), [(1e-22, 1.0), (0.01, 1e20)])
def test_squares_underflow(stability, norm):
  """With a small stability, or any and a large clip norm."""
  case = on_gradients(_Underflows(stability), l2_clip_norm=norm)
  found = case.offences(list(cases.odd_gradients())[::2], [LAST])
  assert found.farthest > 5


def test_a_clip_that_is_a_little_too_long(monkeypatch):
  """By a ten thousandth, which is noticed."""
  original = _clip.clip_weight

  def longer(squared):
    weight, counts = original(squared)
    return weight * 1.0001, counts

  monkeypatch.setattr(_clip, 'clip_weight', longer)
  found = told(on_gradients('flat'), adversarial.ordinary(GRADIENT, 9))
  assert_tells(found, 'moves by 1.0001 times the sensitivity')


def test_a_statistic_is_released_without_noise(monkeypatch):
  """The votes of a quantile: they decide the clip norm of the next step."""

  def silent(key, tree, stddev, **_):
    del key, stddev
    return list(map(_lattice.to_float, tree))

  monkeypatch.setattr(_clip, '_lattice', but(_lattice, add_noise=silent))
  with pytest.raises(ValueError, match='leaves the optimizer without'):
    cases.make('adam', 'quantile')
  monkeypatch.setattr(_seen, 'check', lambda *args: None)
  found = told(on_gradients('quantile'), adversarial.ordinary(GRADIENT, 9))
  assert_tells(found, 'step 0: state')


def test_a_loss_that_prints():
  def loss(params, record):
    jax.debug.print('label {}', record['label'])
    return cases.loss(params, record)

  found = told(on_a_list(loss=loss), with_leaf('label', 7))
  assert_tells(found, 'label 7')
