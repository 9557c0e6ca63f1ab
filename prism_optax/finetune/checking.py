"""What of a private file can be used: for its owner, and NOT private."""

import argparse
import collections
from typing import Any

import numpy as np

from . import data, files, instructions
from .models import chat, pretrained

WARNING = (
  'NOT PRIVATE: these are exact counts of private rows. Keep them to yourself; '
  'what you change by them is not covered by the guarantee of a later run.'
)


def check_data(command: argparse.Namespace) -> None:
  """The command ``check-data``: prints counts.

  Raises:
    ValueError: If there is no such file, or no labels are known.
  """
  unknown = command.eval is None and command.labels is None
  if command.task == 'classify' and unknown:
    raise ValueError('check-data needs --labels or --eval: which labels count?')
  print(WARNING)
  rows = files.read(command.data, '--data')
  readable = [row.entries for row in rows if row.entries is not None]
  unread = len(rows) - len(readable)
  counts = collections.Counter({'rows': len(rows)})
  counts['rows that cannot be read: zero gradient'] = unread
  counts['rows with bytes that are no UTF-8'] = files.undecoded(rows)
  if command.eval is not None:
    public = {repr(row) for row in files.read(command.eval, '--eval')}
    counts['rows that are in --eval too'] = sum(repr(x) in public for x in rows)
  check = _labels if command.task == 'classify' else _conversations
  check(command, readable, counts)
  for what, count in (+counts).items():  # Only what there is.
    print(f'{count:>8}  {what}')


def _labels(
  command: argparse.Namespace, rows: list[Any], counts: collections.Counter[str]
) -> None:
  public = () if command.eval is None else data.read_public(command).labels
  names = data.label_set(command.labels, public)
  columns = command.text_column, command.label_column
  for row in rows:
    text, label = (row.get(column) for column in columns)
    if not isinstance(text, str):
      counts[f'rows without a string in {columns[0]!r}: zero gradient'] += 1
    elif type(label) not in (str, int):
      counts[f'rows without a label in {columns[1]!r}: zero gradient'] += 1
    elif str(label) not in names:
      counts[f'rows with the unknown label {str(label)!r}: zero gradient'] += 1
    else:
      counts['rows that can be used'] += 1
      counts[f'  of them labelled {str(label)!r}'] += 1


def _conversations(
  command: argparse.Namespace, rows: list[Any], counts: collections.Counter[str]
) -> None:
  talk, lengths = chat.Chat(pretrained.find(command.model)), []
  for row in rows:
    try:
      messages = instructions.conversation(row, command)
      prompt, answer = map(talk.encode, talk.prompt_and_answer(messages))
    except ValueError:
      counts['rows that are no conversation: zero gradient'] += 1
      continue
    lengths.append(len(prompt) + len(answer))
    if len(prompt) > command.max_length or not answer:
      counts['rows whose response is cut off whole: zero gradient'] += 1
    else:
      counts['rows that can be used'] += 1
      cut = lengths[-1] > command.max_length + 1
      counts['  of them with a response that is cut'] += cut
  for share in (0.5, 0.9, 1.0) if lengths else ():
    tokens = int(np.quantile(lengths, share))
    counts[f'tokens, or fewer, have {share:.0%} of the rows'] = tokens
