"""Small training problems whose data speak about Z alone.

Per-example gradients are functions of the dense matrices Z, so that an
optimizer on factors and an oracle on Z, or two gauges, can be trained on the
same data.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import prism_optax
from prism_optax import fixed_rank
from tests import cases
from tests.oracles import oracles

_frame, _project = jax.jit(fixed_rank.frame), jax.jit(fixed_rank.project)


def frames(params):
  """Of all modules of a tree, on the host."""
  pairs = cases.factors_of(params)
  return [jax.device_get(_frame(fixed_rank.Factors(*x))) for x in pairs]


def embed(params, tree):
  """Tangent coordinates (..., *shape) as dense matrices (..., m, n)."""
  return [
    np.float64(left) @ np.swapaxes(np.float64(frame.right), -1, -2)
    + np.float64(frame.left) @ np.swapaxes(np.float64(right), -1, -2)
    for frame, (left, right) in zip(
      frames(params), cases.factors_of(tree), strict=True
    )
  ]


class Dense(NamedTuple):
  """Something for every module and for the extra leaf, in NumPy."""

  modules: list[np.ndarray]  # (..., m, n) each.
  extra: np.ndarray  # (..., 5)

  def plus(self, other, factor=1.0):
    modules = zip(self.modules, other.modules, strict=True)
    return Dense(
      [a + factor * b for a, b in modules], self.extra + factor * other.extra
    )


def chain_of(
  learning_rate, *, l2_clip_norm, noise_multiplier, expected_batch_size,
  prng_key=None, weight_decay=0.1, layout=None, chain=prism_optax.chain,
  **options,
):  # fmt: skip
  """The six lines of `prism`, with any options of the preconditioner."""
  stddev = noise_multiplier * l2_clip_norm / expected_batch_size
  common = {'layout': layout}
  return chain(
    prism_optax.intrinsic_clip(
      l2_clip_norm, normalize_by=expected_batch_size, **common
    ),
    prism_optax.tangent_privatizer(stddev, prng_key=prng_key, **common),
    prism_optax.scale_by_rank_preconditioner(
      noise_stddev=stddev, **options, **common
    ),
    prism_optax.add_decayed_factors(weight_decay, **common),
    prism_optax.scale_by_learning_rate(learning_rate, **common),
    prism_optax.retract(**common),
  )


class Problem:
  """Modules ``Z = scale * left @ right.T`` and a trainable vector beside them.

  Args:
    shapes: (m, n, r) of each module.
    batch: Examples for each step.
    scale: The LoRA scale.
    seed: Of everything random.
  """

  def __init__(self, shapes, batch=6, scale=1.0, seed=0):
    self.shapes, self.batch, self.scale, self.seed = shapes, batch, scale, seed
    rng = self._rng(0, 0)
    self.targets = [rng.standard_normal((m, n)) for m, n, _ in shapes]
    self.ranks = [rank for _, _, rank in shapes]

  def _rng(self, step, purpose):
    return np.random.default_rng((self.seed, step, purpose))

  def start(self, condition=3.0):
    """Factors (left, right) of full rank for each module, and the vector."""
    rng = self._rng(0, 1)
    factors = [
      oracles.random_factors(rng, *shape, condition) for shape in self.shapes
    ]
    return factors, rng.standard_normal(5)

  def params(self, factors, extra, dtype=jnp.float64):
    return cases.tree_of(factors, extra, dtype)

  def dense(self, params):
    """Z of each module, and the vector."""
    zs = [self.scale * z for z in cases.products_of(params)]
    return Dense(zs, np.asarray(params['extra']))

  def points(self, params):
    """The oracle's points."""
    return [
      oracles.Point.from_factors(*pair) for pair in self._scaled_factors(params)
    ]

  def gradients(self, step, at):
    """Per-example gradients: noisy, of the squared distance to a target.

    Their sizes spread over two orders, so that a clip norm of the order of
    the matrices clips some and leaves others.
    """
    rng = self._rng(step, 2)
    sizes = np.geomspace(0.1, 10.0, self.batch)

    def per_example(value, target):
      noise = rng.standard_normal((self.batch, *value.shape))
      return sizes.reshape(-1, *[1] * value.ndim) * (value - target + noise)

    modules = [
      per_example(z, t) for z, t in zip(at.modules, self.targets, strict=True)
    ]
    return Dense(modules, per_example(at.extra, 1.0))

  def factor_gradients(self, params, grads):
    """The tree that per-example differentiation by the leaves would give."""
    return cases.factor_gradients(
      cases.factors_of(params),
      [self.scale * g for g in grads.modules],
      grads.extra,
      params['extra'].dtype,
    )

  def ambient_noise(self, step):
    """Independent standard normal entries."""
    rng = self._rng(step, 3)
    modules = [rng.standard_normal((m, n)) for m, n, _ in self.shapes]
    return Dense(modules, rng.standard_normal(5))

  def embed(self, params, tree):
    """A tree of tangent coordinates as dense matrices (m, n)."""
    # Frames of proportional factors are equal, whatever the scale.
    return Dense(embed(params, tree), np.asarray(tree['extra']))

  def coordinates(self, params, dense):
    """The tangent coordinates of the projection of dense matrices."""
    tangents = [
      _project(
        frame,
        fixed_rank.Tangent(
          g @ np.asarray(frame.right), g.T @ np.asarray(frame.left)
        ),
      )
      for frame, g in zip(frames(params), dense.modules, strict=True)
    ]
    return cases.tree_of(tangents, dense.extra, params['extra'].dtype)

  def _scaled_factors(self, params):
    """Factors whose product is Z: the scale is shared out."""
    root = np.sqrt(self.scale)
    return [(root * a, root * b) for a, b in cases.factors_of(params)]

  def trajectory(self, tx, steps=3, dtype=jnp.float64):
    """The parameters after every step of an optimizer."""
    params = self.params(*self.start(), dtype)
    state, out = tx.init(params), []
    update = jax.jit(tx.update)
    for step in range(steps):
      grads = self.gradients(step, self.dense(params))
      updates, state = update(
        self.factor_gradients(params, grads), state, params
      )
      params = optax.apply_updates(params, updates)
      out.append(params)
    return out
