"""What other libraries clip or add noise to, declared to a proof.

:func:`prism_optax.diagnostics.prove_released` knows the clips and the noise of
this package by marks in the program. What comes from elsewhere has none.
"""

import dataclasses
from collections.abc import Callable

import jax
import optax

from prism_optax._clipped_sum import ClippedSum
from prism_optax._proofs import _marks
from prism_optax._types import ArrayTree


def clipped_elsewhere(tree: ArrayTree) -> ArrayTree:
  """Declares that another library has clipped and summed this.

  It returns its argument. Put it around the sum or mean of clipped gradients
  that ``jax_privacy.clipped_grad`` returns, in front of an optimizer with
  ``per_example_gradients=False``::

    grads = transforms.clipped_elsewhere(clipped_grad(params, batch))
    updates, state = tx.update(grads, state, params)

  **Privacy.** It changes no number and bounds nothing. You declare that one
  record moves the tree by no more than the noise assumes.
  :func:`prism_optax.diagnostics.prove_released` then accepts noise on it, and
  lists your declaration among its assumptions.
  :func:`prism_optax.training.make_private` does not accept it.

  Args:
    tree: A tree of arrays.

  Returns:
    The same tree.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import transforms
    >>> transforms.clipped_elsewhere({'w': jnp.ones(2)})['w'].tolist()
    [1.0, 1.0]
  """
  leaves, treedef = jax.tree.flatten(tree)
  group = _marks.Group(tuple(range(len(leaves))), None, 1)
  what = _marks.Clip((group,), (None,) * len(leaves), declared=True)
  marked = _marks.clipped([(x,) for x in leaves], what)
  return jax.tree.unflatten(treedef, [x for (x,) in marked])


def _marked(
  mark: Callable[[list[_marks.Leaf], _marks.Noise], list[_marks.Leaf]],
  tree: ArrayTree,
) -> ArrayTree:
  leaves, treedef = jax.tree.flatten(tree)
  what = _marks.Noise((None,) * len(leaves), declared=True)
  marked = mark([(x,) for x in leaves], what)
  return jax.tree.unflatten(treedef, [x for (x,) in marked])


def noise_enters(tree: ArrayTree) -> ArrayTree:
  """Marks a tree to which something that is not ours adds noise."""
  if not isinstance(tree, ClippedSum):
    return _marked(_marks.noise_enters, tree)
  then = tree.then
  marked = dataclasses.replace(tree, then=lambda x: noise_enters(then(x)))
  marked.to_floats()  # Here, not in a branch of what adds the noise.
  return marked


def released(tree: ArrayTree) -> ArrayTree:
  """Marks a tree to which something that is not ours has added noise."""
  return _marked(_marks.released, tree)


def noised_elsewhere(
  privatizer: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Declares that a transformation of another library adds the noise.

  For chains of optax, such as ``optax.chain(per_matrix_clip(...),
  noised_elsewhere(privatizer), optax.sgd(...))``. A ``privatizer=`` of this
  package is declared already.

  **Privacy.** It changes no number. You declare that the transformation adds
  the accounted noise to every entry.
  :func:`prism_optax.diagnostics.prove_released` then lets its result leave, and
  lists your declaration among its assumptions.

  Args:
    privatizer: A transformation in the manner of optax.

  Returns:
    A transformation with the same numbers and the same state.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from prism_optax import transforms
    >>> doubled = transforms.noised_elsewhere(optax.scale(2.0))  # No noise!
    >>> doubled.update(jnp.ones(2), doubled.init(jnp.ones(2)))[0].tolist()
    [2.0, 2.0]
  """

  privatizer = optax.with_extra_args_support(privatizer)

  def update(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: object,
  ) -> tuple[optax.Updates, optax.OptState]:
    noisy, state = privatizer.update(
      noise_enters(updates), state, params, **extra_args
    )
    return released(noisy), state

  return optax.GradientTransformationExtraArgs(privatizer.init, update)
