"""Optimizers for trainers that clip and add the noise themselves.

jax-privacy's trainers (in versions after 2.0.0) take an optimizer with a third
function, ``pre_clipping_transform(state)``, for per-example gradients before
they are clipped. This function gets the state of the optimizer and not the
parameters, so the state holds the frames of the parameters that the last update
led to.

They take it by its type. Whatever is not of jax-privacy's class counts as an
optimizer of optax, and a trainer reads ``init`` and ``update`` alone: gradients
of factors would be clipped in place of coordinates, without any error. So the
class is jax-privacy's where it has one, and elsewhere one of ours on which
``init`` and ``update`` cannot be read.
"""

import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, TypeAlias

import optax

from prism_optax import _validate, fixed_rank
from prism_optax._modules import LayoutLike, ModuleTree, map_pairs
from prism_optax._types import ArrayTree
from prism_optax.fixed_rank._points import Frame
from prism_optax.transforms import _correlated

Init: TypeAlias = Callable[[ArrayTree], optax.OptState]
Update: TypeAlias = Callable[..., tuple[ArrayTree, optax.OptState]]
PreClipping: TypeAlias = Callable[
  [optax.OptState], Callable[[ArrayTree], ArrayTree]
]


class AugmentedOptimizer:
  """Three functions that are of use together, and no optax transformation.

  What :func:`augmented_optimizer` returns where jax-privacy has no class for
  it. Take it apart: ``init, update, pre_clipping_transform = optimizer``. A
  trainer that reads ``init`` and ``update`` alone, as of an optimizer of optax,
  would leave out the third function. It gets an error that says so.

  Attributes:
    init: Cannot be read. The first of the three: ``init(params) -> state``.
    update: Cannot be read. The second: ``update(updates, state, params) ->
      (updates, state)``.
    pre_clipping_transform: ``pre_clipping_transform(state)`` returns the
      function of one example's gradients to pass to
      ``jax_privacy.clipped_grad``.
  """

  def __init__(
    self, init: Init, update: Update, pre_clipping_transform: PreClipping
  ) -> None:
    self._functions = init, update, pre_clipping_transform
    self.pre_clipping_transform = pre_clipping_transform

  def __iter__(self) -> Iterator[Callable[..., ArrayTree]]:
    return iter(self._functions)

  def __getattr__(self, name: str) -> NoReturn:
    if name not in ('init', 'update'):
      raise AttributeError(name)
    # An AttributeError, so that `hasattr` finds no optimizer of optax here.
    raise AttributeError(
      f'augmented_optimizer: `.{name}` was read as of an optimizer of optax,'
      ' and whoever does so may leave out `pre_clipping_transform`: gradients'
      ' would be clipped that are no tangent coordinates. Write `init, update,'
      ' pre_clipping_transform = optimizer` and use all three; or give it to a'
      ' trainer of a jax-privacy that has'
      ' `jax_privacy.optimizers.AugmentedGradientTransformation`.'
    )


class AugmentedState(NamedTuple):
  """State of :func:`augmented_optimizer`.

  Attributes:
    frames: The frames of the current parameters, one for each stack of
      same-shape modules.
    turns: What turns each frame as close as possible to the turned frame
      before. Fixed coordinates are coordinates in the turned frames.
    inner: State of the optimizer.
  """

  frames: tuple[Frame, ...]
  turns: tuple[_correlated.Turns, ...]
  inner: ArrayTree


