"""Every public transformation, and which laws hold for it.

A row says how the transformation is made and what comes in. From the rows
`laws_test.py` makes its cases; a public transformation without one fails there.
All rows share one problem, so that each is compiled once for all laws.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from jax_privacy import noise_addition

import prism_optax
from prism_optax import aliases, contrib, transforms
from tests.oracles import problems

# Two modules of one shape, which are one stack; and a leaf beside them.
PROBLEM = problems.Problem([(6, 5, 2)] * 2, batch=4)
CLIP, SIZE, STDDEV = 0.7, 4.0, 0.3
OPTIONS = {
  'noise_multiplier': STDDEV * SIZE / CLIP, 'expected_batch_size': SIZE,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
  """A transformation and the laws that it has beside those of all.

  Attributes:
    make: Of a key.
    examples: Gradients of examples come in, not a mean of them.
    noise: It draws noise, by the key.
    gauge: What comes out is, as a matrix, the same in every gauge.
    narrow: What comes out has the type of what came in.
    slow: A whole optimizer, of which another one is tested first.
  """

  make: Callable[[Any], Any]
  examples: bool = False
  noise: bool = False
  gauge: bool = False
  narrow: bool = False
  slow: bool = False


def _optimizer(make, norms='l2_clip_norm', **options):
  def of(key):
    return make(0.1, **{norms: CLIP}, **OPTIONS, prng_key=key)

  return Row(of, examples=True, noise=True, **options)


def _correlated(key):
  def privatizer(key):
    return noise_addition.matrix_factorization_privatizer(
      np.eye(4, dtype=np.float32), stddev=STDDEV, prng_key=key
    )

  return prism_optax.correlated_tangent_privatizer(
    privatizer, steps=4, prng_key=key
  )


def _of(make, *args, **options):
  return lambda key: make(*args, **options)


ROWS = {
  'prism': _optimizer(prism_optax.prism),
  'published_prism': _optimizer(prism_optax.published_prism, slow=True),
  'prism_muon': _optimizer(contrib.prism_muon, slow=True),
  'dp_muon': _optimizer(prism_optax.dp_muon, 'l2_clip_norms'),
  'intrinsic_clip': Row(
    _of(prism_optax.intrinsic_clip, CLIP, normalize_by=SIZE),
    examples=True,
    gauge=True,
  ),
  'per_matrix_clip': Row(
    _of(prism_optax.per_matrix_clip, CLIP, normalize_by=SIZE), examples=True
  ),
  'tangent_privatizer': Row(
    lambda key: prism_optax.tangent_privatizer(STDDEV, prng_key=key), noise=True
  ),
  'correlated_tangent_privatizer': Row(_correlated, noise=True),
  'scale_by_rank_preconditioner': Row(
    _of(prism_optax.scale_by_rank_preconditioner, noise_stddev=STDDEV),
    gauge=True,
  ),
  'adapt_step_size': Row(
    lambda key: transforms.adapt_step_size(
      prism_optax.scale_by_rank_preconditioner(noise_stddev=STDDEV),
      noise_stddev=STDDEV,
    ),
    gauge=True,
  ),
  'scale_by_published_preconditioner': Row(
    _of(transforms.scale_by_published_preconditioner, noise_stddev=STDDEV)
  ),
  'orthogonalize_tangents': Row(
    _of(contrib.orthogonalize_tangents), gauge=True
  ),
  'orthogonalize': Row(_of(transforms.orthogonalize), narrow=True),
  'add_decayed_factors': Row(
    _of(prism_optax.add_decayed_factors, 0.1), gauge=True
  ),
  'scale_by_learning_rate': Row(
    _of(prism_optax.scale_by_learning_rate, 0.1), gauge=True
  ),
  'retract': Row(_of(prism_optax.retract), gauge=True),
}
# Made of others, or of what a user writes: tests of their own.
OTHERS = {'chain', 'tangent_transformation', 'noised_elsewhere'}


def public_transformations():
  """Names of all public functions that make a transformation."""
  found = set()
  for module in (transforms, aliases, contrib):
    for name in module.__all__:
      hints = getattr(getattr(module, name), '__annotations__', {})
      if 'Transformation' in str(hints.get('return', '')):
        found.add(name)
  return found
