"""Modules of the same shapes as one pair of larger arrays.

A program has a kernel for each leaf that it returns, so it grows with their
number, and with it the time that it takes to compile.
"""

import functools

import jax
import optax

from prism_optax._modules import LayoutLike, ModuleTree, Stacks
from prism_optax._types import ArrayTree
from prism_optax.fixed_rank import Factors


def stack(
  params: optax.Params, *, layout: LayoutLike = None
) -> dict[str, list[ArrayTree]]:
  """The same adapters in few leaves: a pair for all modules of one shape.

  Train the stacked adapters, and let the loss unstack them. A step of many
  modules then compiles in a fraction of the time and does the same arithmetic.
  Layers that are scanned are stacked already. :func:`unstack` inside of the
  loss is differentiated like anything else.

  Privacy: for ``prism`` and chains of its parts, clip, sensitivity, noise and
  learning rate mean the same as for ``params``; the noise of an entry is
  another draw of the same law. ``dp_muon`` and ``per_matrix_clip`` count
  matrices, and a leaf of three axes counts as a matrix only if you declare it.
  Give them the same tree for clip, noise and accounting, as always.

  ===================  ========================================================
  narrow types         float32, so that small steps are not lost
  a scale (layout)     shared out over both factors: no layout is needed then
  one module a shape   a stack of one
  ===================  ========================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    layout: See :func:`describe_pairs`.

  Returns:
    A dict of ``'stacks'``, for each shape ``'lora_a'`` (k, in, r) and
    ``'lora_b'`` (k, r, out), and ``'others'``, the leaves that are no factors,
    in their order.

  Raises:
    ValueError: If pairs cannot be found.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> one = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> params = {'q': one, 'v': one, 'bias': jnp.zeros(4)}
    >>> stacked = lora.stack(params)
    >>> stacked['stacks'][0]['lora_a'].shape, len(stacked['others'])
    ((2, 3, 1), 1)
    >>> def loss(params):
    ...   return jnp.sum(params['q']['lora_a'] @ params['v']['lora_b'])
    >>> grads = jax.grad(lambda s: loss(lora.unstack(s, params)))(stacked)
    >>> grads['stacks'][0]['lora_b'].sum(-1).ravel().tolist()
    [0.0, 6.0]
  """
  stacks = ModuleTree(params, layout).factors(params)
  return {
    'stacks': [
      {'lora_a': pair.right, 'lora_b': pair.left.mT} for pair in stacks.pairs
    ],
    'others': list(stacks.others),
  }


def unstack(
  stacked: dict[str, list[ArrayTree]],
  like: optax.Params,
  *,
  layout: LayoutLike = None,
) -> optax.Params:
  """Undoes :func:`stack`.

  Args:
    stacked: The result of :func:`stack`, trained or not.
    like: The tree that was stacked, or one of its shapes and types
      (``jax.ShapeDtypeStruct``): no value of it is read.
    layout: The layout of ``like``, the same as for :func:`stack`: arrays do not
      show a scale, and another layout would make the adapters longer or
      shorter.

  Returns:
    A tree like ``like``, in its types.

  Raises:
    ValueError: If ``stacked`` does not have the form that :func:`stack` gives
      to such a tree.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> stacked = lora.stack(params)
    >>> lora.unstack(stacked, params)['lora_a'].shape
    (3, 1)
  """
  expected = jax.eval_shape(functools.partial(stack, layout=layout), like)
  if _shapes(stacked) != _shapes(expected):
    raise ValueError(
      'Expected stacked to have the structure and shapes of stack(like),'
      f' {_shapes(expected)}, got {_shapes(stacked)}.'
    )
  tree = ModuleTree(like, layout)
  pairs = tuple(
    Factors(pair['lora_b'].mT, pair['lora_a']) for pair in stacked['stacks']
  )
  found = tree.tree(Stacks(pairs, tuple(stacked['others'])), -0.5)
  return jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), found, like)


def _shapes(
  tree: ArrayTree,
) -> tuple[jax.tree_util.PyTreeDef, list[tuple[int, ...]]]:
  leaves, treedef = jax.tree.flatten(tree)
  return treedef, [x.shape for x in leaves]
