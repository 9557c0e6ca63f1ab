"""Gaussian noise in the tangent space."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from prism_optax import _lattice, _validate, fixed_rank
from prism_optax._clipped_sum import ClippedSum
from prism_optax._modules import LayoutLike
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike, Scalar, StepsLike
from prism_optax.fixed_rank._points import map_ranks
from prism_optax.fixed_rank._tangents import projected
from prism_optax.transforms._chain import Stacked, TangentTransformation
from prism_optax.transforms._declared import noised_elsewhere


class PrivatizerState(NamedTuple):
  """State of noise, ours or another library's.

  Attributes:
    count: Updates so far, shape (), int32.
    inner: For our noise its typed key, shape (), or (2,) for ChaCha20; split
      once per update. Secret. Otherwise the state of the privatizer.
  """

  count: jax.Array  # type: ignore[assignment]  # As in optax's states.
  inner: ArrayTree


def limited(
  privatizer: optax.GradientTransformationExtraArgs, steps: int | None
) -> optax.GradientTransformationExtraArgs:
  """The privatizer, which releases nothing beyond the last step.

  Beyond it an update raises where the step count is known, and under ``jit``
  returns zeros, neither signal nor noise. None means no last step. Of further
  arguments of ``update`` the privatizer gets ``release_digest``; none of the
  others, which may be about records.
  """

  def init(updates):
    return PrivatizerState(jnp.zeros((), jnp.int32), privatizer.init(updates))

  def update(updates, state, params=None, *, release_digest=None, **extra_args):
    del extra_args
    count = state.count
    known = not isinstance(count, jax.core.Tracer)
    if steps is not None and known and int(count) >= steps:
      raise ValueError(
        f'The noise was made and accounted for {steps=} updates, and this is'
        f' update {int(count) + 1}: it would be a release beyond the budget.'
      )
    noisy, inner = privatizer.update(
      updates, state.inner, params, release_digest=release_digest
    )
    if steps is not None:
      within = count < steps
      noisy = jax.tree.map(lambda x: jnp.where(within, x, 0), noisy)
    return noisy, PrivatizerState(optax.safe_increment(state.count), inner)

  return optax.GradientTransformationExtraArgs(init, update)


def check_source(
  name: str,
  size: Scalar | None,
  prng_key: PRNGKeyLike,
  privatizer: optax.GradientTransformation | None,
  steps: StepsLike,
) -> int | None:
  """Checks that the noise has one source: a size of ours, or a privatizer.

  Args:
    name: Name of the argument ``size``, for error messages.
    size: A standard deviation or a noise multiplier.
    prng_key: Key for noise of that size.
    privatizer: Given in place of ``size``.
    steps: Number of updates; a privatizer's is needed.

  Returns:
    The number of updates, or None where there may be any number.

  Raises:
    ValueError: Unless exactly one of ``size`` and ``privatizer`` is given; if
      ``size`` is negative or not finite; for a key beside a privatizer, or one
      that is no key; for a privatizer without ``steps``.
  """
  if (size is None) == (privatizer is None):
    raise ValueError(
      f'Expected exactly one of {name} and privatizer, got'
      f' {name}={size!r} and {privatizer=}.'
    )
  if privatizer is None:
    _validate.non_negative(name, size)
  elif prng_key is not None:
    raise ValueError(
      f'prng_key is for the noise of {name}; a privatizer has its own.'
    )
  elif steps is None:
    raise ValueError(
      'Noise of a privatizer may be made for some updates only (a dense matrix'
      ' factorization repeats its last row for ever): give their number, or'
      f" 'unlimited' if each update draws noise of its own, got {steps=}."
    )
  _keys.check_key('prng_key', prng_key, words=4)
  if steps is None or steps == 'unlimited':
    return None
  _validate.integer('steps', steps, 1)
  return int(steps)


def gaussian(
  stddev: Scalar | Callable[[ArrayTree], Sequence[Scalar]],
  prng_key: PRNGKeyLike,
  steps: int | None = None,
) -> optax.GradientTransformationExtraArgs:
  """Adds fresh Gaussian noise to every entry of a tree.

  Args:
    stddev: Standard deviation per entry, in the unit of what comes in; or a
      function from the parameters to one for each leaf.
    prng_key: As for :func:`tangent_privatizer`.
    steps: Number of updates, after which it returns zeros or raises.

  Returns:
    A transformation that keeps shapes and types, float32 or float64, and takes
    a ``ClippedSum`` on the lattice of its noise. Its ``update`` takes
    ``release_digest=``, see :func:`tangent_privatizer`.
  """

  def init(params):
    return _keys.resolve_key('prng_key', prng_key, params, words=4)

  def update(updates, state, params=None, *, release_digest=None, **extra_args):
    del extra_args
    next_key, key = _keys.split(state)
    key = _keys.for_release(key, release_digest)
    stddevs = stddev(params) if callable(stddev) else stddev
    if isinstance(updates, ClippedSum):
      updates = updates.on_lattice(stddevs)
    noisy = _lattice.add_noise(
      key, updates, stddevs, with_digest=release_digest is not None
    )
    return noisy, next_key

  return limited(optax.GradientTransformationExtraArgs(init, update), steps)


def tangent_privatizer(
  stddev: Scalar | None = None,
  *,
  prng_key: PRNGKeyLike = None,
  privatizer: optax.GradientTransformation | None = None,
  steps: StepsLike = None,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """Adds Gaussian noise to tangent coordinates, then projects the sum.

  After :func:`intrinsic_clip` this is the isotropic tangent noise of PRISM
  (arXiv:2606.00944, Eq. 17-21): the noise of each module has the expected
  square ``stddev^2 r (m + n - r)``.

  **Privacy.** The mechanism releases ``X + stddev * N(0, I)`` on ALL entries of
  the coordinates and of the other leaves, a space whose dimension does not
  depend on the data or the parameters. With
  ``stddev = noise_multiplier * clip.sensitivity()``, per coordinate and in the
  unit of the incoming sum or mean, one update is a Gaussian mechanism of that
  noise multiplier for add-or-remove-one neighbours (arXiv:2606.00944, Theorem
  3.4, Lemma A.27 for a subspace). The projection ``X_L <- (I - P_L) X_L`` and
  the masks of rank-deficient factors act on the noisy sum and are
  post-processing: privacy needs a bound on the Euclidean norm of the input, and
  no accuracy of any frame.

  Not covered: the sensitivity, which the clip in front must bound; several
  updates, which an accountant composes; and leaves that ``optax.masked`` or
  ``optax.partition`` hides, which get no noise and are private only if
  something else sets them to zero. Two privatizers in two branches are two
  mechanisms on the same batch. So keep the noise outside of any mask, like the
  clip. With ``privatizer`` that privatizer's guarantee holds.

  ============================  ===============================================
  zeros come in (empty batch)   noise all the same
  floats from another clip      each entry is cut to a whole step of the noise,
                                ``stddev / 917504``: one record can move it by
                                the sensitivity, its roundings and one step
  NaN or Inf comes in           NaN or Inf goes out: put a clip before it
  factor zero or of lower rank  all entries get noise; coordinates that cannot
                                be observed are masked afterwards
  beyond ``steps``              ValueError, or under ``jit`` zeros: no release
  ``stddev=0.0``                no noise and no privacy, for tests
  ============================  ===============================================

  Args:
    stddev: Standard deviation of the noise per coordinate, not in total, in the
      unit of the input (``noise_multiplier * l2_clip_norm /
      expected_batch_size`` after a mean). Zero is allowed and gives no privacy.
      May be traced.
    prng_key: None takes a seed from the operating system in ``init`` (outside
      of ``jit``), and so does ``'chacha20'``, for noise of a cryptographic
      generator with a key of 256 bits, which is slower. An int or a typed key
      makes noise that anybody who knows it can repeat. Call ``init`` once per
      privacy budget: a second call with the same key repeats the noise.
    privatizer: Replaces ``stddev``: any privatizer in the manner of optax
      (jax-privacy's), which adds its own noise to trees in the shapes of the
      parameters. For noise that is correlated over steps use
      :func:`correlated_tangent_privatizer`: in coordinates that turn from step
      to step it does not cancel.
    steps: The number of updates that were accounted for. Beyond it nothing is
      released: an update raises where the step count is known, and under
      ``jit`` returns zeros, neither signal nor noise. A ``privatizer`` needs
      it, because its noise may be made for so many updates (jax-privacy's dense
      matrix factorization repeats its last row for ever); ``'unlimited'`` says
      that each update draws noise of its own.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation on trees in the shapes of the parameters; ``update`` needs
    ``params``. Noise is drawn in float32 (float64 for float64 parameters),
    whatever the type of the parameters. ``update(..., release_digest=None)``
    takes (8,) uint32 that say what is released (data, program, machine): with
    another digest an old state draws fresh noise, with the same one the same.
    A chain of ours or of optax passes it on.

  Raises:
    ValueError: Unless exactly one of ``stddev`` and ``privatizer`` is given,
      the latter with ``steps``; beyond them, as above; if ``stddev`` is
      negative or not finite; if ``prng_key`` is no key; if ``init`` is traced
      with ``prng_key=None``.

  Example:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import prism_optax
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = prism_optax.tangent_privatizer(2.0)
    >>> noise, state = tx.update(optax.tree.zeros_like(params), tx.init(params),
    ...                          params)
    >>> float(noise['lora_b'][0, 0])  # The frame's direction: in lora_a only.
    0.0
  """
  last = check_source('stddev', stddev, prng_key, privatizer, steps)
  if stddev is not None:
    noise = gaussian(stddev, prng_key, last)
  else:
    assert privatizer is not None  # As `check_source` has seen.
    noise = limited(noised_elsewhere(privatizer), last)

  def init(step):
    if privatizer is None:
      return noise.init(step.params)
    # It sees coordinates: in the shapes of params, float32 at least.
    return noise.init(step.to_tree(step.tree.coordinates(step.params)))

  def update(stacks, state, step, *, release_digest=None, **extra_args):
    del extra_args
    # Noise on every entry first; projector and masks act on the sum.
    if privatizer is None:
      if not isinstance(stacks, ClippedSum):
        stacks = stacks.map_pairs(fixed_rank.multiply_out)
      noisy, state = noise.update(stacks, state, release_digest=release_digest)
    else:
      tree, state = noise.update(
        step.to_tree(stacks), state, release_digest=release_digest
      )
      noisy = step.tree.coordinates(tree)
    pairs = map_ranks(projected, step.frames, noisy.pairs)
    return noisy._replace(pairs=pairs), state

  return TangentTransformation(
    Stacked('tangent_privatizer', init, update, ('noise',)), layout
  )
