"""The chains that are attacked: the library's, and wrong ones beside them."""

import jax
import jax.numpy as jnp
import optax

import prism_optax
from prism_optax import contrib, fixed_rank, transforms
from tests.audit.harness import CLIP, EXPECTED_BATCH_SIZE, recorder
from tests.core import seams

LEARNING_RATE = 0.05
RECORDER = 2  # Its position in the chains of this file.


def stddev_of(noise_multiplier):
  return noise_multiplier * CLIP / EXPECTED_BATCH_SIZE


def clip():
  return prism_optax.intrinsic_clip(CLIP, normalize_by=EXPECTED_BATCH_SIZE)


def direction(kind, noise_multiplier):
  """What may follow the noise: each a list of transformations.

  Of a single step nothing behind the noise is seen: `'none'` compiles faster.
  """
  if kind == 'none':
    return []
  stddev = stddev_of(noise_multiplier)
  rate = optax.scale_by_learning_rate(LEARNING_RATE)
  if kind == 'muon':
    return [contrib.orthogonalize_tangents(), rate, prism_optax.retract()]
  if kind == 'published':
    return [
      transforms.scale_by_published_preconditioner(noise_stddev=stddev),
      rate,
      prism_optax.retract(align=True),
    ]
  options = {
    'orthonormal': {},
    # All eigenvalues raised to the largest: a momentum and nothing else.
    'momentum': {'max_condition_number': 1.0},
  }[kind]
  return [
    prism_optax.scale_by_rank_preconditioner(noise_stddev=stddev, **options),
    rate,
    prism_optax.retract(),
  ]


def prism_chain(noise_multiplier, key, factor=1.0, *, kind='orthonormal',
                privatizer=None, clip_with=None):  # fmt: skip
  """`prism` spelled out, with a recorder behind the noise.

  Args:
    noise_multiplier: That the chain claims.
    key: Of the noise.
    factor: Of the noise that is really added.
    kind: See :func:`direction`.
    privatizer: In place of the library's, with its arguments.
    clip_with: In place of the clip.
  """
  privatizer = privatizer or prism_optax.tangent_privatizer
  return optax.chain(
    clip_with or clip(),
    privatizer(factor * stddev_of(noise_multiplier), prng_key=key), recorder(),
    *direction(kind, noise_multiplier),
  )  # fmt: skip


def matrices(tree):
  """The factors for Muon, the vector not."""
  return jax.tree.map(
    lambda x: optax.contrib.MuonDimensionNumbers() if x.ndim == 2 else None,
    tree,
  )


def dp_muon_of(noise_multiplier):
  """From a key, and what the noise is multiplied by, to an optimizer."""

  def optimizer_of(key, noise):
    return prism_optax.dp_muon(
      LEARNING_RATE, l2_clip_norms=CLIP, prng_key=key,
      noise_multiplier=noise_multiplier * noise,
      expected_batch_size=EXPECTED_BATCH_SIZE,
      weight_dimension_numbers=matrices,
    )  # fmt: skip

  return optimizer_of


# Wrong parts.


def clip_that_forgets_a_module(forgotten='m1'):
  """The sum of `m1` is taken as it is."""
  honest = clip()

  def update(updates, state, params, is_padding_example=None, **extra_args):
    del extra_args
    clipped, state = honest.update(
      updates, state, params, is_padding_example=is_padding_example
    )
    # One bound so large that nothing is clipped.
    loose = prism_optax.intrinsic_clip(1e9, normalize_by=EXPECTED_BATCH_SIZE)
    raw, _ = loose.update(
      updates, state, params, is_padding_example=is_padding_example
    )
    return clipped | {forgotten: raw[forgotten]}, state

  return optax.GradientTransformationExtraArgs(honest.init, update)


def clip_divided_by_the_realised_size():
  """The mean of whoever is there, in place of the public divisor."""
  honest = prism_optax.intrinsic_clip(CLIP)

  def update(updates, state, params, is_padding_example=None, **extra_args):
    del extra_args
    total, state = honest.update(
      updates, state, params, is_padding_example=is_padding_example
    )
    size = jnp.maximum(jnp.sum(~is_padding_example), 1)
    return jax.tree.map(lambda x: x / size, total), state

  return optax.GradientTransformationExtraArgs(honest.init, update)


