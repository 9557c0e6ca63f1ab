"""An optimizer with the clip and the noise of a training in front of it."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import optax

from prism_optax._clip import Clip, FlatClipping, QuantileClipping
from prism_optax._clipped_sum import settled
from prism_optax._linalg._products import at_least_float32
from prism_optax._types import ArrayTree, PRNGKeyLike
from prism_optax.transforms._chain import TangentTransformation, chain
from prism_optax.transforms._intrinsic_clip import tangent_clip
from prism_optax.transforms._matrix_clip import dense_clip
from prism_optax.transforms._privatizer import gaussian

Optimizer: TypeAlias = optax.GradientTransformation | Callable[..., ArrayTree]


def assemble(
  optimizer: Optimizer,
  clip: Clip,
  *,
  noise_multiplier: float,
  steps: int,
  prng_key: PRNGKeyLike,
) -> optax.GradientTransformationExtraArgs:
  """The whole transformation, from per-example gradients to updates.

  What it does is not known yet: see :mod:`prism_optax.training._seen`.

  Args:
    optimizer: As for :func:`prism_optax.training.make_private`.
    clip: The clip, and the divisor.
    noise_multiplier: Of the gradients, for this clip.
    steps: Number of updates that are accounted for.
    prng_key: Of the noise.

  Returns:
    A transformation whose ``update`` takes ``LazyGradients``,
    ``is_padding_example=`` and ``release_digest=``.

  Raises:
    ValueError: If the optimizer is none of these.
  """
  if isinstance(clip.rule, QuantileClipping) and not noise_multiplier:
    silent = dataclasses.replace(clip.rule, fraction_stddev=0.0)
    clip = clip._replace(rule=silent)  # No noise at all, for tests.
  if isinstance(optimizer, optax.GradientTransformation):
    if hasattr(optimizer, 'sensitivity') or isinstance(
      optimizer, TangentTransformation
    ):
      raise ValueError(
        'Expected optimizer to be an optimizer without a clip and noise of its'
        ' own, or a function that makes one of the constants of this training:'
        ' give prism_optax.prism, or functools.partial(prism_optax.prism,'
        ' learning_rate), not prism_optax.prism(learning_rate, ...).'
      )
    stddev = noise_multiplier * clip.bound / clip.normalize_by
    return _dense(clip, gaussian(stddev, prng_key, steps), optimizer)
  constants = {
    'l2_clip_norm': clip.bound,
    'l2_clip_norms': clip.bound,
    'noise_multiplier': noise_multiplier,
    'expected_batch_size': clip.normalize_by,
    'prng_key': prng_key,
    'steps': steps,
  }
  taken = _taken(optimizer, constants)
  if type(clip.rule) is FlatClipping:
    whole = optimizer(**taken)
    if not isinstance(whole, optax.GradientTransformationExtraArgs):
      raise ValueError(
        'Expected the function given as optimizer to make a transformation that'
        ' begins with a clip (prism, published_prism, dp_muon, or a'
        ' prism_optax.chain) and hands is_padding_example and release_digest'
        f' on, an optax.GradientTransformationExtraArgs, got {whole!r}.'
      )
    return whole
  accepts = inspect.signature(optimizer).parameters
  if 'per_example_gradients' not in accepts:
    raise ValueError(
      f'clipping={clip.rule!r} needs an optimizer whose own clip can be'
      ' left out, by per_example_gradients=False, got one without this argument'
      f': {optimizer}.'
    )
  rest = optimizer(per_example_gradients=False, **taken)
  if not isinstance(rest, TangentTransformation):
    raise ValueError(
      f'clipping={clip.rule!r} goes with PRISM and with optimizers of'
      ' optax: DP-Muon clips matrix by matrix to thresholds of its own.'
    )
  # A chain that says this has no retraction: the proof then says what it lacks,
  # because to say so once more would not help.
  return chain(tangent_clip(clip, rest.layout), rest, retract_elsewhere=True)


def _taken(
  optimizer: Callable[..., ArrayTree], constants: Mapping[str, object]
) -> dict[str, object]:
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


def _dense(
  clip: Clip,
  noise: optax.GradientTransformation,
  optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """DP-SGD, DP-Adam and so on: gradients as they are, clipped and noised."""

  def init(params: ArrayTree) -> ArrayTree:
    return optimizer.init(jax.tree.map(at_least_float32, params))

  # Without further arguments: they are for clip and noise, some of records.
  rest = optax.GradientTransformation(init, optimizer.update)
  whole = optax.chain(dense_clip('clipping', clip), noise, rest)

  def update(*args: ArrayTree, **extra_args: object) -> ArrayTree:
    updates, state = whole.update(*args, **extra_args)
    return updates, settled(state)

  return optax.GradientTransformationExtraArgs(whole.init, update)
