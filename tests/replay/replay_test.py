"""No record shows but through a sum that noise is added to.

Each training runs once without a record, and then with each of some two hundred
in its place, with the same secrets and the same releases (see `harness`).
"""

import functools

import jax
import numpy as np
import pytest

from prism_optax import contrib, training
from prism_optax.contrib import heads
from tests.replay import cases, harness
from tests.replay.cases import FORM, GRADIENT, PARAMS, SIGMA, USERS, Case
from tests.training import adversarial

# A record that nothing is wrong with may be as long as the clip norm.
REACHED = 0.9


@functools.cache
def on_a_list(optimizer='adam', clip='flat', **options):
  made = cases.make(optimizer, clip, record=FORM, **options)
  return Case(made, cases.listed(FORM))


@functools.cache
def on_gradients(optimizer, clip='flat', **options):
  """A training on arrays of records that are their own gradients."""
  made = cases.make(optimizer, clip, loss=cases.of_gradients, **options)
  # With and without a tape, the programs are compared once for each optimizer.
  proved = clip == 'flat' and not options
  return Case(made, cases.listed(GRADIENT), arrays=True, proved=proved)


def assert_unseen(offences):
  assert not offences.found
  assert offences.farthest > REACHED


def everywhere(case, odds):
  """What odd records give away, at the two places in turn."""
  ends = zip(cases.PLACES, (odds[::2], odds[1::2]), strict=True)
  one, other = (case.offences(own, [place]) for place, own in ends)
  found = one.found | other.found
  return cases.Offences(found, min(one.farthest, other.farthest))


@pytest.mark.slow
def test_what_is_compared():
  """Runs at the same parameters, of which only what is drawn differs."""
  case = on_a_list()
  record = adversarial.ordinary(FORM, 9)
  for place, drawn in zip(
    cases.PLACES, ([False, True, True], [True, False, True]), strict=True
  ):
    assert case.drawn(place) == drawn
    without = case.without(place)
    again = case.observe(case.records, place, absent=True, played=without)
    assert not harness.differences(without, again, SIGMA)
    assert harness.moved(without, again) == [0, 0, 0]
    other = case.with_odd(place, record, without)
    assert [x > 0 for x in harness.moved(without, other)] == drawn
    # The releases of the first run have left the second one, too.
    for x, y in zip(without.releases, other.releases, strict=True):
      assert all(map(np.array_equal, x.left, y.left))
    free = case.observe(
      [*case.records[:place], record, *case.records[place + 1 :]], place
    )
    assert harness.digest(free.result) != harness.digest(without.result)
    assert harness.differences(without, free, SIGMA)


@pytest.mark.slow
def test_no_record_of_a_list_is_seen():
  """Wrong types, lengths and structures, text, None, errors, NaN, ..."""
  odds = adversarial.records(FORM)
  assert len(odds) > 200
  assert_unseen(everywhere(on_a_list(), odds))


@pytest.mark.slow
def test_a_record_that_is_blank_is_a_record_that_is_not_there():
  """Nothing that an empty place shows tells it from one that is blank."""
  case = on_a_list()
  for place in cases.PLACES:
    blank = [*case.records[:place], None, *case.records[place + 1 :]]
    one = case.observe(blank, place)
    other = case.observe(case.records, place, absent=True, played=one)
    assert not harness.differences(one, other, SIGMA)
    assert harness.moved(one, other) == [0, 0, 0]
  # The last one may be missing altogether: it is not read then.
  fewer = case.observe(case.records[:-1], place, played=one)
  assert not harness.differences(
    *map(harness.without_reads, (one, fewer)), SIGMA
  )
  assert harness.moved(one, fewer) == [0, 0, 0]


GRID = [
  (optimizer, {'clip': clip})
  for optimizer in ('adam', 'prism', 'published_prism', 'prism_muon')
  for clip in cases.CLIPS
  if (optimizer, clip) != ('adam', 'automatic')
] + [('dp_muon', {})]
PARTS = [
  ('prism', {'execution': training.Execution(2)}),
  ('dp_muon', {'execution': training.Execution(2)}),
  ('adam', {'execution': training.Execution(2, skip_padding=True)}),
  ('prism', {'execution': training.Execution(1, skip_padding=True)}),
  # Some batches are cut to it.
  ('adam', {'execution': training.Execution(padded_batch_size=4)}),
  ('adam', {'l2_clip_norm': 1e20}),
  ('prism', {'l2_clip_norm': 1e-20}),
  ('dp_muon', {'l2_clip_norm': 1e-9}),
]


@pytest.mark.parametrize(
  ('optimizer', 'options', 'every'),
  [
    ('adam', {'clip': 'automatic'}, 2),
    *(pytest.param(*x, 1, marks=pytest.mark.slow) for x in GRID + PARTS),
  ],
  ids=str,
)
def test_no_gradient_is_seen(optimizer, options, every):
  """Under any rule of clipping, in parts, and in other units."""
  odds = list(cases.odd_gradients())[::every]
  assert_unseen(everywhere(on_gradients(optimizer, **options), odds))


@pytest.mark.slow
@pytest.mark.parametrize('stability', [1e-40, 1e-20, 1e20])
def test_no_gradient_is_seen_at_any_stability(stability):
  rule = training.AutomaticClipping(stability)
  case = on_gradients('adam', rule, l2_clip_norm=1e3)
  assert_unseen(everywhere(case, list(cases.odd_gradients())))


