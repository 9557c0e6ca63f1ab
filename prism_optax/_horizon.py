"""Privatizers of other libraries, for no more updates than they are made for.

Noise that is correlated over steps is drawn from a matrix with a fixed number
of rows, and its privacy is computed for that number: the horizon.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class ForeignPrivatizerState(NamedTuple):
  """State around the privatizer of another library.

  Attributes:
    count: Updates so far, shape (), int32.
    inner: State of the privatizer.
  """

  count: jax.Array  # type: ignore[assignment]  # As in optax's states.
  inner: Any


def repeats_its_last_row(privatizer: Any) -> bool:
  """Whether this is jax-privacy's privatizer for a dense noising matrix.

  Nothing but the name of the function that made it tells.
  """
  update = getattr(privatizer, 'update', None)
  return 'dense_matrix_factorization' in getattr(update, '__qualname__', '')


def limited(
  privatizer: optax.GradientTransformation, horizon: int | None
) -> optax.GradientTransformation:
  """The privatizer, with nothing at all beyond the horizon.

  There an update raises where the step count is known, and under ``jit`` gives
  zeros, neither signal nor noise. None for no horizon.
  """

  def init(updates):
    return ForeignPrivatizerState(
      jnp.zeros((), jnp.int32), privatizer.init(updates)
    )

  def update(updates, state, params=None):
    del params  # Privatizers see no parameters.
    count = state.count
    known = not isinstance(count, jax.core.Tracer)
    if horizon is not None and known and int(count) >= horizon:
      raise ValueError(
        f'The noise was made for horizon={horizon} updates, and this is update'
        f' {int(count) + 1}: more of it would repeat.'
      )
    noisy, inner = privatizer.update(updates, state.inner)
    if horizon is not None:
      noisy = jax.tree.map(lambda x: jnp.where(count < horizon, x, 0), noisy)
    return noisy, ForeignPrivatizerState(optax.safe_increment(count), inner)

  return optax.GradientTransformation(init, update)
