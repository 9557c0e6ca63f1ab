"""What a finished run is for: labels of texts, responses to prompts."""

import argparse
import functools
import itertools
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from . import command_line, data, files, finished, instructions
from .models import chat, classifier, generation, minilm


def predict(command: argparse.Namespace) -> None:
  """The command ``predict``: one JSON object for each row, in order.

  Raises:
    ValueError: If the run is not finished, or a row has no text or prompt.
  """
  run = finished.find(command.run, 'classify', 'instruct')
  used = run.options
  for name in ('text_column', 'prompt_column'):
    if given := getattr(command, name):
      setattr(used, name, given)
  is_text = used.task == 'classify'
  parse = data.text if is_text else instructions.prompt
  rows: list[Any] = files.read_public(
    command.data, functools.partial(parse, used=used), '--data'
  )
  answer = _labels if is_text else _responses
  lines = map(json.dumps, answer(run, rows, command))
  if command.output is None:
    for line in lines:
      print(line, flush=True)
    return
  path = pathlib.Path(command.output)
  files.require_writable(path.parent)
  files.write(path, ''.join(f'{line}\n' for line in lines))
  print(f'{len(rows)} rows in {path}.')


def _labels(
  run: finished.Finished, texts: list[str], command: argparse.Namespace
) -> Iterator[dict[str, Any]]:
  model, source = finished.model(run)
  ids = minilm.tokenize(source.where, texts, run.options.max_length)
  names = run.options.labels
  found = probabilities(model, ids, command.batch_size)
  for text, row in zip(texts, found, strict=True):
    shares = [round(float(share), 6) for share in row]
    yield {
      run.options.text_column: text,
      'label': names[row.argmax()],
      'probabilities': dict(zip(names, shares, strict=True)),
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
  run: finished.Finished,
  prompts: list[instructions.Conversation],
  command: argparse.Namespace,
) -> Iterator[dict[str, str]]:
  found = responses(run, prompts, command)
  for messages, text in zip(prompts, found, strict=True):
    yield {
      run.options.prompt_column: messages[-1]['content'] if messages else '',
      run.options.response_column: text.strip(),
    }


def responses(
  run: finished.Finished,
  prompts: Sequence[instructions.Conversation],
  used: argparse.Namespace,
) -> Iterator[str]:
  """What a language model answers.

  Args:
    run: Of the task ``instruct``.
    prompts: The messages before each answer.
    used: Options of ``predict``.
  """
  model, source = finished.model(run, before=used.before)
  talk = chat.Chat(source)
  generator = generation.Generator(model, talk.stops)
  ids = [talk.prompt(messages) for messages in prompts]
  drawn = {'temperature': used.temperature, 'seed': used.seed}
  for start in range(0, len(ids), used.batch_size):
    some = ids[start : start + used.batch_size]
    answers = generator.answers(some, used.max_new_tokens, **drawn)
    yield from map(talk.decode, answers)


def per_class(run: finished.Finished) -> list[tuple[str, int, float]]:
  """``(label, rows, accuracy)`` of each class of the evaluation file.

  Raises:
    ValueError: If the file or the frozen weights are not there any more.
  """
  used = run.options
  public = data.read_public(used)
  model, source = finished.model(run)
  ids = minilm.tokenize(source.where, public.texts, used.max_length)
  found = np.array([x.argmax() for x in probabilities(model, ids, 64)])
  labels = data.encode_labels(public.labels, used.labels)
  return [
    (name, rows.sum(), (found[rows] == i).mean())
    for i, name in enumerate(used.labels)
    for rows in [labels == i]
    if rows.any()
  ]


def spoken(run: finished.Finished, count: int) -> list[tuple[str, ...]]:
  """Of the first public rows prompt, response, and answers before and after.

  Raises:
    ValueError: As :func:`per_class`.
  """
  rows = instructions.read_public(run.options)[:count]
  prompts = [row[:-1] for row in rows]
  asked = ['predict', '', '--data', '']
  before, after = (
    [*responses(run, prompts, command_line.parse([*asked, *more]))]
    for more in (['--before'], [])
  )
  questions = [row[-1]['content'] if row else '' for row in prompts]
  expected = [row[-1]['content'] for row in rows]
  return [*zip(questions, expected, before, after, strict=True)]


def talk(command: argparse.Namespace) -> None:
  """The command ``chat``: reads questions until the input ends.

  Raises:
    ValueError: If the run is not finished or not of a language model.
  """
  run = finished.find(command.run, 'instruct')
  model, source = finished.model(run, before=command.before)
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
    ids, shown = [], ''
    for tokens in generator.stream(
      [template.prompt(messages)],
      command.max_new_tokens,
      temperature=command.temperature,
      seed=command.seed + turn,
    ):
      ids.append(tokens[0])
      text = template.decode(ids)
      # A character of several tokens is shown when it is whole.
      if not text.endswith('\ufffd'):
        print(text[len(shown) :], end='', flush=True)
        shown = text
    print()
    messages.append({'role': 'assistant', 'content': template.decode(ids)})