def augmented_optimizer(
  optimizer: optax.GradientTransformation, *, layout: LayoutLike = None
) -> Any:  # Of which class depends on what is installed.
  """An optimizer on tangent coordinates, for trainers that add the noise.

  ``pre_clipping_transform(state)`` is :func:`tangent_coordinates` at the
  current parameters, in coordinates that turn as little as possible from
  step to step, so that the trainer's noise may be correlated over steps (see
  :func:`correlated_tangent_privatizer`, also for its start of full rank).
  ``update`` takes the noisy mean in these coordinates, projects and
  masks it, and hands it to ``optimizer`` in the frames of ``params``.

  The parameters must change by ``optax.apply_updates`` with the updates
  returned, and by nothing else: the state is one step ahead. The coordinates
  come from PRISM (arXiv:2606.00944, Eq. 13); the turns are ours.

  **Privacy.** The trainer's mechanism gives the guarantee. This function
  neither clips nor adds noise and gives no privacy by itself. The trainer clips
  each example's coordinates to C in the Euclidean norm, so their sum moves by
  at most C when one record is added or removed, in a space of fixed dimension.
  The trainer's noise per coordinate must be in the unit of this sum, or of its
  mean. Frames and turns depend on the parameters alone, that is, on the start
  and on past releases. Everything after the noise is post-processing.

  =======================  ====================================================
  one factor zero          allowed, but the frames change completely with the
                           first steps, and correlated noise does not cancel
  both factors zero        ValueError in ``init``, where values are known
  zero gradient            the trainer's noise is projected, masked and applied
  bfloat16 parameters      coordinates, noise and moments in float32
  parameters set by hand   the next gradients get coordinates of the wrong
                           point: call ``init`` again
  =======================  ====================================================

  Args:
    optimizer: Makes updates of the factors from noisy tangent coordinates, for
      instance ``optax.chain(scale_by_rank_preconditioner(noise_stddev=s),
      optax.scale_by_learning_rate(1e-2), retract())``. It must not clip or add
      noise.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    ``init``, ``update`` and ``pre_clipping_transform``, to be unpacked
    in this order, or to be handed to a trainer of jax-privacy as they come. If
    ``jax_privacy.optimizers`` can be imported and has the class
    ``AugmentedGradientTransformation``, the result has this class, as its
    trainers require. Otherwise (2.0.0 has none) it is no tuple, and reading its
    ``init`` or ``update`` raises an AttributeError, so that no trainer mistakes
    it for an optimizer of optax and omits the third function.

  Raises:
    ValueError: If no pair is found or both factors of a module are zero; in
      ``update`` without ``params``.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import prism_optax
    >>> from prism_optax import transforms
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': 4 * jnp.eye(1, 2)}
    >>> init, update, pre_clipping_transform = transforms.augmented_optimizer(
    ...   optax.chain(optax.scale(-1.0), prism_optax.retract()))
    >>> state = init(params)
    >>> transform = pre_clipping_transform(state)
    >>> one_example = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> transform(one_example)['lora_a'].ravel().tolist()
    [0.25, 0.25, 0.25]
  """

  inner = optax.with_extra_args_support(optimizer)

  def turned(bases, frames, inner_state):
    turns = map_pairs(_correlated.turns, bases, frames)
    return AugmentedState(frames, turns, inner_state)

  def init(params):
    tree = ModuleTree(params, layout)
    tree.check_observable(params)
    frames = tree.frames(params)
    return turned(frames, frames, inner.init(params))

  def update(updates, state, params=None, **extra_args):
    _validate.params_given('augmented_optimizer', params)
    tree = ModuleTree(params, layout)
    noisy = tree.coordinates(updates).map_pairs(
      lambda x, frame, turn: fixed_rank.project(
        frame, _correlated.from_fixed(x, turn)
      ),
      state.frames,
      state.turns,
    )
    updates, inner_state = inner.update(
      tree.tree(noisy), state.inner, params, **extra_args
    )
    # A trainer asks for the next transform before it calls us again.
    bases = map_pairs(_correlated.turned_bases, state.frames, state.turns)
    frames = tree.frames(optax.apply_updates(params, updates))
    return updates, turned(bases, frames, inner_state)

  def pre_clipping_transform(state):
    def transform(grads):
      # One example's gradients have the structure and shapes of the parameters.
      tree = ModuleTree(grads, layout)
      return tree.tree(
        tree.gradients(grads).map_pairs(
          lambda pair, frame, turn: _correlated.to_fixed(
            fixed_rank.tangent_from_gradients(frame, pair), turn
          ),
          state.frames,
          state.turns,
        )
      )

    return transform

  return _class()(init, update, pre_clipping_transform)


def _class() -> Any:
  """jax-privacy's class, for which its trainers ask, or ours."""
  try:
    theirs = importlib.import_module('jax_privacy.optimizers')
  except ImportError:
    return AugmentedOptimizer
  return getattr(theirs, 'AugmentedGradientTransformation', AugmentedOptimizer)
