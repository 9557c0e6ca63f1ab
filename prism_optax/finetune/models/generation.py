"""Answers, token by token, with the keys and values of the past kept."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import llama

# Prompts are padded to a multiple of this: few programs for all lengths.
BLOCK = 64


@functools.cache
def _program(graphdef: Any) -> Callable[..., Any]:
  """One step, compiled once for all generators of a model."""

  def run(leaves, caches, ids, positions, keep, temperature, key):
    model = nnx.merge(graphdef, leaves)
    logits, caches = model(ids, positions, caches, keep=keep)
    greedy = jnp.argmax(logits, axis=1)
    warm = logits / jnp.maximum(temperature, 1e-6)
    drawn = jax.random.categorical(key, warm)
    return jnp.where(temperature > 0, drawn, greedy), caches

  return jax.jit(run, donate_argnums=1)


class Generator:
  """Continues rows of tokens.

  Args:
    model: Adapters included.
    stops: Ids that end an answer.
  """

  def __init__(self, model: llama.Decoder, stops: Sequence[int]):
    self._model = model
    self._stops = list(stops)
    graphdef, self._leaves = nnx.split(model)
    self._run = _program(graphdef)

  def stream(
    self,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
  ) -> Iterator[np.ndarray]:
    """Yields the next token of each row, -1 for rows that have ended.

    Args:
      prompts: Rows of ids, none of them empty.
      max_new_tokens: Most tokens of an answer; fewer where the model has no
        room for more.
      temperature: 0 takes the likeliest token, 1 draws as the model says.
      seed: Of the draws.

    Raises:
      ValueError: If a prompt is empty or leaves no room for an answer.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    limit = self._model.config.max_length
    if not 0 < lengths.min() <= lengths.max() < limit:
      raise ValueError(
        f'Expected prompts of 1 to {limit - 1} tokens, got '
        f'{lengths.min()} to {lengths.max()}.'
      )
    steps = min(max_new_tokens, limit - lengths.max())
    padded = -(-lengths.max() // BLOCK) * BLOCK
    room = -(-(padded + steps) // BLOCK) * BLOCK
    ids = np.zeros((len(prompts), padded), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
      row[: len(prompt)] = prompt
    rows = ids, np.broadcast_to(np.arange(padded), ids.shape), lengths - 1
    caches = llama.empty_caches(self._model, len(prompts), room)
    key, ended = jax.random.key(seed), np.zeros(len(prompts), bool)
    for step in range(steps):
      draw = temperature, jax.random.fold_in(key, step)
      found, caches = self._run(self._leaves, caches, *rows, *draw)
      tokens = np.asarray(found)
      ended |= np.isin(tokens, self._stops)
      if ended.all():
        return
      yield np.where(ended, -1, tokens)
      places = (lengths + step)[:, None]
      rows = tokens[:, None], places, np.zeros(len(prompts), np.int64)

  def answers(
    self, prompts: Sequence[Sequence[int]], max_new_tokens: int, **options
  ) -> list[list[int]]:
    """The ids of whole answers; see :meth:`stream`."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in self.stream(prompts, max_new_tokens, **options):
      for row, token in zip(rows, tokens.tolist(), strict=True):
        if token >= 0:
          row.append(token)
    return rows
