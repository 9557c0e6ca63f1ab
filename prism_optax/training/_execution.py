"""How a training is run: what only speed and memory depend on."""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class Execution:
  """How a training is run, for ``execution=`` of :func:`make_private`.

  Every choice gives the same sum of the same records, to the rounding of their
  gradients, so the guarantee is the same. Two of them touch it from outside:
  a batch that is padded to less is cut more often, which epsilon counts, and
  ``skip_padding`` lets a clock see what a batch held.

  Attributes:
    microbatch_size: Records whose gradients are held at once; None is all.
    padded_batch_size: Rows of every batch. The default is six standard
      deviations above ``expected_batch_size``, in whole micro-batches.
    batch_sharding: How batches are laid out, split along the first axis.
    skip_padding: Pass over micro-batches of padding alone. It saves up to a
      third of the time, and the time of a step tells how many were drawn.

  Example:
    >>> from prism_optax import training
    >>> training.Execution(microbatch_size=16).skip_padding
    False
  """

  microbatch_size: int | None = None
  padded_batch_size: int | None = None
  batch_sharding: jax.sharding.Sharding | None = None
  skip_padding: bool = False
