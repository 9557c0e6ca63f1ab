"""An estimator that subtracts the bias of a smooth function of noisy inputs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from prism_optax import _validate
from prism_optax._types import ArrayTree, Scalar


def subtract_bias(
  function: Callable[[ArrayTree], ArrayTree],
  x: Any,
  noise_stddev: Scalar,
  prng_key: jax.Array,
  *,
  num_probes: int = 1,
  probe_scale: float = 1.0,
) -> Any:
  r"""Estimates ``function(mean)`` from ``x = mean + noise``, less biased.

  For Gaussian noise of variance v in every coordinate,

  .. math::
    E\,F(\mu + \sqrt{v} Z) = F(\mu) + \tfrac{v}{2} \Delta F(\mu) + O(v^2) .

  The Laplacian is estimated at ``x`` from antithetic pairs of public probes
  ``Z``, with ``h = probe_scale * noise_stddev``:

  .. math::
    \Delta F(x) \approx \frac{1}{K} \sum_k
      \frac{F(x + h Z_k) + F(x - h Z_k) - 2 F(x)}{h^2} ,

  and ``v/2`` times that is subtracted. With ``probe_scale=1`` this is
  ``F(x) - (mean of F(x +- sqrt(v) Z) - F(x))``: noise once more, to see what
  noise has done. The result is post-processing of ``x``: it costs no privacy
  so long as ``prng_key`` is independent of the key of the noise.

  This estimator is ours. The bias-corrected variant in the paper on DP-Muon
  (arXiv:2605.12994) is of a different kind. The estimator lowers the bias and
  raises the variance.

  **Privacy.** This is post-processing of ``x``: the probes are independent of
  the noise in ``x``, and may be public. Never pass the key of that noise.

  ====================  =======================================================
  ``noise_stddev=0.0``  ``function(x)``, exactly
  linear function       ``function(x)``, up to rounding
  function of degree 3  no bias is left, whatever ``probe_scale``
  ====================  =======================================================

  Args:
    function: Smooth; takes and returns a tree shaped like ``x``.
    x: A tree of arrays.
    noise_stddev: Standard deviation per coordinate of the noise in ``x``: a
      scalar or an array that broadcasts against every leaf, or a tree of them
      with the structure of ``x``. Zero gives ``function(x)``.
    prng_key: Typed key of the probes, a new one for every call.
    num_probes: Number K of antithetic pairs; 2 K + 1 calls of ``function``.
    probe_scale: Size of the probes in units of ``noise_stddev``. For cubic
      functions every scale is exact.

  Returns:
    A tree shaped like ``function(x)``.

  Raises:
    ValueError: If ``num_probes`` is no integer >= 1 or ``probe_scale`` is not
      positive.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import muon
    >>> def cube(x):
    ...   return x**3  # E (mu + s Z)^3 = mu^3 + 3 s^2 mu.
    >>> x, stddev = jnp.full(1000, 2.0), 0.5
    >>> y = muon.subtract_bias(
    ...   cube, x, stddev, jax.random.key(0), num_probes=4)
    >>> round(float(y.mean()), 1)  # 8 - 3 * 0.25 * 2
    6.5
  """
  _validate.integer('num_probes', num_probes, 1)
  _validate.positive('probe_scale', probe_scale)
  leaves, treedef = jax.tree.flatten(x)
  stddevs: Any = noise_stddev
  structure: Any = jax.tree.structure(stddevs)
  if structure != treedef:
    stddevs = jax.tree.map(lambda _: noise_stddev, x)
  center = function(x)

  def step(leaf: jax.Array, stddev: Scalar, key: jax.Array) -> jax.Array:
    normal = jax.random.normal(key, leaf.shape, leaf.dtype)
    return (probe_scale * stddev * normal).astype(leaf.dtype)

  def curvature(index: jax.Array, total: ArrayTree) -> ArrayTree:
    key = jax.random.fold_in(prng_key, index)
    keys = jax.tree.unflatten(treedef, jax.random.split(key, len(leaves)))
    steps = jax.tree.map(step, x, stddevs, keys)
    plus = function(jax.tree.map(jnp.add, x, steps))
    minus = function(jax.tree.map(jnp.subtract, x, steps))
    return jax.tree.map(
      lambda t, p, m, f: t + ((p - f) + (m - f)), total, plus, minus, center
    )

  zeros = jax.tree.map(jnp.zeros_like, center)
  # A loop keeps the memory at that of one probe.
  total = jax.lax.fori_loop(0, num_probes, curvature, zeros)
  factor = 1 / (2 * num_probes * probe_scale**2)
  return jax.tree.map(lambda f, t: f - factor * t, center, total)
