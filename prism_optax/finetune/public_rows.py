"""What finished models say to public rows, for the report."""

from typing import Any

import numpy as np

from . import data, finished, instructions
from .answers import probabilities
from .models import chat, generation, minilm

MAX_NEW_TOKENS = 96


def per_class(
  run: finished.Finished, chunk: int = 64
) -> list[tuple[str, int, float]]:
  """``(label, rows, accuracy)`` of each class of the evaluation file.

  Raises:
    ValueError: If the file or the frozen weights are not there any more.
  """
  used = run.options
  public = data.read_public(used.eval, used.text_column, used.label_column)
  model, folder = finished.text_classifier(run)
  ids = minilm.tokenize(folder, public.texts, used.max_length)
  found = np.array([row.argmax() for row in probabilities(model, ids, chunk)])
  labels = data.encode_labels(public.labels, used.labels)
  return [
    (name, int(rows.sum()), float((found[rows] == i).mean()))
    for i, name in enumerate(used.labels)
    for rows in [labels == i]
    if rows.any()
  ]


def answers(run: finished.Finished, count: int) -> list[dict[str, Any]]:
  """The first rows of the evaluation file, answered before and after.

  Returns:
    Objects with ``prompt``, ``response``, ``before`` and ``after``.

  Raises:
    ValueError: As :func:`per_class`.
  """
  used = run.options
  columns = instructions.columns(used)
  chosen = instructions.read_public(used.eval, columns)[:count]
  spoken = {}
  for name, before in (('before', True), ('after', False)):
    model, source = finished.language_model(run, before=before)
    talk = chat.Chat(source)
    prompts = [
      talk.encode(talk.text(messages[:-1], answer_next=True))
      for messages in chosen
    ]
    generator = generation.Generator(model, talk.stops)
    spoken[name] = [
      talk.decode(ids) for ids in generator.answers(prompts, MAX_NEW_TOKENS)
    ]
  return [
    {
      'prompt': messages[-2]['content'] if messages[1:] else '',
      'response': messages[-1]['content'],
      **{name: texts[i] for name, texts in spoken.items()},
    }
    for i, messages in enumerate(chosen)
  ]
