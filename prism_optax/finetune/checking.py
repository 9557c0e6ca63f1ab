"""What of a private file can be used: for its owner, and NOT private."""

import argparse
import collections

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
  check = _labels if command.task == 'classify' else _conversations
  print(WARNING)
  for what, count in check(command).items():
    print(f'{count:>8}  {what}')


def _labels(command: argparse.Namespace) -> dict[str, int]:
  rows = files.read(command.data, '--data')
  columns = command.text_column, command.label_column
  public = None
  if command.eval is not None:
    public = data.read_public(command.eval, *columns)
  if public is None and command.labels is None:
    raise ValueError('check-data needs --labels or --eval: which labels count?')
  names = data.label_set(command.labels, public.labels if public else ())
  counts = _of_files(rows, command)
  for row, _ in rows:
    if row is None:
      continue
    text, label = (row.get(column) for column in columns)
    name = data.label_name(label)
    if not isinstance(text, str):
      counts[f'rows without a string in {columns[0]!r}: zero gradient'] += 1
    elif name is None:
      counts[f'rows without a label in {columns[1]!r}: zero gradient'] += 1
    elif name not in names:
      counts[f'rows with the unknown label {name!r}: zero gradient'] += 1
    else:
      counts['rows that can be used'] += 1
      counts[f'  of them labelled {name!r}'] += 1
  return counts


def _conversations(command: argparse.Namespace) -> dict[str, int]:
  rows = files.read(command.data, '--data')
  columns = instructions.columns(command)
  talk = chat.Chat(pretrained.find(command.model))
  counts, lengths = _of_files(rows, command), []
  for row, _ in rows:
    if row is None:
      continue
    try:
      messages = instructions.conversation(row, columns)
      prompt, answer = map(talk.encode, talk.prompt_and_answer(messages))
    except ValueError:
      counts['rows that are no conversation: zero gradient'] += 1
      continue
    lengths.append(len(prompt) + len(answer))
    if len(prompt) > command.max_length or not answer:
      counts['rows whose response is cut off whole: zero gradient'] += 1
    else:
      counts['rows that can be used'] += 1
      if lengths[-1] > command.max_length + 1:
        counts['  of them with a response that is cut'] += 1
  if lengths:
    for share in (50, 90, 100):
      tokens = int(np.percentile(lengths, share))
      counts[f'tokens, or fewer, have {share}% of the rows'] = tokens
  return counts


def _of_files(
  rows: list[files.Row], command: argparse.Namespace
) -> collections.Counter[str]:
  counts = collections.Counter({'rows': len(rows)})
  counts['rows that cannot be read: zero gradient'] = sum(
    row.entries is None for row in rows
  )
  counts['rows with bytes that are no UTF-8'] = files.undecoded(rows)
  if command.eval is not None:
    public = {repr(row) for row in files.read(command.eval, '--eval')}
    counts['rows that are in --eval too'] = sum(repr(x) in public for x in rows)
  return +counts  # Only what there is.
