"""Adapters of another rank.

Everything here reads adapters and no data: what it makes of adapters that were
trained privately is post-processing.
"""

import jax
import jax.numpy as jnp
import optax

from prism_optax import _modules, _validate
from prism_optax._modules import LayoutLike, ModuleTree
from prism_optax.fixed_rank import Factors, _points


def truncate(
  params: optax.Params, rank: int, *, layout: LayoutLike = None
) -> optax.Params:
  """The best approximation of each Z by a matrix of lower rank.

  In the balanced SVD gauge, columns by singular values, largest first. The LoRA
  scale stays what it was: a library that divides alpha by the rank must be
  given an alpha that is smaller in proportion.

  Computed in float32 at least, on the device. Factors in a gauge of a large
  condition number lose digits in float32, so :func:`canonicalize` them first.

  Privacy: post-processing.

  =========================  ==================================================
  the rank as it is          a change of gauge alone
  Z of lower rank than that  lost columns are zero in one factor, the other
                             keeps what it has beyond Z
  one factor zero            Z stays zero, the other factor keeps the most
  rank above the module's    the module keeps its own
  =========================  ==================================================

  Args:
    params: Tree of trainable arrays with LoRA pairs. Other leaves pass.
    rank: The new rank of all modules that have a higher one.
    layout: See :func:`describe_pairs`.

  Returns:
    A tree like ``params`` with factors of the new ranks, in the same types.

  Raises:
    ValueError: If ``rank`` is no integer >= 1, or pairs cannot be found.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> b = jnp.diag(jnp.array([4.0, 1.0]))
    >>> params = {'lora_a': jnp.eye(3, 2), 'lora_b': b}
    >>> new = lora.truncate(params, 1)
    >>> print(abs(new['lora_a'] @ new['lora_b']).round(3))
    [[4. 0.]
     [0. 0.]
     [0. 0.]]
  """
  _validate.integer('rank', rank, 1)
  return _modules.map_factors(
    lambda module, factors: _points.nearest_of_rank(
      factors, min(rank, module.rank)
    ),
    params,
    layout,
  )


def difference(
  params: optax.Params, initial: optax.Params, *, layout: LayoutLike = None
) -> optax.Params:
  """Adapters of ``Z - Z_initial``, of twice the rank.

  ``left = [L, L_0]`` and ``right = [R, -R_0]``: the change by the training,
  relative to the weights to which ``initial`` was added. After
  :func:`spectral_residual` these are the ORIGINAL weights, which other people
  have. The rank is at most min(in, out). :func:`truncate` makes it smaller.

  Privacy: post-processing, of two trees that are public or private already.

  Args:
    params: Tree of trainable arrays with LoRA pairs.
    initial: A tree of the same structure and shapes: before the training.
    layout: See :func:`describe_pairs`; the same for both.

  Returns:
    A tree like ``params`` with factors of the new ranks. Leaves that are no
    factors are those of ``params``.

  Raises:
    ValueError: If the trees do not have the same structure and shapes.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> initial = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.full((1, 2), 0.25)}
    >>> new = lora.difference(params, initial)
    >>> print((new['lora_a'] @ new['lora_b'])[0])
    [0.75 0.75]
  """
  tree = ModuleTree(params, layout)
  # The factors as they are, without the scale.
  new, old = tree.coordinates(params), tree.coordinates(initial, 'initial')

  def changed(pair: Factors, start: Factors) -> Factors:
    both = Factors(
      jnp.concatenate([pair.left, start.left], -1),
      jnp.concatenate([pair.right, -start.right], -1),
    )
    most = min(pair.left.shape[-2], pair.right.shape[-2])
    wide = both.left.shape[-1] > most
    return _points.nearest_of_rank(both, most) if wide else both

  found = tree.tree(new.map_pairs(changed, old.pairs))
  return jax.tree.map(lambda x, leaf: x.astype(leaf.dtype), found, params)
