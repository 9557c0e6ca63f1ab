"""Prompts and responses: files to tokens, for a causal language model.

One record is one conversation, and one unit of privacy. What is learned is its
last answer: the tokens before it are only seen. As in ``data``, the private
file is read by a total function: a record that cannot be used keeps its place
and has a zero gradient.
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from . import data, files
from .models import chat

ROLES = ('system', 'user', 'assistant', 'tool')
Conversation = list[dict[str, str]]


class Columns(NamedTuple):
  """Where a row has its conversation.

  Attributes:
    prompt: Key of the prompt, a string.
    response: Key of the response, a string.
    messages: Key of a list of objects with ``role`` and ``content``, which is
      used instead where a row has it.
  """

  prompt: str = 'prompt'
  response: str = 'response'
  messages: str = 'messages'


def columns(options: argparse.Namespace) -> Columns:
  return Columns(
    options.prompt_column, options.response_column, options.messages_column
  )


def conversation(row: Mapping[str, Any], columns: Columns) -> Conversation:
  """The messages of one row, an answer of the assistant last.

  Raises:
    ValueError: If the columns are missing or hold something else; the message
      begins with a small letter and has no full stop.
  """
  if columns.messages in row:
    messages = row[columns.messages]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
      raise ValueError(
        f'{columns.messages!r} must be a list of objects with a role of '
        f'{ROLES} and a content'
      )
    if not messages or messages[-1]['role'] != 'assistant':
      raise ValueError(
        f'the last of {columns.messages!r} must be of the assistant'
      )
    return [{k: m[k] for k in ('role', 'content')} for m in messages]
  for column in (columns.prompt, columns.response):
    if column not in row:
      raise ValueError(
        f'no column {column!r}, only {sorted(row)}; see --prompt-column and '
        f'--response-column'
      )
    if not isinstance(row[column], str):
      raise ValueError(f'{column!r} must be a string, got {row[column]!r}')
  return [
    {'role': 'user', 'content': row[columns.prompt]},
    {'role': 'assistant', 'content': row[columns.response]},
  ]


def _is_message(message: Any) -> bool:
  return (
    isinstance(message, dict)
    and message.get('role') in ROLES
    and isinstance(message.get('content'), str)
  )


def read_public(
  path: str, columns: Columns, option: str = '--eval'
) -> list[Conversation]:
  """Reads a file declared public.

  Raises:
    ValueError: If the file is absent or empty, or a row is no conversation;
      with the row.
  """
  found = []
  rows = files.read_public(path, option)
  for number, (row, problem) in enumerate(rows, 1):
    try:
      if row is None:
        raise ValueError(problem + files.hint(path, rows).rstrip('.'))
      found.append(conversation(row, columns))
    except ValueError as error:
      raise ValueError(f'{option} {path}, row {number}: {error}.') from error
  if not found:
    raise ValueError(f'{option} {path}: the file has no rows.')
  return found


def read_private(path: str, columns: Columns) -> list[Conversation | None]:
  """Reads private records; None for one that cannot be used.

  Raises:
    ValueError: If the file is absent, or not a single row has the columns.
  """
  rows, found = files.read(path, '--data'), []
  for row, _ in rows:
    try:
      found.append(None if row is None else conversation(row, columns))
    except ValueError:
      found.append(None)
  if all(x is None for x in found):
    raise ValueError(
      f'--data {path}: no row has the columns {columns.prompt!r} and '
      f'{columns.response!r} (strings) or {columns.messages!r}; see '
      f'--prompt-column and --response-column.{files.hint(path, rows)}'
    )
  return found


def encode(
  conversations: Sequence[Conversation | None], talk: chat.Chat, length: int
) -> data.Examples:
  """Conversations to tokens and the tokens that are to be learned.

  Args:
    conversations: None for a record that contributes nothing. One that the
      template refuses is such a record too.
    talk: The template and the tokenizer.
    length: Number of columns, a declared constant. What is beyond is cut off;
      a record whose prompt fills them contributes nothing.

  Returns:
    ``inputs`` (rows, length), padded with 0 at the end, and ``labels`` (rows,
    length): the token after each one, ``data.BLANK`` outside of the response.
  """
  shape = len(conversations), length
  inputs = np.zeros(shape, np.int32)
  labels = np.full(shape, data.BLANK, np.int32)
  for row, messages in enumerate(conversations):
    try:
      # Two texts: the model will see the prompt alone.
      prompt, answer = map(talk.encode, talk.prompt_and_answer(messages or []))
    except ValueError:
      continue
    tokens = (prompt + answer)[: length + 1]
    first, last = len(prompt), len(tokens)
    if not 0 < first < last:
      continue
    inputs[row, : min(last, length)] = tokens[:length]
    labels[row, first - 1 : last - 1] = tokens[first:]
  return data.Examples(inputs, labels)
