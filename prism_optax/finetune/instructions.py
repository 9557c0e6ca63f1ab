"""Prompts and responses: files to tokens, for a causal language model.

One record is one conversation, and one unit of privacy. What is learned is its
last answer: the tokens before it are only seen.
"""

import argparse
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import data, files
from .models import chat

ROLES = ('system', 'user', 'assistant', 'tool')
OPTIONS = '--prompt-column and --response-column'
Conversation = list[dict[str, str]]


def conversation(row: files.Entries, used: argparse.Namespace) -> Conversation:
  """The messages of one row, an answer of the assistant last.

  Raises:
    ValueError: If the columns are missing or hold something else.
  """
  column = used.messages_column
  if column not in row:
    response = files.entry(row, used.response_column, OPTIONS)
    return [*prompt(row, used), {'role': 'assistant', 'content': response}]
  messages = _messages(row[column], column)
  if not messages or messages[-1]['role'] != 'assistant':
    raise ValueError(f'the last of {column!r} must be of the assistant')
  return messages


def prompt(row: files.Entries, used: argparse.Namespace) -> Conversation:
  """The messages before the answer, which need not be there.

  Raises:
    ValueError: As :func:`conversation`.
  """
  column = used.messages_column
  if column not in row:
    text = files.entry(row, used.prompt_column, OPTIONS)
    return [{'role': 'user', 'content': text}]
  messages = _messages(row[column], column)
  answered = messages and messages[-1]['role'] == 'assistant'
  return messages[:-1] if answered else messages


def _messages(stored: Any, column: str) -> Conversation:
  def fits(message: Any) -> bool:
    return (
      isinstance(message, dict)
      and message.get('role') in ROLES
      and isinstance(message.get('content'), str)
    )

  if not isinstance(stored, list) or not all(map(fits, stored)):
    raise ValueError(
      f'{column!r} must be a list of objects with a role of {ROLES} and a '
      'content'
    )
  return [{key: x[key] for key in ('role', 'content')} for x in stored]


def read_public(used: argparse.Namespace) -> list[Conversation]:
  """Reads ``--eval``; see ``files.read_public``."""
  parse = functools.partial(conversation, used=used)
  return files.read_public(used.eval, parse)


def read_private(used: argparse.Namespace) -> Sequence[Conversation | None]:
  """Reads ``--data``; see ``files.read_private``."""
  expected = (
    f'the columns {used.prompt_column!r} and {used.response_column!r} '
    f'(strings) or {used.messages_column!r}; see {OPTIONS}'
  )
  parse = functools.partial(conversation, used=used)
  return files.read_private(used.data, parse, expected)


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