def noise_with_one_key(stddev, prng_key):
  """A privatizer that forgets to move its key on."""
  honest = prism_optax.tangent_privatizer(stddev, prng_key=prng_key)

  def update(updates, state, params=None):
    noisy, _ = honest.update(updates, state, params)
    return noisy, state

  return optax.GradientTransformation(honest.init, update)


def _of_a_key(prng_key, update):
  return optax.GradientTransformation(lambda _: jnp.copy(prng_key), update)


def _noise_of_its_own_shape(stddev, prng_key, shaped):
  """Adds ``shaped(params, noise)``; the signal passes as it is."""

  def update(updates, state, params=None):
    next_key, noise_key = jax.random.split(state)
    noise = optax.tree.random_like(noise_key, updates)
    noise = shaped(params, optax.tree.scale(stddev, noise))
    return optax.tree.add(updates, noise), next_key

  return _of_a_key(prng_key, update)


def noise_projected_by_a_completed_frame(stddev, prng_key):
  """The QR of a zero factor gives unit vectors: r rows stay without noise."""

  def shaped(params, noise):
    out = {'extra': noise['extra']}
    for name in ('m0', 'm1'):
      left, right = params[name]['lora_b'].T, params[name]['lora_a']
      basis, _ = jnp.linalg.qr(left)
      n_left = noise[name]['lora_b'].T
      n_left = n_left - basis @ (basis.T @ n_left)
      out[name] = {'lora_b': n_left.T, 'lora_a': 0 * right}
    return out

  return _noise_of_its_own_shape(stddev, prng_key, shaped)


def noise_with_damped_whitening(stddev, prng_key, damping=1e-6):
  """Noise goes through ``(C^T C + damping)^-1 C^T C``, the signal does not."""

  def shaped(params, noise):
    out = {'extra': noise['extra']}
    for name in ('m0', 'm1'):
      pair = {}
      for side, other in (('lora_b', 'lora_a'), ('lora_a', 'lora_b')):
        factor = params[name][other]
        factor = factor if other == 'lora_a' else factor.T
        gram = factor.T @ factor
        damped = jnp.linalg.solve(gram + damping * jnp.eye(gram.shape[0]), gram)
        n = noise[name][side]
        pair[side] = (n.T @ damped).T if side == 'lora_b' else n @ damped
      out[name] = pair
    return out

  return _noise_of_its_own_shape(stddev, prng_key, shaped)


def factor_moments_of_two_lifts(stddev, prng_key):
  """The signal lifted half and half, the noise horizontally.

  Both pairs of factor steps stand for tangent vectors of the right law, but
  along their difference there is signal and no noise. Moments of the factors
  read it. What comes out is ``{'m0': (dL, dR), ...}``.
  """

  def update(updates, state, params=None):
    next_key, noise_key = jax.random.split(state)
    out = {}
    for i, name in enumerate(('m0', 'm1')):
      factors = fixed_rank.Factors(
        params[name]['lora_b'].T, params[name]['lora_a']
      )
      frame = fixed_rank.frame(factors)
      x = fixed_rank.Tangent(updates[name]['lora_b'].T, updates[name]['lora_a'])
      keys = jax.random.split(jax.random.fold_in(noise_key, i))
      noise = fixed_rank.Tangent(
        *(stddev * jax.random.normal(k, y.shape)
          for k, y in zip(keys, x, strict=True))
      )  # fmt: skip
      noise = seams.lift(frame, fixed_rank.project(frame, noise))
      core = x.right.T @ frame.right
      left = x.left + frame.left @ core / 2
      right = x.right - frame.right @ core.T / 2
      signal = (
        jnp.linalg.solve(frame.right_core, left.T).T,
        jnp.linalg.solve(frame.left_core, right.T).T,
      )
      out[name] = (signal[0] + noise.left, signal[1] + noise.right)
    return out, next_key

  return _of_a_key(prng_key, update)
