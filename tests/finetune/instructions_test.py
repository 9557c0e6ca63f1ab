"""Conversations: strict and total reading, tokens, and the loss of a record."""

import dataclasses
import json
import re

import jax
import numpy as np
import optax
import pytest

from prism_optax.finetune import data, files, instructions, training
from prism_optax.finetune.models import chat, classifier, llama_files, minilm
from tests import cases
from tests.core import seams
from tests.finetune import conftest

COLUMNS = conftest.columns('')
GOOD = {'prompt': 'two plus three', 'response': 'five'}
TALK = {
  'messages': [
    {'role': 'system', 'content': 'is'},
    {'role': 'user', 'content': 'two'},
    {'role': 'assistant', 'content': 'four'},
  ]
}


def test_rows_of_both_forms_and_both_kinds_of_file(tmp_path, capsys):
  lines = conftest.write_lines(tmp_path / 'a.jsonl', [GOOD, TALK])
  first, second = instructions.read_public(conftest.columns(lines))
  assert [m['content'] for m in first] == ['two plus three', 'five']
  assert second == TALK['messages']
  # What is asked, whether there is an answer or not.
  asked = {'messages': TALK['messages'][:2]}
  for row in (TALK, asked):
    assert instructions.prompt(row, COLUMNS) == asked['messages']
  path = tmp_path / 'a.csv'
  # A byte order mark, as Excel has it; a comma, a line break and bytes of
  # another coding in a long text; a row that is too long, and one too short.
  text = b'"five, I\r\nsay%b",two,surplus\r\nis\r\n' % (b'\xff' * 200_000)
  path.write_bytes(b'\xef\xbb\xbfa;b,prompt\r\n' + text)
  assert files.read_public(str(path), dict) == [
    {'a;b': 'five, I\r\nsay' + '\ufffd' * 200_000, 'prompt': 'two'},
    {'a;b': 'is'},
  ]
  assert ': 1 rows hold bytes that are no UTF-8' in capsys.readouterr().err


@pytest.mark.parametrize(
  ('row', 'message'),
  [
    ('{"prompt": ', r'row 2: no JSON'),
    ({'prompt': 'a'}, r"row 2: no column 'response', only \['prompt'\]"),
    ({'prompt': 3, 'response': 'a'}, r"row 2: 'prompt' must be a string"),
    ({'messages': 'a'}, r"row 2: 'messages' must be a list"),
    ({'messages': [TALK['messages'][0], {'role': 'x', 'content': ''}]}, 'role'),
    ({'messages': [{'role': 'user', 'content': 3}]}, 'a role of .* and a cont'),
    ({'messages': TALK['messages'][:2]}, r'must be of the assistant'),
    ({'messages': []}, r'must be of the assistant'),
  ],
)
def test_a_bad_public_row_is_named_and_a_private_one_is_blank(
  tmp_path, source, row, message
):
  path = conftest.write_lines(tmp_path / 'a.jsonl', [GOOD, row])
  with pytest.raises(ValueError, match=message):
    instructions.read_public(conftest.columns(path))
  private = instructions.read_private(conftest.columns(path))
  examples = instructions.encode(private, chat.Chat(source), 16)
  np.testing.assert_array_equal(
    (examples.labels != data.BLANK).any(axis=1), [True, False]
  )


@pytest.mark.parametrize(
  ('name', 'text', 'message'),
  [
    ('a.jsonl', 'prompt,response\na,b\n', 'Is it a CSV .* in .csv or .par'),
    ('a.csv', 'two plus three,five\na,b\n', 'the names of the columns'),
    ('a.jsonl', '[]\n{"q": "a"}\n', r'no row has .*--response-column.$'),
    ('a.jsonl', '', 'no rows'),
    ('a.jsonl', '[{"prompt": "a"},\n{"prompt": "b"}]', 'one JSON array'),
    ('a.jsonl', '[{"prompt": "a"},\n', 'No line of it'),
    ('a.csv', 'prompt;response\na;b\n', "commas .* got ';' in 'prompt;resp"),
  ],
)
def test_a_file_of_another_form_gets_a_hint(tmp_path, name, text, message):
  path = tmp_path / name
  path.write_text(text)
  with pytest.raises(ValueError, match=message):
    instructions.read_private(conftest.columns(path))


def test_a_template_may_change_what_came_before_or_be_missing(source):
  odd = (
    '  {% if tools == documents == none %}\n{{messages[-1].content}}{% endif %}'
  )
  for template, want in (
    ([{'name': 'default', 'template': odd}], ('two', 'four</s>')),
    (None, ('System: is\nUser: two\nAssistant: ', 'four\n</s>')),
  ):
    config = source.tokenizer_config | {'chat_template': template}
    talk = chat.Chat(dataclasses.replace(source, tokenizer_config=config))
    assert talk.prompt_and_answer(TALK['messages']) == want


