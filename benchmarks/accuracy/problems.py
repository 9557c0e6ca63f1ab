"""The tasks of the utility benchmark: rows and model of each."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.accuracy import digits_network, encoded_text, small_decoder

# Rows of the training file that are set aside, the same for every run.
TEST_ROWS, TUNING_ROWS = 6000, 3000
CHUNK = 500
Rows = tuple[np.ndarray, ...]

TASKS = {
  # File, column of the label, label that is left out.
  'sst2': ('sst2/train.jsonl', 'label', None),
  'clinc150': ('clinc150/train.jsonl', 'domain', 'oos'),
  'intents': ('clinc150/train.jsonl', 'label', 'oos'),
  'banking77': ('banking77/train.jsonl', 'label', None),
}
PUBLIC_TESTS = {'sst2': 'sst2/validation.jsonl'}


@dataclasses.dataclass(frozen=True)
class Problem:
  """Rows and model of a task.

  Attributes:
    train: Arrays with one row an example; so are the next two.
    tuning: Rows that decide on learning rates.
    test: Rows that are reported.
    frozen: All weights that are not trained; ``frozen['layers']`` is a list of
      layers with a ``kernel`` in some of ``plain_layers.MODULES``.
    row_losses: ``row_losses(params, frozen, *rows, scale=)``, loss and score of
      each row; a classifier's takes a ``temperature`` too.
    classes: Number of classes of a classifier; 0 for a decoder.
    width: Of a classifier's features.
  """

  train: Rows
  tuning: Rows
  test: Rows
  frozen: dict[str, Any]
  row_losses: Callable
  classes: int
  width: int = 0


def take(rows: Rows, which: np.ndarray) -> Rows:
  """These rows of all arrays."""
  return tuple(x[which] for x in rows)


def split(rows: Rows) -> tuple[Rows, ...]:
  """``(train, tuning, test)`` by a fixed shuffle."""
  order = np.random.default_rng(0).permutation(len(rows[0]))
  test = min(TEST_ROWS, len(order) // 5)
  tuning = min(TUNING_ROWS, len(order) // 10)
  parts = np.split(order, [test, test + tuning])
  return tuple(take(rows, parts[i]) for i in (2, 1, 0))


@functools.lru_cache(maxsize=4)
def problem(
  task: str,
  length: int,
  probing: bool,
  folder: pathlib.Path,
  cache: pathlib.Path,
  public_test: bool = False,
  pooled: bool = False,
) -> Problem:
  """Reads the data, and computes what never changes, once.

  Args:
    task: Key of ``TASKS``; ``'maths'``, next tokens of gsm8k and mawps; or
      ``'digits'``, see ``digits_network.py``.
    length: Tokens of a row.
    probing: Whether rows are sentence vectors, for a linear probe.
    folder: Folder of the data sets.
    cache: Folder of what is computed once.
    public_test: Whether the rows that are reported are the public validation
      split.
    pooled: Whether a row is the mean of the tokens below the top layer, as a
      text of one token: a run of seconds, with adapters on all matrices.
  """
  if task == 'maths':
    frozen = small_decoder.pretrained(folder, cache, length)
    pairs = small_decoder.tokenizer(folder, cache)
    texts = small_decoder.private_texts(folder)
    rows = split((small_decoder.encode(pairs, texts, length),))
    return Problem(*rows, frozen, small_decoder.row_losses, 0)
  features = encoded_text.features
  width = encoded_text.ALL_MINILM_L6_V2.hidden_size
  if task == 'digits':
    rows, layers, classes = digits_network.parts()
    features, width = digits_network.features, digits_network.HIDDEN
  else:
    rows, classes = _texts(task, length, folder, cache, public_test)
    layers = encoded_text.frozen_layers(1)
    if pooled:
      rows = tuple((_means(*part[:2]), *part[1:]) for part in rows)
      rows = tuple((x, np.ones_like(n), y) for x, n, y in rows)
  if probing:
    nothing = [{} for _ in layers]
    program = jax.jit(lambda *x: features(nothing, layers, *x[:2]))
    rows = tuple(
      (np.concatenate([program(*x) for x in chunks_of(part)]), *part[1:])
      for part in rows
    )
  losses = functools.partial(encoded_text.row_losses, features=features)
  return Problem(*rows, {'layers': layers}, losses, classes, width)


def _texts(
  task: str,
  length: int,
  folder: pathlib.Path,
  cache: pathlib.Path,
  public_test: bool,
) -> tuple[tuple[Rows, ...], int]:
  """Train, tuning and test rows, and the number of classes."""
  file, column, unwanted = TASKS[task]

  def encoded(file):
    texts, labels, names = encoded_text.read(folder / file, column, unwanted)
    rows = encoded_text.encode(
      texts, labels, length=length, top_layers=1, cache=cache
    )
    return tuple(rows), names

  rows, names = encoded(file)
  parts = split(rows)
  if public_test:
    parts = (*parts[:2], encoded(PUBLIC_TESTS[task])[0])
  return parts, len(names)


def _means(tokens: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Means of the tokens of each row, (rows, 1, hidden)."""
  found = []
  for part, count in chunks_of((tokens, lengths)):
    mask = np.arange(part.shape[1]) < count[:, None]
    total = np.sum(part, 1, where=mask[..., None], dtype=np.float32)
    found.append(total / count[:, None])
  return np.concatenate(found)[:, None]


def chunks_of(rows: Rows) -> list[Rows]:
  """Nearly equal parts of about ``CHUNK`` rows."""
  count = max(1, len(rows[0]) // CHUNK)
  parts = np.array_split(np.arange(len(rows[0])), count)
  return [take(rows, part) for part in parts]
