"""The clip and the noise of a training, read from its program.

What an optimizer says of itself is not asked for. Its update is traced once, of
shapes alone, and the marks that clips and noise leave in the program tell what
one record can add to the sum and which noise the sum then gets.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax

from prism_optax._proofs import _release
from prism_optax._proofs._equations import names_of
from prism_optax._proofs._kinds import DRAWN, PRIVATE, PUBLIC, Label, by
from prism_optax._proofs._proof import Proof
from prism_optax._proofs._release import CLAIM as CLAIM
from prism_optax._proofs._walk import FoundRelease, Walk
from prism_optax._types import ArrayTree
from prism_optax.transforms._chain import are_coordinates

_INSTEAD = (
  ' Give an optimizer of optax, prism_optax.prism, published_prism or'
  ' dp_muon, or a function that makes a chain of intrinsic_clip('
  'l2_clip_norm, normalize_by=expected_batch_size) and, directly after it,'
  ' tangent_privatizer(noise_multiplier * l2_clip_norm / expected_batch_size,'
  ' prng_key=prng_key, steps=steps), with the constants that it is called with.'
)


def look(
  transformation: optax.GradientTransformationExtraArgs,
  params: ArrayTree,
  rows: int,
) -> Walk:
  """What an update does with per-example gradients.

  Args:
    transformation: From per-example gradients to updates.
    params: Shapes of the parameters.
    rows: Size of the padded batch.
  """

  def update(
    params: ArrayTree,
    state: optax.OptState,
    grads: ArrayTree,
    is_padding: jax.Array,
  ) -> ArrayTree:
    updates, state = transformation.update(
      grads, state, params, is_padding_example=is_padding
    )
    if are_coordinates(updates):
      raise ValueError(
        'Expected optimizer to return updates of the parameters, got tangent'
        f' coordinates: end its chain with prism_optax.retract().{_INSTEAD}'
      )
    return updates, state

  def made_up(params: ArrayTree) -> ArrayTree:
    grads = jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), params)
    return transformation.init(params), grads, jnp.zeros(rows, bool)

  args = params, *jax.eval_shape(made_up, params)
  jaxpr, out = jax.make_jaxpr(update, return_shape=True)(*args)
  return _release.look(
    jaxpr,
    labels(args, (PUBLIC,) * 2 + (PRIVATE, DRAWN)),
    names_of(out),
  )


def labels(
  args: Sequence[ArrayTree], of_args: tuple[Label, ...]
) -> list[Label]:
  """The label of each leaf, from one of each argument."""
  return [
    label
    for arg, label in zip(args, of_args, strict=True)
    for _ in jax.tree.leaves(arg)
  ]


def check(found: Walk, noise_multiplier: float, releases: int) -> None:
  """Refuses a program that releases more than is accounted for.

  Args:
    found: What was seen of it.
    noise_multiplier: Of all that a step releases, as it is accounted; 0 for
      tests, where everything passes.
    releases: How many there are: the gradients, and the votes of a quantile.

  Raises:
    ValueError: Saying what was found and what to do.
  """
  if not noise_multiplier:
    return
  if found.offence is not None:
    raise ValueError(
      'Something of the records leaves the optimizer without the noise of this'
      f' training: {found.offence}.{_INSTEAD}'
    )
  joint = joint_noise_multiplier(found, releases)
  if joint < noise_multiplier * (1 - 1e-6):
    raise ValueError(
      f'Expected the noise multiplier of this training, {noise_multiplier:.9g},'
      f' got one of {joint:.9g}: the smallest standard deviation of the noise'
      ' over what one record can add, of all that is clipped together.'
      f'{_INSTEAD}'
    )


def joint_noise_multiplier(found: Walk, releases: int) -> float:
  """The noise multiplier of all releases of a program together.

  Groups of bound C_g with noise s_g are one Gaussian mechanism of the noise
  multiplier ``1 / sqrt(sum_g (C_g / s_g)^2)``.

  Raises:
    ValueError: Unless each is independent noise of this package, directly
      after a clip of this package, of known size.
  """
  if len(found.releases) != releases:
    raise ValueError(
      f'Expected noise to be added {releases} times in a step, got'
      f' {len(found.releases)}{_places(found)}.{_INSTEAD}'
    )
  total = 0.0
  for release in found.releases:
    own = _sources(release)
    clip = found.clips[next(iter(own))[0]]
    if clip.what.declared:
      raise ValueError(
        f'What is declared at {clip.place} is not known to be clipped.'
        f'{_INSTEAD}'
      )
    stddevs: dict[int, float] = {}
    for (_, position), stddev in own.items():
      leaf = clip.leaves[position]
      if stddev is None or clip.what.lattice[leaf] != stddev:
        raise ValueError(
          f'The sum of the clip at {clip.place} was made for noise of standard'
          f' deviation {clip.what.lattice[leaf]}, and the noise at'
          f' {release.place} has {stddev}: expected one and the same number'
          f' (None is one that is traced).{_INSTEAD}'
        )
      stddevs[leaf] = min(stddev, stddevs.get(leaf, math.inf))
    for group in clip.what.groups:
      # What gets no noise goes nowhere, or it would have been seen.
      noise = min(stddevs.get(leaf, math.inf) for leaf in group.leaves)
      if group.bound is None:
        raise ValueError(
          f'The clip norm at {clip.place} is traced, so that it cannot be'
          f' compared with the noise.{_INSTEAD}'
        )
      total += group.matrices * (group.bound / noise) ** 2
  return total**-0.5 if total else math.inf


def _sources(release: FoundRelease) -> dict[tuple[int, int], float | None]:
  """From each output of a clip that enters noise to its standard deviation."""
  if release.what.declared:
    raise ValueError(
      f'The noise at {release.place} is not of this package, so that it cannot'
      f' be compared with what is accounted for.{_INSTEAD}'
    )
  if release.repeated:
    raise ValueError(
      f'Noise is added in a loop, at {release.place}: each time is a release of'
      f' its own.{_INSTEAD}'
    )
  out: dict[tuple[int, int], float | None] = {}
  for leaf, label in zip(release.leaves, release.labels, strict=True):
    if label.direct is None or label.direct in out:
      raise ValueError(
        f'Between a clip and the noise at {release.place} stands'
        f' {by(label)}: the noise must be directly after the'
        ' clip, which then gives it an exact sum.'
        f'{_INSTEAD}'
      )
    out[label.direct] = release.what.stddevs[leaf]
  if len({number for number, _ in out}) != 1:
    raise ValueError(
      f'Expected one clip before the noise at {release.place}.{_INSTEAD}'
    )
  return out


def _places(found: Walk) -> str:
  places = ', '.join(x.place for x in found.releases)
  return f' ({places})' if places else ''


def prove_step(
  traced: jax.stages.Traced,
  args: tuple[ArrayTree, ...],
  noise_multiplier: float,
  releases: int,
) -> Proof | None:
  """Proves that the step that will run lets nothing past the noise.

  Args:
    traced: ``jax.stages.Traced`` of ``args``.
    args: Parameters, state, frozen weights, examples, padding, which records of
      users are there, and the digest that keys of noise depend on. The digest
      is one of the records, too, under a secret key: only keys read it.
    noise_multiplier: As for :func:`check`; without noise nothing is proved.
    releases: As for :func:`check`.

  Returns:
    The proof, or None.

  Raises:
    ValueError: If it does not hold.
  """
  if not noise_multiplier:
    return None
  of_args = (*(PUBLIC,) * 3, PRIVATE, DRAWN, PRIVATE, PUBLIC)
  found = _release.look(
    traced.jaxpr, labels(args, of_args), names_of(traced.out_info)
  )
  if found.offence is not None:
    raise ValueError(
      'Something of the records leaves the step without noise, or decides what'
      f' is computed: {found.offence}.'
    )
  check(found, noise_multiplier, releases)
  for clip in found.clips:
    if not clip.what.as_made:
      raise ValueError(
        f'Something stands before the clip at {clip.place}, which gets other'
        ' gradients than those that were proved to depend on one record alone,'
        ' or another is_padding_example: hand both to the clip as they are.'
        f'{_INSTEAD}'
      )
  for release in found.releases:
    if not release.what.with_digest:
      raise ValueError(
        f'The noise at {release.place} would be the same for other records if'
        ' the step is done again: hand release_digest to it, as update gets'
        f' it.{_INSTEAD}'
      )
  return _release.proof(found)
