"""The hidden-state mechanism as a Flax module, for nnx and for linen.

Both wrap a layer: the layer sees the clipped and noised state, never the state
itself. A LoRA module in the place of the layer gives ``h + delta(h + noise)``:

    adapter = NoisyInputNnx(
      nnx.LoRA(1536, 32, 1536, rngs=rngs),
      l2_clip_norm=1.0, stddev=stddev, rngs=rngs,
    )
    output = hidden + adapter(hidden)

They are here and not in the package because the package does without Flax; each
is a few lines over ``inference.privatize_hidden_states`` that can be copied.

There is no switch for training or evaluation: noise that can be left out by a
flag protects nothing. Paying for the release (``accounting.PrivacyBudget``) is
up to the caller, before the call.
"""

from typing import Any

import jax
from flax import linen, nnx

from prism_optax import inference


class NoisyInputNnx(nnx.Module):
  """Calls ``layer`` on the privatised state.

  Args:
    layer: Anything callable on states of shape ``(..., d)``.
    l2_clip_norm: Bound of a state's norm.
    stddev: Standard deviation of the noise on each coordinate, in the unit of
      the states.
    rngs: Source of the noise, its stream ``noise``. Seed it from the operating
      system's entropy: who knows the seed can subtract the noise.
    block_ndim: 1 to release each vector, 2 each (T, d) block.
  """

  def __init__(
    self,
    layer: Any,
    *,
    l2_clip_norm: float,
    stddev: float,
    rngs: nnx.Rngs,
    block_ndim: int = 1,
  ):
    self.layer = layer
    self.l2_clip_norm = l2_clip_norm
    self.stddev = stddev
    self.block_ndim = block_ndim
    # A stream of its own: it advances here and nowhere else.
    self.rngs = nnx.Rngs(noise=rngs.noise())

  def __call__(
    self, hidden: jax.Array, mask: jax.Array | None = None
  ) -> jax.Array:
    """Returns ``layer(noised)``; ``mask`` marks the vectors that are there."""
    return self.layer(
      inference.privatize_hidden_states(
        hidden,
        self.rngs.noise(),
        l2_clip_norm=self.l2_clip_norm,
        stddev=self.stddev,
        mask=mask,
        block_ndim=self.block_ndim,
      )
    )


class NoisyInputLinen(linen.Module):
  """The same for linen: ``apply`` needs ``rngs={'noise': key}``, a fresh key.

  Attributes:
    layer: Module or function of states of shape ``(..., d)``.
    l2_clip_norm: Bound of a state's norm.
    stddev: Standard deviation of the noise on each coordinate, in the unit of
      the states.
    block_ndim: 1 to release each vector, 2 each (T, d) block.
  """

  layer: Any
  l2_clip_norm: float
  stddev: float
  block_ndim: int = 1

  @linen.compact
  def __call__(
    self, hidden: jax.Array, mask: jax.Array | None = None
  ) -> jax.Array:
    """Returns ``layer(noised)``; ``mask`` marks the vectors that are there."""
    return self.layer(
      inference.privatize_hidden_states(
        hidden,
        self.make_rng('noise'),
        l2_clip_norm=self.l2_clip_norm,
        stddev=self.stddev,
        mask=mask,
        block_ndim=self.block_ndim,
      )
    )
