"""An optimizer with the clip and the noise of a training in front of it."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
import numpy as np
import optax

from prism_optax import _lattice, _per_example
from prism_optax._linalg import at_least_float32
from prism_optax._modules import ClippedSum, Stacks, StepContext
from prism_optax._types import PRNGKeyLike
from prism_optax.training._clipping import BoundedSum, FlatClipping
from prism_optax.transforms import _privatizer
from prism_optax.transforms._chain import (
  Stacked,
  TangentTransformation,
  chain,
)
from prism_optax.transforms._intrinsic_clip import coordinates_of_one

Optimizer: TypeAlias = optax.GradientTransformation | Callable[..., Any]


def assemble(
  optimizer: Optimizer,
  bounded: BoundedSum,
  *,
  steps: int,
  prng_key: PRNGKeyLike,
) -> optax.GradientTransformationExtraArgs:
  """The whole transformation, from per-example gradients to updates.

  What it does is not known yet: see :mod:`prism_optax.training._seen`.

  Args:
    optimizer: As for :func:`prism_optax.training.make_private`.
    bounded: The clip, the divisor, and the noise in their unit.
    steps: Number of updates that are accounted for.
    prng_key: Of the noise.

  Returns:
    A transformation whose ``update`` takes ``LazyGradients``,
    ``is_padding_example=`` and ``release_digest=``.

  Raises:
    ValueError: If the optimizer is none of these.
  """
  if isinstance(optimizer, optax.GradientTransformation):
    if hasattr(optimizer, 'sensitivity') or isinstance(
      optimizer, TangentTransformation
    ):
      raise ValueError(
        'Expected optimizer to be an optimizer without a clip and noise of its'
        ' own, or a function that makes one of the constants of this training:'
        ' give functools.partial(prism_optax.prism, learning_rate), not'
        ' prism_optax.prism(learning_rate, ...).'
      )
    return _dense(bounded, optimizer, steps, prng_key)
  b = bounded.normalize_by
  constants = {
    'l2_clip_norm': bounded.bound,
    'l2_clip_norms': bounded.bound,
    'noise_multiplier': bounded.stddev * b / bounded.bound,
    'expected_batch_size': b,
    'prng_key': prng_key,
    'steps': steps,
  }
  taken = _taken(optimizer, constants)
  if type(bounded.clipping) is FlatClipping:
    whole = optimizer(**taken)
    if not isinstance(whole, optax.GradientTransformation):
      raise ValueError(
        'Expected the function given as optimizer to make a transformation that'
        ' begins with a clip (prism, published_prism, dp_muon, or a'
        f' prism_optax.chain), got {whole!r}.'
      )
    return optax.with_extra_args_support(whole)
  accepts = inspect.signature(optimizer).parameters
  if 'per_example_gradients' not in accepts:
    raise ValueError(
      f'clipping={bounded.clipping!r} needs an optimizer whose own clip can be'
      ' left out, by per_example_gradients=False, got one without this argument'
      f': {optimizer}.'
    )
  rest = optimizer(per_example_gradients=False, **taken)
  if not isinstance(rest, TangentTransformation):
    raise ValueError(
      f'clipping={bounded.clipping!r} goes with PRISM and with optimizers of'
      ' optax: DP-Muon clips matrix by matrix to thresholds of its own.'
    )
  return chain(_intrinsic(bounded, rest.layout), rest)


def _taken(
  optimizer: Callable[..., Any], constants: Mapping[str, Any]
) -> dict[str, Any]:
  """The constants that a function takes."""
  if not callable(optimizer):
    raise ValueError(
      'Expected optimizer to be an optax.GradientTransformation or a function'
      f' that makes one, got optimizer={optimizer!r}.'
    )
  parameters = inspect.signature(optimizer).parameters
  takes_all = any(x.kind is x.VAR_KEYWORD for x in parameters.values())
  taken = {k: v for k, v in constants.items() if takes_all or k in parameters}
  missing = {'noise_multiplier', 'expected_batch_size', 'steps'} - set(taken)
  given = getattr(optimizer, 'keywords', {})
  if 'l2_clip_norms' in given:  # DP-Muon's noise is made for these, too.
    taken.pop('l2_clip_norms', None)
  fixed = sorted(set(given) & set(taken))
  if missing or fixed:
    what = f'does not take {sorted(missing)}' if missing else f'fixes {fixed}'
    raise ValueError(
      'Expected optimizer to be a function that takes the constants of this'
      f' training by name, {sorted(constants)}, as functools.partial('
      f'prism_optax.prism, learning_rate) does, got one that {what}:'
      f' {optimizer}.'
    )
  return taken


def _intrinsic(bounded: BoundedSum, layout: Any) -> TangentTransformation:
  """The clip of tangent coordinates by a rule of its own."""

  def init(step: StepContext) -> Any:
    _per_example.check_whole('clipping', step.params)
    _rows(bounded, step)  # Labels that do not fit shall fail here.
    return bounded.init(step.params)

  def update(
    grads: Any,
    state: Any,
    step: StepContext,
    *,
    is_padding_example: jax.Array | None = None,
    release_digest: jax.Array | None = None,
    **extra_args: Any,
  ) -> tuple[Stacks, Any]:
    del extra_args
    sums, state = bounded(
      coordinates_of_one('clipping', grads, step),
      grads,
      is_padding_example,
      step.tree.coordinates(step.params),
      state,
      _rows(bounded, step),
      release_digest,
    )
    floats = jax.tree.map(_lattice.to_float, sums, is_leaf=_lattice.is_sum)
    bound = bounded.bound / bounded.normalize_by
    summed = ClippedSum(*_per_example.mark_flat_clip(floats, bound))
    summed.on_lattice = lambda stddev: sums
    return summed, state

  return TangentTransformation(
    Stacked('clipping', init, update, ('clip',)),
    layout,
    _per_example.sensitivity_of_sum(bounded.bound / bounded.normalize_by),
  )


def _rows(bounded: BoundedSum, step: StepContext) -> list[np.ndarray] | None:
  """The group names along the first axis of each stack of coordinates."""
  labels = bounded.labels(step.params)
  return None if labels is None else step.tree.rows(labels)


def _dense(
  bounded: BoundedSum,
  optimizer: optax.GradientTransformation,
  steps: int,
  prng_key: PRNGKeyLike,
) -> optax.GradientTransformationExtraArgs:
  """DP-SGD, DP-Adam and so on: gradients as they are, clipped and noised."""
  noise = _privatizer.gaussian(bounded.stddev, prng_key, steps)
  optimizer = optax.with_extra_args_support(optimizer)

  def init(params: Any) -> Any:
    _per_example.check_whole('clipping', params)
    bounded.labels(params)  # What does not fit shall fail here.
    wide = jax.tree.map(at_least_float32, params)
    return bounded.init(params), noise.init(params), optimizer.init(wide)

  def update(
    updates: Any,
    state: Any,
    params: Any = None,
    *,
    is_padding_example: jax.Array | None = None,
    release_digest: jax.Array | None = None,
    **extra_args: Any,
  ) -> tuple[Any, Any]:
    clip, noised, inner = state
    labels = bounded.labels(params)
    like = jax.eval_shape(lambda x: jax.tree.map(at_least_float32, x), params)
    sums, clip = bounded(
      lambda grads: jax.tree.map(at_least_float32, grads),
      updates,
      is_padding_example,
      like,
      clip,
      None if labels is None else [np.asarray(x) for x in labels],
      release_digest,
    )
    noisy, noised = noise.update(sums, noised, release_digest=release_digest)
    out, inner = optimizer.update(noisy, inner, params, **extra_args)
    return out, (clip, noised, inner)

  return optax.GradientTransformationExtraArgs(init, update)
