"""Steps of `make_private`, compiled once for runs that differ in numbers.

A grid of learning rates and seeds is thousands of short runs. A training of its
own for each of them would be compiled as often, so the training is made inside
of the compiled function, with rates and keys that are traced. What is computed
is the step of the training, its clip, sum, noise and optimizer, and the batches
are its own. Noise does not depend on the program here: runs of one seed share
batches and draws, so that their differences have little variance.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from prism_optax import training

Numbers = Mapping[str, Any]
Make = Callable[[Numbers, Any], training.PrivateTraining]


class Program:
  """The step of a training.

  Args:
    make: ``make(numbers, prng_key)`` makes the training. All that may differ
      between runs of this program is in its arguments, which may be traced.
  """

  def __init__(self, make: Make):
    self.make = make

    def init(params, numbers, key):
      return make(numbers, key).parts.transformation.init(params)

    def step(params, state, frozen, batch, numbers, key):
      return make(numbers, key)._step(params, state, frozen, *batch)[:2]

    def scanned(params, frozen, batches, numbers, key):
      private = make(numbers, key)

      def one(carry, batch):
        return private._step(*carry, frozen, *batch)[:2], None

      carry = params, private.parts.transformation.init(params)
      return jax.lax.scan(one, carry, batches)[0][0]

    self.init = jax.jit(init)
    self.step = jax.jit(step, donate_argnums=(0, 1))
    self._scanned = jax.jit(scanned)

  def batches(self, params, data, numbers: Numbers, seed: int, **users: Any):
    """The batches of a run, as ``(examples, is_padding, is_present)``."""
    private = self.make(numbers, seed)
    state = private.init(params)
    for batch in private.batches(state, data, **users):
      yield batch.examples, batch.is_padding_example, batch.is_present

  def train(
    self,
    params: Any,
    frozen: Any,
    data: Any,
    numbers: Numbers,
    seed: int,
    each: Callable[[int, Any], None] = lambda t, params: None,
  ) -> tuple[Any, Any]:
    """The parameters and the optimizer's state after all steps.

    Args:
      params: The start.
      frozen: Weights that are not trained.
      data: Arrays of all private records.
      numbers: As for ``make``.
      seed: Of batches and noise.
      each: Called after each step, with its number and the parameters.
    """
    batches = self.batches(params, data, numbers, seed)
    key = jax.random.key(seed)
    params = jax.tree.map(jax.numpy.array, params)  # They are donated.
    state = self.init(params, numbers, key)
    for t, batch in enumerate(batches):
      params, state = self.step(params, state, frozen, batch, numbers, key)
      each(t, params)
    return params, state

  def end(
    self, params: Any, frozen: Any, batches: Any, numbers: Numbers, seed: int
  ) -> Any:
    """The parameters after batches that :func:`stacked` has made."""
    key = jax.random.key(seed)
    return self._scanned(params, frozen, batches, numbers, key)


def stacked(batches: Any) -> Any:
  """All batches of a run in one array each: a loop that is compiled."""
  return jax.tree.map(lambda *x: np.stack(x), *batches)
