"""Steps of `make_private`, compiled once for runs that differ in numbers.

A grid of learning rates and seeds is thousands of short runs. A training of its
own for each of them would be compiled as often, so the training is made inside
of the compiled function, with rates and keys that are traced. What is computed
is the step of the training (its clip, sum, noise and optimizer), and the
batches are its own; a test proves that nothing of a record bypasses the noise.
The noise does not depend on the program here: runs of one seed share batches
and draws, so that their differences have little variance.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

Numbers = Mapping[str, Any]


class Program:
  """The step of a training.

  Args:
    make: ``make(numbers, prng_key)`` makes the training. All that may differ
      between runs of this program is in its arguments, which may be traced.
    loss: For batches in a fixed order, which `make_private` does not account
      for: the loss of one example. ``make`` makes a chain with the library's
      clip and noise then.
  """

  def __init__(
    self, make: Callable[[Numbers, Any], Any], loss: Callable | None = None
  ):
    self.make = make

    def init(params, numbers, key):
      made = make(numbers, key)
      return (made if loss else made.parts.transformation).init(params)

    def step(params, state, frozen, batch, numbers, key):
      made = make(numbers, key)
      if loss is None:
        return made._step(params, state, frozen, *batch)[:2]
      axes = None, None, *[0] * len(batch)
      grads = jax.vmap(jax.grad(loss), axes)(params, frozen, *batch)
      updates, state = made.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    def scanned(params, frozen, batches, numbers, key):
      def one(carry, batch):
        return step(*carry, frozen, batch, numbers, key), None

      carry = params, init(params, numbers, key)
      return jax.lax.scan(one, carry, batches)[0][0]

    self.init = jax.jit(init)
    self.step = jax.jit(step, donate_argnums=(0, 1))
    self._scanned = jax.jit(scanned)

  def batches(self, params, data, numbers: Numbers, seed: int, **users: Any):
    """The batches of a training: ``(examples, is_padding, is_present)``."""
    private = self.make(numbers, seed)
    state = private.init(params)
    for batch in private.batches(state, data, **users):
      yield batch.examples, batch.is_padding_example, batch.is_present

  def train(
    self,
    params: Any,
    frozen: Any,
    batches: Iterable[Any],
    numbers: Numbers,
    seed: int,
  ) -> tuple[Any, Any]:
    """The parameters and the optimizer's state after all steps.

    Args:
      params: The start.
      frozen: Weights that are not trained.
      batches: Of :meth:`batches`, or of :func:`fixed_order`.
      numbers: As for ``make``.
      seed: Of the noise.
    """
    key = jax.random.key(seed)
    params = jax.tree.map(jax.numpy.array, params)  # They are donated.
    state = self.init(params, numbers, key)
    for batch in batches:
      params, state = self.step(params, state, frozen, batch, numbers, key)
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


def fixed_order(
  data: Any, batch: int, steps: int, seed: int
) -> Iterator[tuple[Any, ...]]:
  """Batches of a shuffle that repeats: each record once in every epoch."""
  order = np.random.default_rng(seed).permutation(len(data[0]))
  for t in range(steps):
    first = t % (len(order) // batch) * batch
    yield tuple(np.asarray(x)[order[first : first + batch]] for x in data)
