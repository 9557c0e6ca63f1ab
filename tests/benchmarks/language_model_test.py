"""Rows, answers and the cut through the language model, on tiny ones."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.accuracy import language_layers, language_rows, language_runs
from prism_optax.finetune import data, instructions
from tests.finetune import conftest


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


# Of three layers: one, two, and nothing below.
@pytest.mark.slow
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


@pytest.mark.parametrize('method', ['prism', 'dp-adamw', 'adamw'])
@pytest.mark.slow
def test_a_run_trains(method, source, tmp_path, monkeypatch):
  """Over adapters of one layer."""
  conftest.write_lines(tmp_path / 'rows.jsonl', ROWS)
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
  files = language_runs.Source(str(source.where), tmp_path, tmp_path / 'cache')
  untrained = dataclasses.replace(setting, method='zero-shot', epsilon=None)
  found, before = (language_runs.execute(x, files) for x in
                   (setting, untrained))  # fmt: skip
  assert found['tuning perplexity'] != before['tuning perplexity']
  assert len(found['exact']) == 4
