"""A metric that moves: scales of inputs and outputs from released gradients.

The preconditioner of ``prism`` knows r x r second moments, one matrix for all
inputs and one for all outputs of a module. Adam on the factors knows an entry's
own. Between the two is a number for each input and each output: the root of the
mean square of its row of the tangent coordinates, which no turn of the frames
changes. It is read off the noisy gradient, so it costs no privacy.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from prism_optax import fixed_rank, transforms
from prism_optax.fixed_rank import Tangent


class RowMoments(NamedTuple):
  """Mean squares of the rows, for each stack (k, m) and (k, n)."""

  left: jax.Array
  right: jax.Array


class State(NamedTuple):
  count: jax.Array
  moments: tuple[RowMoments, ...]


def scale_by_row_moments(
  noise_stddev: Any, b2: float = 0.99, floor_factor: float = 1.0
) -> transforms.TangentTransformation:
  """Divides rows that are longer than noise by how much longer they are.

  ``x_i <- x_i / sqrt(max(v_i / (floor_factor s^2), 1))`` with ``v_i`` the mean
  over the rank of ``x_ij^2``, averaged over steps. Rows of noise alone stay
  nearly as they are, and none gets longer. It stands directly behind the noise;
  the projection on the tangent space comes last.

  Args:
    noise_stddev: s, per coordinate of what comes in, positive. May be traced.
    b2: Decay of the averages.
    floor_factor: How much longer than noise a row has to be, in squares.
  """

  def init(step):
    found = []
    for pair in step.tree.coordinates(step.params).pairs:
      squares = (jnp.zeros(x.shape[:-1], x.dtype) for x in pair)
      found.append(RowMoments(*squares))
    return State(jnp.zeros((), jnp.int32), tuple(found))

  def update(stacks, state, step):
    count = state.count + 1
    floor = floor_factor * jnp.square(noise_stddev)
    moments, pairs = [], []
    for pair, old, frame in zip(
      stacks.pairs, state.moments, step.frames, strict=True
    ):
      rows = fixed_rank.multiply_out(pair)
      new = RowMoments(
        *(
          b2 * v + (1 - b2) * jnp.mean(jnp.square(x), -1)
          for v, x in zip(old, rows, strict=True)
        )
      )
      scaled = (
        x / jnp.sqrt(jnp.maximum(v / (1 - b2**count), floor))[..., None]
        for v, x in zip(new, rows, strict=True)
      )
      pairs.append(
        fixed_rank.project(
          frame, Tangent(*(jnp.sqrt(floor) * x for x in scaled))
        )
      )
      moments.append(new)
    return stacks._replace(pairs=tuple(pairs)), State(count, tuple(moments))

  return transforms.tangent_transformation('row_moments', update, init)