@functools.cache
def of_users(optimizer, **options):
  made = cases.make(
    optimizer, record=FORM, examples_per_user=cases.MOST, **options
  )
  return Case(made, cases.listed(FORM, len(USERS)), users=USERS)


@pytest.mark.slow
@pytest.mark.parametrize(
  ('optimizer', 'options'),
  [('adam', {}),
   ('prism', {'execution': training.Execution(2, skip_padding=True)})],
)  # fmt: skip
def test_no_user_is_seen(optimizer, options):
  """All records of whom are odd."""
  case = of_users(optimizer, **options)
  assert_unseen(everywhere(case, adversarial.records(FORM)))


@pytest.mark.slow
def test_how_many_records_a_user_has_is_not_seen():
  """Neither are the choices among the records of others another."""
  case = of_users('adam')
  record = adversarial.ordinary(FORM, 9)
  for place in cases.PLACES:
    without = case.without(place)
    for count in (1, 2, 4, 9):
      other = case.with_count(place, record, count, without)
      assert not harness.differences(
        *map(harness.without_reads, (without, other)), SIGMA
      )


@pytest.mark.slow
@pytest.mark.parametrize('optimizer', ['adam', 'prism'])
@pytest.mark.parametrize('source', ['list', 'arrays'])
def test_no_record_of_a_loss_of_a_batch_is_seen(optimizer, source):
  options = {} if source == 'arrays' else {'record': FORM}
  made = cases.make(optimizer, loss=cases.losses, batched_loss=True, **options)
  case = Case(made, cases.listed(FORM), arrays=source == 'arrays')
  odds = adversarial.in_form(FORM)
  if source == 'list':
    odds = adversarial.records(FORM)
  assert_unseen(everywhere(case, odds))


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float64', 'float16', 'int64', 'uint8'])
def test_no_record_of_arrays_of_any_type_is_seen(dtype):
  """Which are converted: 1e300 is no float32, 2^62 is no int32."""
  form = {'x': jax.ShapeDtypeStruct((3,), dtype)}

  def loss(params, record):
    x, pixels = record['x'].astype(np.float32), np.zeros(3, np.uint8)
    return cases.loss(params, {'x': x, 'pixels': pixels, 'label': 0})

  case = Case(cases.make(loss=loss), cases.listed(form), arrays=True)
  assert not case.offences(adversarial.in_form(form)).found


@pytest.mark.slow
@pytest.mark.parametrize('form', ['second_moment', 'mean'])
def test_no_record_is_seen_in_coordinates_of_a_metric(form):
  """The metric is public: it was released."""
  x = np.random.default_rng(0).normal(size=(cases.N, 3)) + 3
  metric = contrib.input_metric(
    [{'layer': x}], noise_multiplier=SIGMA, dataset_size=cases.N, form=form
  )
  made = cases.make('prism', record=FORM, change_of_variables=metric)
  case = Case(made, cases.listed(FORM))
  assert_unseen(everywhere(case, adversarial.records(FORM)))


OPTIONS = {
  'noise_multiplier': SIGMA, 'dataset_size': cases.N, 'prng_key': 1,
}  # fmt: skip
PARTS_OF_DATA = slice(0, 4), slice(4, None)


def _head(make):
  def release(data):
    rows = [(data['x'][part], data['label'][part]) for part in PARTS_OF_DATA]
    return make(rows, num_classes=2, **OPTIONS)

  return release


def _metric(form):
  def release(data):
    rows = [{'a': data['x'][k], 'b': data['y'][k]} for k in PARTS_OF_DATA]
    return contrib.input_metric(rows, form=form, **OPTIONS)

  return release


RELEASES = {
  'class_means': _head(heads.class_means), 'ridge': _head(heads.ridge),
  'second_moment': _metric('second_moment'), 'mean': _metric('mean'),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('dtype', ['float32', 'float64'])
@pytest.mark.parametrize('name', RELEASES)
def test_no_record_of_one_release_is_seen(name, dtype):
  head = name in ('class_means', 'ridge')
  form = {'x': jax.ShapeDtypeStruct((3,) if head else (2, 3), dtype)}
  if head:
    form['label'] = jax.ShapeDtypeStruct((), 'int64')
  else:
    form['y'] = jax.ShapeDtypeStruct((2,), dtype)
  odds = adversarial.in_form(form)
  zero = jax.tree.map(np.zeros_like, adversarial.ordinary(form))
  case = cases.OneRelease(RELEASES[name], cases.listed(form), zero)
  assert_unseen(case.offences(odds))


@pytest.mark.slow
def test_no_record_is_seen_in_the_checks_before_the_first_step():
  """And in the sentence that is reported; of the program as it is, untaped."""
  odds = [None, *(x.record for x in adversarial.records(FORM)[::60])]
  shown = []
  for record in odds:
    made = cases.make('prism', record=FORM)
    tape = harness.Tape()
    records = cases.listed(FORM)
    records[7] = record  # Drawn in the first step.

    def run(now, made=made, records=records):
      state = made.init(PARAMS)
      for batch in made.batches(state, adversarial.Source(records)):
        state = made.step(state, batch)
      now.note(made.statement(state))
      now.note(str(made.proofs))

    events = tape.observe(run).events
    assert not any(text.startswith('raised') for _, text in events), events
    # Programs that another run has compiled are not compiled again.
    shown.append([x for x in events if not x[1].startswith('jax')])
  assert all(x == shown[0] for x in shown)
