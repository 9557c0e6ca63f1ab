"""What the properties are drawn from.

Shapes come from a short list, so that each is compiled once and every example
after the first is cheap; sizes, scales and oddities are drawn freely. Examples
are derandomised: a test that has passed once passes always.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import lora
from tests.cases import norm, normal  # noqa: F401

settings = hypothesis.settings(
  derandomize=True, deadline=None, max_examples=40, database=None
)
# Where an example takes many small programs, called one by one.
few = hypothesis.settings(settings, max_examples=12)

# name: ({path: shape}, layout). Ranks 1 to min(m, n), one to three modules.
TREES = {
  'one': ({'lora_a': (4, 2), 'lora_b': (2, 3)}, None),
  'rank one': ({'lora_a': (5, 1), 'lora_b': (1, 2), 'bias': (3,)}, None),
  'full rank': ({'lora_a': (3, 3), 'lora_b': (3, 5)}, None),
  'stacked': ({'lora_a': (2, 4, 2), 'lora_b': (2, 2, 3), 'head': (2, 2)}, None),
  'two shapes': (
    {
      'x': {'lora_a': (4, 2), 'lora_b': (2, 3)},
      'y': {'lora_a': (3, 1), 'lora_b': (1, 6)},
    },
    None,
  ),
  'file': (
    {'w': {'lora_A': (2, 5), 'lora_B': (4, 2)}},
    [lora.Pair('w/lora_A', 'w/lora_B', lora.Layout(0, 1, scale=2.0))],
  ),
}
trees = st.sampled_from(sorted(TREES))
seeds = st.integers(0, 2**32 - 1)
# Of the numbers in a tree: tiny to just below overflow of the square.
scales = st.sampled_from([1e-30, 1e-8, 1e-3, 1.0, 1e3, 1e8, 1e15])
ODD = ('none', 'nan', 'inf', '-inf', 'zero', 'huge')
oddities = st.sampled_from(ODD)
# Tree, batch size and type of the gradients: few enough to compile them all.
BATCHES = (
  ('one', 5, jnp.float32),
  ('rank one', 0, jnp.float32),
  ('rank one', 1, jnp.bfloat16),
  ('stacked', 5, jnp.bfloat16),
  ('two shapes', 5, jnp.float32),
  ('file', 5, jnp.float32),
)
batches = st.sampled_from(BATCHES)


def draw_tree(name, seed, **options):
  """Normal entries in the shapes of a tree, on the host."""
  zeros = jax.tree.map(
    functools.partial(np.zeros, dtype=np.float32), TREES[name][0],
    is_leaf=lambda x: isinstance(x, tuple),
  )  # fmt: skip
  return normal(zeros, seed, **options)


def spoiled(tree, oddity, seed):
  """The tree with its first row made odd, in one leaf or in all."""
  if oddity == 'none' or not jax.tree.leaves(tree)[0].shape[0]:
    return tree
  value = {
    'nan': jnp.nan, 'inf': jnp.inf, '-inf': -jnp.inf, 'zero': 0.0,
    'huge': 1e30,
  }[oddity]  # fmt: skip
  leaves, treedef = jax.tree.flatten(tree)
  which = seed % (len(leaves) + 1)  # Beyond the last: all of them.
  leaves = [np.array(x) for x in leaves]
  for i, x in enumerate(leaves):
    if which in (i, len(leaves)):
      x[0] = value
  return jax.tree.unflatten(treedef, leaves)


def read_or_refused(read, path):
  """What is read of a file, or None if it is refused by its name."""
  try:
    return read()
  except ValueError as error:
    if str(path) not in str(error):
      raise
    return None


def layout_of(name):
  return TREES[name][1]


def is_finite(tree):
  return all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(tree))


def shapes_of(tree):
  return jax.tree.map(lambda x: x.shape, tree)