def test_a_prompt_of_no_token_teaches_nothing(source):
  last = [{'name': 'default', 'template': "{{ messages[-1]['content'] }}"}]
  config = source.tokenizer_config | {'chat_template': last}
  talk = chat.Chat(dataclasses.replace(source, tokenizer_config=config))
  answer = {'role': 'assistant', 'content': 'five'}
  rows = [[{'role': 'user', 'content': x}, answer] for x in ('is', '')]
  _, labels = instructions.encode(rows, talk, 4)
  assert list((labels != data.BLANK).sum(axis=1)) == [2, 0]


def test_only_the_response_is_learned_up_to_the_limit(source):
  talk = chat.Chat(source)
  conversation = instructions.conversation(GOOD, COLUMNS)
  prompt, answer = map(talk.encode, talk.prompt_and_answer(conversation))
  whole = prompt + answer
  assert talk.decode(answer) == 'five'
  assert whole[-1] in talk.stops  # When to stop is learned as well.

  def encoded(length):
    inputs, labels = instructions.encode([conversation], talk, length)
    return inputs[0], labels[0]

  inputs, labels = encoded(16)
  np.testing.assert_array_equal(inputs[: len(whole)], whole)
  assert not inputs[len(whole) :].any()
  learned = np.flatnonzero(labels != data.BLANK)
  np.testing.assert_array_equal(labels[learned], answer)
  # Each token is foreseen from the one before.
  np.testing.assert_array_equal(learned + 1, len(prompt) + np.arange(2))
  # The last label needs no room of its own.
  assert (encoded(len(whole) - 1)[1] != data.BLANK).sum() == 2
  assert (encoded(len(prompt))[1] != data.BLANK).sum() == 1
  assert (encoded(len(prompt) - 1)[1] != data.BLANK).sum() == 0


def test_no_record_can_stop_the_reading(tmp_path, source):
  rows = [GOOD, *('[' * 100_000, '9' * 10_000, 'null', '"x"')]
  rows += [json.dumps({'prompt': '\ud800', 'response': '\ud800 five'})]
  path = conftest.write_lines(tmp_path / 'a.jsonl', rows)
  private = instructions.read_private(conftest.columns(path))
  examples = instructions.encode(private, chat.Chat(source), 16)
  assert examples.inputs.shape == (len(rows), 16)
  blank = (examples.labels == data.BLANK).all(axis=1)
  np.testing.assert_array_equal(blank, [0, 1, 1, 1, 1, 0])


@pytest.fixture(scope='module')
def problem(source):
  """A model with adapters and five records of two lengths."""
  model = llama_files.load(source, minilm.LoraConfig(2, top_layers=2))
  parts = classifier.split(model)
  conversations = [
    instructions.conversation(
      {'prompt': 'two plus two', 'response': 'is four ' * (1 + i % 2)}, COLUMNS
    )
    for i in range(5)
  ]
  examples = instructions.encode(conversations, chat.Chat(source), 14)
  return parts, examples


@pytest.mark.slow
def test_the_loss_is_a_sum_over_the_response_of_each_record(problem):
  (graphdef, params, frozen), examples = problem
  loss = jax.jit(training.make_loss(graphdef, 7))
  values = [
    float(loss(params, frozen, *row)[0]) for row in zip(*examples, strict=True)
  ]
  # Long responses count for more, whatever else is in the batch.
  assert values[1] > 1.5 * values[0]
  nothing = np.full_like(examples.labels[0], data.BLANK)
  assert float(loss(params, frozen, examples.inputs[0], nothing)[0]) == 0.0
  evaluate = training.make_evaluate(graphdef, examples, chunk=3)
  found = evaluate(params, frozen)
  tokens = (examples.labels != data.BLANK).sum()
  np.testing.assert_allclose(
    found['eval_loss'], 7 * np.sum(values) / tokens, rtol=1e-5
  )
  assert found['eval_perplexity'] == pytest.approx(np.exp(found['eval_loss']))


@pytest.mark.slow
def test_no_gradient_of_a_frozen_matrix_is_made(problem):
  """Not for one example and not for all: only those of the adapters."""
  (graphdef, params, frozen), examples = problem
  private = cases.make(
    optax.adamw(1e-3), loss=training.make_loss(graphdef, 14), params=params,
    has_aux=True, expected_batch_size=5, dataset_size=5, steps=1, delta=1e-3,
  )  # fmt: skip
  state = private.init(params)
  (batch,) = private.batches(state, examples)
  program = str(
    jax.make_jaxpr(seams.gradients_of(private))(params, frozen, batch.examples)
  )
  shapes = set(re.findall(r'\[([\d,]+)\]', program))
  assert '5,2,16,2' in shapes  # Of the adapters of the query, each example's.
  inner = {'16,24', '24,16', '16,8'}  # Of the gate and up, down, key and value.
  assert inner <= shapes
  assert not {f'5,{rows}{shape}' for rows in ('', '2,') for shape in inner} & (
    shapes
  )
