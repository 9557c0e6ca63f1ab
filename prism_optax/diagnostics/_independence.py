"""Whether the gradient of one example depends on the others."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def depends_on_other_examples(
  per_example_grads: Callable[[Any, Any], Any],
  params: Any,
  batch: Any,
  *,
  tolerance: float = 1e-4,
) -> bool:
  """Whether an example's gradient changes when the rest of its batch does.

  Clipping bounds what one record does to its own gradient only: with batch
  normalisation, in-batch negatives or a loss normalised over the batch the
  sensitivity is not what the clip says, and no epsilon holds. Try it on made-up
  data before training. (Ours; a False is no proof.) An entry that is finite in
  one company and not in the other has changed.

  Args:
    per_example_grads: ``f(params, batch)``, a tree of leaves (B, ...).
    params: Passed on.
    batch: Tree of arrays (B, ...), B at least 2, not all examples equal.
    tolerance: Relative change that counts as rounding.

  Returns:
    True if the gradient of any example moves when the others are exchanged.

  Raises:
    ValueError: If the batch has fewer than two examples.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import diagnostics
    >>> loss = lambda p, x: jnp.mean((p * x) ** 2)
    >>> alone = lambda p, xs: jax.vmap(jax.grad(loss), (None, 0))(p, xs)
    >>> centred = lambda p, xs: alone(p, xs - xs.mean(0))
    >>> batch = jnp.arange(6.0).reshape(3, 2)
    >>> diagnostics.depends_on_other_examples(alone, jnp.ones(2), batch)
    False
    >>> diagnostics.depends_on_other_examples(centred, jnp.ones(2), batch)
    True
  """
  size = jax.tree.leaves(batch)[0].shape[0]
  if size < 2:
    raise ValueError(f'Expected a batch of at least 2 examples, got {size}.')
  together = per_example_grads(params, batch)
  for i in range(size):
    # The same example in the same place, in the company of its copies.
    copies = jax.tree.map(lambda x, i=i: jnp.broadcast_to(x[i], x.shape), batch)
    alone = per_example_grads(params, copies)
    for x, y in zip(
      jax.tree.leaves(together), jax.tree.leaves(alone), strict=True
    ):
      if _differ(x[i], y[i], tolerance):
        return True
  return False


def _differ(x: Any, y: Any, tolerance: float) -> bool:
  """Whether y is another array than x, or not finite in other places."""
  x, y = (np.asarray(z, np.float64) for z in (x, y))
  same = (x == y) | (np.isnan(x) & np.isnan(y))
  size = np.max(np.abs(x), where=np.isfinite(x), initial=0.0)
  with np.errstate(invalid='ignore'):
    change = np.where(same, 0.0, np.abs(x - y))
  # NaN fails the comparison: it came from the other examples.
  return not np.all(change <= tolerance * size)
