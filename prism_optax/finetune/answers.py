"""What a finished run is for: labels of texts, responses to prompts."""

import argparse
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from . import files, finished
from .models import chat, classifier, generation, minilm


def predict(command: argparse.Namespace) -> None:
  """The command ``predict``: one JSON object for each row, in order.

  Raises:
    ValueError: If the run is not finished, or a row has no text or prompt.
  """
  run = finished.find(command.run, 'classify', 'instruct')
  rows = files.read(command.data, '--data')
  for name in ('text_column', 'prompt_column'):
    if given := getattr(command, name):
      setattr(run.options, name, given)
  answer = _labels if run.options.task == 'classify' else _responses
  found = answer(run, command, rows)
  if command.output is None:
    for each in found:
      print(json.dumps(each), flush=True)
    return
  path = pathlib.Path(command.output)
  files.require_writable(path.parent)
  with (
    files.replacing(path) as temporary,
    temporary.open('w', encoding='utf-8') as file,
  ):
    file.writelines(json.dumps(each) + '\n' for each in found)
  print(f'{len(rows)} rows in {path}.')


def _field(rows: list[files.Row], column: str, command: Any) -> list[Any]:
  """One column.

  Raises:
    ValueError: If a row lacks it, with the row.
  """
  for number, (row, problem) in enumerate(rows, 1):
    if row is None or not isinstance(row.get(column), str):
      problem = problem or f'expected a string in the column {column!r}'
      raise ValueError(f'--data {command.data}, row {number}: {problem}.')
  return [(row.entries or {})[column] for row in rows]


def _labels(
  run: finished.Finished, command: argparse.Namespace, rows: list[files.Row]
) -> Iterator[dict[str, Any]]:
  texts = _field(rows, run.options.text_column, command)
  model, folder = finished.text_classifier(run)
  ids = minilm.tokenize(folder, texts, run.options.max_length)
  names = run.options.labels
  found = probabilities(model, ids, command.batch_size)
  for text, row in zip(texts, found, strict=True):
    yield {
      run.options.text_column: text,
      'label': names[int(row.argmax())],
      'probabilities': {
        name: round(float(p), 6) for name, p in zip(names, row, strict=True)
      },
    }


def probabilities(
  model: classifier.Classifier, ids: np.ndarray, size: int
) -> Iterator[np.ndarray]:
  """Of the classes, for each row of ids; so many rows at once."""
  apply = nnx.jit(lambda model, ids: jax.nn.softmax(model(ids)))
  for start in range(0, len(ids), size):
    part = ids[start : start + size]
    # One shape: the last batch is filled up.
    batch = np.resize(part, (size, ids.shape[1]))
    yield from np.asarray(apply(model, batch))[: len(part)]


def _responses(
  run: finished.Finished, command: argparse.Namespace, rows: list[files.Row]
) -> Iterator[dict[str, Any]]:
  used = run.options
  conversations = [_prompt(row.entries, used) for row in rows]
  if None in conversations:
    _field(rows, used.prompt_column, command)
  model, source = finished.language_model(run, before=command.before)
  talk = chat.Chat(source)
  generator = generation.Generator(model, talk.stops)
  prompts = [
    talk.encode(talk.text(messages, answer_next=True))
    for messages in conversations
    if messages is not None
  ]
  for start in range(0, len(prompts), command.batch_size):
    answers = generator.answers(
      prompts[start : start + command.batch_size],
      command.max_new_tokens,
      temperature=command.temperature,
      seed=command.seed,
    )
    for messages, ids in zip(conversations[start:], answers, strict=False):
      yield {
        used.prompt_column: messages[-1]['content'] if messages else '',
        used.response_column: talk.decode(ids).strip(),
      }


def _prompt(
  row: Mapping[str, Any] | None, used: Any
) -> list[dict[str, str]] | None:
  """The messages before the answer."""
  if row is not None and isinstance(row.get(used.messages_column), list):
    messages = row[used.messages_column]
    if messages and messages[-1].get('role') == 'assistant':
      messages = messages[:-1]
    return messages
  if row is not None and isinstance(row.get(used.prompt_column), str):
    return [{'role': 'user', 'content': row[used.prompt_column]}]
  return None


def talk(command: argparse.Namespace) -> None:
  """The command ``chat``: reads questions until the input ends.

  Raises:
    ValueError: If the run is not finished or not of a language model.
  """
  run = finished.find(command.run, 'instruct')
  model, source = finished.language_model(run, before=command.before)
  template = chat.Chat(source)
  generator = generation.Generator(model, template.stops)
  print(f'{source.name}: {run.summary["statement"]}.', file=sys.stderr)
  print('An empty line begins anew; Ctrl-D ends.', file=sys.stderr)
  system = [{'role': 'system', 'content': command.system}]
  beginning = system if command.system else []
  messages = list(beginning)
  for turn in itertools.count():
    try:
      question = input('> ' if sys.stdin.isatty() else '').strip()
    except EOFError:
      return
    if not question:
      messages = list(beginning)
      continue
    messages.append({'role': 'user', 'content': question})
    ids: list[int] = []
    shown = ''
    for tokens in generator.stream(
      [template.encode(template.text(messages, answer_next=True))],
      command.max_new_tokens,
      temperature=command.temperature,
      seed=command.seed + turn,
    ):
      ids.append(int(tokens[0]))
      text = template.decode(ids)
      # A character of several tokens is shown when it is whole.
      if not text.endswith('\ufffd'):
        print(text[len(shown) :], end='', flush=True)
        shown = text
    print()
    messages.append({'role': 'assistant', 'content': template.decode(ids)})
