"""The tasks of the language-model benchmark: rows, answers, and their parts."""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Row = dict[str, Any]
# Signs are no part of it: `9-4` has none, and no answer here is negative.
NUMBER = re.compile(r'\d[\d,]*(?:\.\d+)?|\.\d+')


@dataclasses.dataclass(frozen=True)
class Task:
  """Rows as prompts and responses.

  Attributes:
    files: Of the training rows, and of the rows of the table.
    system: The system message, which says what is wanted.
    prompt: The user's message.
    response: What is to be learned.
    is_right: ``is_right(answer, row)``: whether a written answer is right.
    length: Tokens of a record, a declared constant: longer ones are cut, and
      left out where they are public.
    response_length: Tokens of a response, likewise.
    private_rows: Most private rows.
    tuning_rows: Rows that decide on rates and options.
    table_rows: Most rows of the table.
    new_tokens: Most tokens of a written answer; 0 where an answer counts as
      right if each of its tokens, the end included, is the likeliest.
  """

  files: tuple[str, str]
  system: str
  prompt: Callable[[Row], str]
  response: Callable[[Row], str]
  is_right: Callable[[str, Row], bool]
  length: int
  response_length: int
  private_rows: int
  tuning_rows: int
  table_rows: int
  new_tokens: int = 0


def number_in(text: str) -> float | None:
  """The last number of a text; None without one. Commas are of thousands."""
  found = NUMBER.findall(text)
  return float(found[-1].replace(',', '')) if found else None


def has_number(answer: str, row: Row) -> bool:
  """Whether the last number written is that of the row."""
  found, wanted = number_in(answer), number_in(str(row['answer']))
  return found is not None and found == wanted


def label_in(text: str) -> str:
  """A written label without what does not matter: case, a full stop."""
  return re.sub(r'[\s_]+', ' ', text).strip().rstrip('.').lower()


def equation_of(row: Row) -> str:
  """``X=(22.0-14.0)`` and ``8`` to ``22-14 = 8``."""
  text = re.sub(r'^\s*[xX]\s*=\s*', '', row['equation'])
  text = re.sub(r'\.0\b', '', text)
  if re.fullmatch(r'\([^()]*\)', text):
    text = text[1:-1]
  return f'{text} = {row["answer"]}'


def _sentiment(row: Row) -> str:
  return ('negative', 'positive')[int(row['label'])]


def _intent(row: Row) -> str:
  return row['label'].replace('_', ' ')


TASKS = {
  'sst2': Task(
    ('sst2/train.jsonl', 'sst2/validation.jsonl'),
    'Sentiment: positive or negative?',
    lambda row: row['text'],
    _sentiment,
    lambda answer, row: label_in(answer) == _sentiment(row),
    length=64, response_length=2,
    private_rows=2000, tuning_rows=200, table_rows=400,
  ),
  'mawps': Task(
    ('mawps/train.jsonl', 'mawps/test.jsonl'),
    'Answer as: equation = number',
    lambda row: row['question'],
    equation_of,
    has_number,
    length=88, response_length=20,
    private_rows=1200, tuning_rows=120, table_rows=160, new_tokens=24,
  ),
  'banking77': Task(
    ('banking77/train.jsonl', 'banking77/test.jsonl'),
    'Name the intent.',
    lambda row: row['text'],
    _intent,
    lambda answer, row: label_in(answer) == label_in(_intent(row)),
    length=56, response_length=9,
    private_rows=3000, tuning_rows=200, table_rows=400,
  ),
  'gsm8k': Task(
    ('gsm8k/train.jsonl', 'gsm8k/test.jsonl'),
    'Solve it. End with: #### number',
    lambda row: row['question'],
    lambda row: f'{row["rationale"]}\n#### {row["answer"]}',
    has_number,
    length=288, response_length=176,
    private_rows=7000, tuning_rows=100, table_rows=100, new_tokens=200,
  ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Parts:
  """Rows by what they are for; no prompt is in two of them."""

  private: list[Row]
  tuning: list[Row]
  table: list[Row]


def same(text: str) -> str:
  """What two prompts share that are the same up to case and punctuation."""
  return re.sub(r'\W+', ' ', text).strip().lower()


def split(task: Task, train: Sequence[Row], test: Sequence[Row]) -> Parts:
  """Shuffles by a fixed seed and deals the rows out.

  Rows of the table come from the test file; the others from the training file,
  less those that are in the table, and one of those that are the same.
  """
  seen: set[str] = set()

  def shuffled(rows: Sequence[Row]) -> list[Row]:
    found = []
    for i in np.random.default_rng(0).permutation(len(rows)):
      text = same(task.prompt(rows[i]))
      if text not in seen:
        seen.add(text)
        found.append(rows[i])
    return found

  # All of the test file is seen first, whether it is in the table or not.
  table = shuffled(test)[: task.table_rows]
  rest = shuffled(train)
  tuning, private = rest[: task.tuning_rows], rest[task.tuning_rows :]
  return Parts(private[: task.private_rows], tuning, table)


def read(name: str, folder: pathlib.Path) -> Parts:
  """The rows of a task from the folder of the data sets."""
  task = TASKS[name]
  train, test = (
    [json.loads(line) for line in (folder / file).open(encoding='utf-8')]
    for file in task.files
  )
  return split(task, train, test)


def conversation(task: Task, row: Row) -> list[dict[str, str]]:
  """A row as messages, the answer last."""
  return [
    {'role': 'system', 'content': task.system},
    {'role': 'user', 'content': task.prompt(row)},
    {'role': 'assistant', 'content': task.response(row)},
  ]
