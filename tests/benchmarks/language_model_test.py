"""Rows, answers and the cut through the language model, on tiny ones."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from benchmarks.accuracy import (
  language_layers,
  language_model,
  language_rows,
  language_runs,
  language_tables,
)
from prism_optax.finetune import data, instructions
from prism_optax.finetune.models import pretrained
from tests.finetune import language_models


@pytest.mark.parametrize(
  ('text', 'number'),
  [
    ('22-14 = 8', 8),
    ('She has 1,250 left.', 1250),
    ('so 3 * 2.50 = $7.50.', 7.5),
    ('#### 72<|im_end|>', 72),
    ('.5', 0.5),
    ('none at all', None),
    ('', None),
  ],
)
def test_the_number_of_an_answer_is_its_last(text, number):
  assert language_rows.number_in(text) == number


def test_no_prompt_is_in_two_parts():
  """Rows that are the same up to case and punctuation are one prompt."""
  task = dataclasses.replace(
    language_rows.TASKS['sst2'], private_rows=20, tuning_rows=6, table_rows=5
  )
  rows = [{'text': f'text {i % 40}', 'label': i % 2} for i in range(120)]
  test = [{'text': f'Text  {i}.', 'label': 0} for i in range(30, 44)]
  parts = language_rows.split(task, rows, test)
  prompts = [
    [language_rows.same(task.prompt(row)) for row in part]
    for part in (parts.private, parts.tuning, parts.table)
  ]
  assert [len(part) for part in prompts] == [20, 6, 5]
  everything = [*prompts[0], *prompts[1], *prompts[2]]
  assert len(set(everything)) == len(everything)
  # Also those of the test file that are not in the table.
  of_test = {language_rows.same(row['text']) for row in test}
  assert not of_test & {*prompts[0], *prompts[1]}
  assert set(prompts[2]) <= of_test


TASK = language_rows.Task(
  ('rows.jsonl', 'rows.jsonl'), 'two', lambda row: row['text'],
  lambda row: row['label'], lambda answer, row: answer == row['label'],
  length=14, response_length=3, private_rows=30, tuning_rows=4, table_rows=4,
)  # fmt: skip
ROWS = [
  {'text': text, 'label': label}
  for text in ('two plus three', 'two', 'three is', 'plus plus')
  for label in ('five', 'four five')
]


@pytest.fixture(scope='module')
def source(tmp_path_factory):
  folder = language_models.write(tmp_path_factory.mktemp('model'))
  return pretrained.find(str(folder))


@pytest.fixture(scope='module')
def model(source):
  return language_layers.load(source, layers=2, rank=2)


# Of three layers: one, two, and nothing below.
@pytest.mark.parametrize('layers', [1, 2, 3])
def test_the_top_on_what_is_below_is_the_whole(layers, source, tmp_path):
  """Losses of responses, with adapters that change something.

  What is kept in between is bfloat16: eight bits.
  """
  model = language_layers.load(source, layers, rank=2)
  examples = language_layers.encode(model, TASK, ROWS, tmp_path)
  talks = [language_rows.conversation(TASK, row) for row in ROWS]
  ids, _ = instructions.encode(talks, model.talk, TASK.length)
  # Two answers have one word and two have two, and each an end.
  assert set((examples.labels != data.BLANK).sum(1)) == {2, 3}
  rng = np.random.default_rng(0)
  params = jax.tree.map(
    lambda x: rng.normal(size=x.shape).astype(np.float32) / 4, model.params
  )

  @jax.jit
  def both(params, frozen, batch, ids):
    top = language_layers.nnx.merge(model.graphdef, params, frozen[0])
    whole = language_layers.nnx.clone(model.whole)
    whole.stacks[-1] = top.stacks[0]
    losses = language_layers.row_losses(model.graphdef, TASK.response_length)
    return losses(params, frozen, batch), whole(ids)

  (losses, _, weights), logits = both(params, model.frozen, examples, ids)
  expected = -jax.nn.log_softmax(logits)
  for i, labels in enumerate(examples.labels):
    places = np.flatnonzero(labels != data.BLANK)
    assert weights[i].sum() == len(places)
    np.testing.assert_allclose(
      losses[i, : len(places)], expected[i, places, labels[places]],
      rtol=0.02, atol=0.02,
    )  # fmt: skip


@pytest.mark.parametrize('method', ['prism+rows', 'dp-adamw', 'adamw'])
@pytest.mark.slow
def test_a_run_trains(method, model, tmp_path, monkeypatch):
  """Over adapters of one layer, measured along the way."""
  del model
  folder = language_models.write(tmp_path / 'model')
  (tmp_path / 'rows.jsonl').write_text(
    '\n'.join(map(json.dumps, ROWS)) + '\n', 'utf-8'
  )
  many = [{'text': f'two {"plus " * i}', 'label': 'five'} for i in range(60)]
  monkeypatch.setattr(
    language_rows, 'split',
    lambda task, *_: language_rows.Parts(many, ROWS[:4], ROWS[4:]),
  )  # fmt: skip
  monkeypatch.setitem(language_rows.TASKS, 'sst2', TASK)
  setting = language_runs.Setting(
    'sst2', method, None if method == 'adamw' else 8.0, 0, 0.03, batch=16,
    steps=4, layers=1,
  )  # fmt: skip
  source = language_runs.Source(str(folder), tmp_path, tmp_path / 'cache')
  found = language_runs.execute(setting, source)
  assert [x['step'] for x in found['curve']] == [2, 4]
  assert found['curve'][1]['perplexity'] != found['curve'][0]['perplexity']
  assert len(found['exact']) == 4


class Found:
  """Rows of made-up perplexities, in the place of a store."""

  def __init__(self, perplexity):
    self.perplexity, self.rows = perplexity, {}

  def find(self, setting):
    return self.rows.get(json.dumps(setting))

  def run(self, template, methods, tuning, seeds):
    """What a worker does, in its order."""
    order = []
    while True:
      wanted = language_model.plan(
        self.find, ['sst2-3'], template, methods, tuning, seeds
      )
      setting = next((x for x in wanted if self.find(x) is None), None)
      if setting is None:
        return order
      order.append(language_runs.Setting(**setting))
      found = {'tuning perplexity': self.perplexity(order[-1])}
      self.rows[json.dumps(setting)] = found


def test_tuning_takes_the_best_of_each_change():
  """Seven runs for each private method, and a rate where the last is best."""

  def perplexity(setting):
    if setting.b1 == 0.5:
      return 2.0
    return 3.0 + setting.weight_decay + abs(setting.rate - 1e-2)

  methods = list(language_model.RATES)
  order = Found(perplexity).run(
    language_runs.Setting(), methods, language_model.Tuning(), 3
  )
  tuning = [x for x in order if x.is_tuning]
  finals = [x for x in order if not x.is_tuning]
  counts = [sum(x.method == m for x in tuning) for m in methods]
  assert counts == [8, 7, 4]
  assert min(x.rate for x in tuning if x.method == 'prism') == 3e-3
  assert {x.epsilon for x in tuning} == {8.0, None}
  assert finals[0].method == 'zero-shot'
  assert {x.method for x in finals[1:]} == set(methods)
  private = [x for x in finals if x.method == 'prism']
  assert sorted((x.epsilon, x.seed) for x in private) == [
    (3.0, 0), (3.0, 1), (3.0, 2)
  ]  # fmt: skip
  chosen = next(x for x in finals if x.method == 'dp-adamw')
  assert (chosen.rate, chosen.b1, chosen.weight_decay) == (1e-2, 0.5, 0.1)
  assert language_model.TUNING_SEED not in {x.seed for x in finals}


def test_tables_have_the_tuned_runs_and_paired_differences():
  """A rate that tuning did not choose is not in them."""
  base = language_runs.Setting('sst2', 'prism', 8.0, 0, 0.1)

  def row(run, nats, **rest):
    losses = np.full(4, nats, np.float16) + np.arange(4, dtype=np.float16) / 8
    scores = {
      'losses': losses.tobytes().hex(), 'exact': '0110', 'tokens': 8,
    }  # fmt: skip
    told = {
      k: v
      for k, v in dataclasses.asdict(run).items()
      if language_runs.DEFAULTS.get(k, ...) != v
    }
    return {**told, **scores, **rest}

  rows = []
  for method, shift in (
    ('prism', 0.0), ('dp-adamw', 0.5), ('prism+rows', -0.5)
  ):  # fmt: skip
    for rate, perplexity in ((0.1, 2.0), (0.3, 3.0)):
      run = dataclasses.replace(base, method=method, rate=rate)
      tuning = dataclasses.replace(run, is_tuning=True, seed=100)
      rows.append(row(tuning, 0, **{'tuning perplexity': perplexity}))
      rows += [
        row(dataclasses.replace(run, seed=seed), rate * 10 + shift + seed / 4)
        for seed in (0, 1)
      ]
  lines = language_tables.table(rows).splitlines()
  assert len(lines) == 2 + 3 + 2
  # Two tokens a row: (1 + 1/8 + 3/16) / 2 nats each.
  assert f'| 8 | 2 | {np.exp(0.65625):.3f} ±' in lines[2]
  assert '| `prism` less DP-AdamW | 8 | | -0.250 ± ' in lines[5]
  assert 'row scales, less DP-AdamW | 8 | | -0.500 ± ' in lines[6]
  start = dataclasses.replace(base, method='zero-shot', epsilon=None)
  short = [row(start, 9.0), *rows]
  longer = [{**row, 'steps': 240} for row in short]
  both = language_tables.table(short + longer)
  assert '| SST-2, 24 steps | ' in both
  assert '| SST-2, 240 steps | ' in both
  assert '| sst2 | 24 | `prism` | 0.1 |' in language_tables.chosen(rows)
