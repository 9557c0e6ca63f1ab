"""The step of a training as one program: proved before it runs, held by rule.

Gradients, clip, noise and optimizer are one compiled function. Its proofs are
of the very program that runs, so they are made where it is traced.
"""

import functools
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _per_example
from prism_optax._proofs._proof import Proof
from prism_optax._types import ArrayTree
from prism_optax.training import _fingerprint, _releases, _seen
from prism_optax.training._sampling import Batch
from prism_optax.training._settings import Parts


class Program:
  """The step of a training.

  Attributes:
    run: ``run(params, state, frozen, examples, is_padding_example, is_present,
      release)``, compiled; returns parameters, state, and 1 if the step was
      held, else 0. Parameters and state are donated.
    proofs: What was proved of it; empty before it is traced.
    digests: Of each program that was traced, (8,) uint32.
  """

  def __init__(self, parts: Parts) -> None:
    self.proofs: tuple[Proof, ...] = ()
    self.digests: dict[Hashable, np.ndarray] = {}
    self._parts = parts
    self._frozen = _fingerprint.FrozenWeights()
    self._compiled: Hashable = None

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def run(
      params: ArrayTree,
      state: optax.OptState,
      frozen: ArrayTree,
      examples: ArrayTree,
      is_padding_example: jax.Array,
      is_present: jax.Array | None,
      release: jax.Array | None = None,
    ) -> tuple[ArrayTree, ArrayTree, jax.Array]:
      if release is not None:  # Other parameters have other gradients.
        release = release ^ _fingerprint.of_arrays(params)
      rows = examples if is_present is None else (examples, is_present)
      lazy = _per_example.LazyGradients(
        rows,
        jax.jit(functools.partial(parts.gradients, params, frozen)),
        parts.execution.microbatch_size,
        parts.execution.skip_padding,
      )
      updates, new = parts.transformation.update(
        lazy,
        state,
        params,
        is_padding_example=is_padding_example,
        release_digest=release,
      )
      updated = optax.apply_updates(params, updates)
      (params, state), held = _held((updated, new), (params, state))
      return params, state, held

    self.run = run

  def digest(
    self, arguments: tuple[ArrayTree, ...], batch: Batch
  ) -> np.ndarray:
    """A digest of the program that runs, which is proved when it is new.

    Args:
      arguments: Of ``run``, but for the last one.
      batch: Whose rows are among them.

    Raises:
      ValueError: If a proof fails, or something undeclared is in the program;
        if another one was compiled ahead.
    """
    name = self._name(arguments)
    if name not in self.digests:
      if self._compiled is not None:
        rows = [x.shape for x in jax.tree.leaves(arguments[3:])]
        raise ValueError(
          'Expected frozen weights and a batch as they were compiled for, got'
          f' others (rows {rows}).'
        )
      self._trace(name, arguments, batch)
    return self.digests[name]

  def compile(
    self, arguments: tuple[ArrayTree, ...], batch: Batch
  ) -> np.ndarray:
    """As :meth:`digest`; no other program is traced or compiled afterwards."""
    name = self._name(arguments)
    self._trace(name, arguments, batch).lower().compile()
    self._compiled = name
    return self.digests[name]

  def _name(self, arguments: tuple[ArrayTree, ...]) -> Hashable:
    """Structure, shapes and types, and a digest of the frozen weights."""
    _, _, frozen, *rows = arguments
    leaves, treedef = jax.tree.flatten((frozen, rows))
    shapes = tuple(
      described(x) if hasattr(x, 'dtype') else type(x) for x in leaves
    )
    return treedef, shapes, self._frozen.digest(frozen)

  def _trace(
    self, name: Hashable, arguments: tuple[ArrayTree, ...], batch: Batch
  ) -> jax.stages.Traced:
    params, _, frozen, *_ = arguments
    parts = self._parts
    parts.check_declared('frozen', frozen)
    independence = parts.check(params, frozen, batch)
    arguments = (*arguments, _fingerprint.UNKNOWN)
    traced = self.run.trace(*arguments)  # JAX runs what is traced here.
    constants = _releases.constants_of(traced.jaxpr)
    parts.check_declared('the constants of loss', list(constants))
    release = _seen.prove_step(
      traced,
      arguments,
      parts.settings.noise_multiplier,
      parts.releases_per_step,
    )
    self.proofs = tuple(x for x in (independence, release) if x is not None)
    self.digests[name] = _fingerprint.agreed(
      _fingerprint.words(
        _fingerprint.program(traced.jaxpr), self._frozen.digest(frozen)
      )
    )
    return traced


def _held(new: ArrayTree, old: ArrayTree) -> tuple[ArrayTree, jax.Array]:
  """Takes a step back in which something finite became NaN or Inf.

  Too large a learning rate overflows. What is tested here is all
  post-processing of the release, so it may decide. Only floats go back: the
  step counts, and keys and counters move on, because noise that was drawn must
  not be drawn again (``optax.apply_if_finite`` puts the keys back, too).

  Args:
    new: Parameters and state after the step.
    old: The same before it. Numbers that were not finite then, such as the
      best value so far, may stay so.

  Returns:
    The tree to go on with, and 1 if it is the old one, else 0.
  """

  def is_float(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))

  lost = jnp.array(False)
  for x, y in zip(jax.tree.leaves(new), jax.tree.leaves(old), strict=True):
    if is_float(x):
      lost |= jnp.any(jnp.isfinite(y) & ~jnp.isfinite(x))
  kept = jax.tree.map(
    lambda x, y: jnp.where(lost, y, x) if is_float(x) else x, new, old
  )
  return kept, lost.astype(jnp.int32)


def described(x: jax.Array) -> tuple[tuple[int, ...], str]:
  """Shape and type."""
  return tuple(x.shape), str(x.dtype)
