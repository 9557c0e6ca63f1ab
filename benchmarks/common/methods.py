"""The methods that are compared, and all that is not PRISM's default.

A method says what happens to one example's gradient before it is clipped, and
gives an optax transformation of the clipped mean, which adds the noise. What
the benchmarks change about PRISM (options that the optimizer's alias does not
have, or only some of its parts) is spelled out here and nowhere else.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from finetuning import methods as finetuning_methods
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import toeplitz

import prism_optax
from benchmarks.common import baselines
from prism_optax import contrib, fixed_rank, lora, transforms
from prism_optax.transforms import _moments, _published


class Release(NamedTuple):
  """What a transformation of the clipped mean has to know.

  Attributes:
    clip: C, the largest norm of one example's gradient.
    batch: b, the divisor of the sum.
    stddev: Standard deviation of the noise on the mean, per coordinate,
      ``noise_multiplier * C / b``; may be 0.
    key: Key of the noise.
    steps: How many updates there will be.
    epoch: Number of steps after which a row comes back where the order is
      fixed.
  """

  clip: Any
  batch: int
  stddev: Any
  key: jax.Array
  steps: int = 0
  epoch: int = 0

  @property
  def mechanism(self) -> dict[str, Any]:
    """The arguments that the optimizers of this library share."""
    return {
      'l2_clip_norm': self.clip,
      'noise_multiplier': self.stddev * self.batch / self.clip,
      'expected_batch_size': self.batch,
      'prng_key': self.key,
    }


@dataclasses.dataclass(frozen=True)
class Method:
  """One way to train.

  Attributes:
    make: ``make(rate, release, params, layout)``, a transformation of the
      clipped mean; only shapes of ``params`` are read.
    coordinates: ``coordinates(params, release, layout)`` is applied to one
      example's gradient before the clip.
    prepare: ``prepare(params, layout)``, once before training.
    parameters: ``'lora'``, ``'matrices'`` (the kernels themselves) or
      ``'head'`` (a linear probe).
    correlated: Whether the noise is correlated over the steps, so that batches
      are drawn in a fixed order and accounted without amplification.
  """

  make: Callable[..., optax.GradientTransformation]
  coordinates: Callable[..., Callable] = lambda *_: lambda gradients: gradients
  prepare: Callable[..., Any] = lambda params, layout: params
  parameters: str = 'lora'
  correlated: bool = False


def prism_with(
  learning_rate: optax.ScalarOrSchedule,
  *,
  l2_clip_norm: Any,
  noise_multiplier: Any,
  expected_batch_size: Any,
  prng_key: Any,
  per_example_gradients: bool = True,
  weight_decay: Any = 0.1,
  layout: Any = None,
  scales_rows: bool = False,
  **preconditioner: Any,
) -> optax.GradientTransformationExtraArgs:
  """PRISM spelled out, for options that ``prism_optax.prism`` need not have.

  Args:
    learning_rate: A number or a schedule.
    l2_clip_norm: C.
    noise_multiplier: Standard deviation of the noise over C / b.
    expected_batch_size: b.
    prng_key: Key of the noise.
    per_example_gradients: Whether the clip is in the chain.
    weight_decay: Decay of Z.
    layout: How the pairs are found in the tree.
    scales_rows: Whether ``scale_by_row_moments`` comes behind the noise.
    **preconditioner: Options of ``scale_by_rank_preconditioner``: ``b1``,
      ``b2``, ``floor_factor``, ``bias_correction``,
      ``max_condition_number``.
  """
  stddev = noise_multiplier * l2_clip_norm / expected_batch_size
  parts = [
    prism_optax.tangent_privatizer(stddev, prng_key=prng_key),
    prism_optax.scale_by_rank_preconditioner(
      noise_stddev=stddev, **preconditioner
    ),
    prism_optax.add_decayed_factors(weight_decay),
    prism_optax.scale_by_learning_rate(learning_rate),
    prism_optax.retract(),
  ]
  if scales_rows:
    parts.insert(1, contrib.scale_by_row_moments(noise_stddev=stddev))
  if per_example_gradients:
    clip = prism_optax.intrinsic_clip(
      l2_clip_norm, normalize_by=expected_batch_size
    )
    parts.insert(0, clip)
  return prism_optax.chain(*parts, layout=layout)


def behind_the_noise(
  learning_rate: float,
  noise_stddev: float,
  *,
  published: bool = False,
) -> optax.GradientTransformation:
  """What PRISM does with the noisy mean, without weight decay.

  Args:
    learning_rate: Size of a step.
    noise_stddev: Standard deviation of the noise, per coordinate.
    published: Whether the moments are in the basis of the factors, as in the
      paper.
  """
  if published:
    preconditioner = _published.scale_by_published_preconditioner(
      noise_stddev=noise_stddev, floor_factor=0.5
    )
  else:
    preconditioner = prism_optax.scale_by_rank_preconditioner(
      noise_stddev=noise_stddev
    )
  return prism_optax.chain(
    preconditioner,
    prism_optax.scale_by_learning_rate(learning_rate),
    # The published optimizer turns the new factors towards the old ones.
    prism_optax.retract(align=published),
  )


def preconditioned(state: Any, frames: Any, tangents: Any, b2: float) -> Any:
  """What the second moments of a preconditioner make of tangent vectors.

  Args:
    state: The state of ``scale_by_rank_preconditioner``, with its defaults.
    frames: The frame of each stack of modules.
    tangents: The tangent vectors there, in the place of the first moments.
    b2: Decay of the second moments.
  """
  options = _moments.Options(
    b1=0.9,
    b2=b2,
    eps=1e-8,
    floor_factor=1.0,
    max_condition_number=1e4,
    nu_correction=1 - b2 ** int(state.count),
  )
  return [
    fixed_rank.multiply_out(
      _moments.direction(
        moments._replace(mu=tangent),
        tangent.right.mT @ frame.right,
        frame,
        options,
      )
    )
    for moments, frame, tangent in zip(
      state.pairs, frames, tangents, strict=True
    )
  ]


def on_manifold(
  make_optimizer: Callable[..., optax.GradientTransformation],
  **options: Any,
) -> Method:
  """An optimizer of tangent coordinates, with options of its own."""

  def make(rate, release, params, layout):
    del params
    return make_optimizer(
      rate,
      per_example_gradients=False,
      layout=layout,
      **release.mechanism,
      **options,
    )

  def prepare(params, layout):
    return lora.canonicalize(params, layout=layout)

  def coordinates(params, release, layout):
    del release
    return prism_optax.tangent_coordinates(params, layout=layout)

  return Method(make, coordinates, prepare)


def strategy_coefficients(steps: int, epoch: int) -> jax.Array:
  """Bands of the matrix of prefix sums, none longer than an epoch.

  Toeplitz, optimal for the largest error of a prefix sum (Fichtenberger et al.
  2023, arXiv:2202.11205).
  """
  coefficients = toeplitz.optimal_max_error_strategy_coefs(steps)
  return jnp.where(jnp.arange(steps) < epoch, coefficients, 0.0)


def correlated_privatizer(
  matrix: Any, stddev: Any, steps: int, key: Any, layout: Any = None
) -> optax.GradientTransformation:
  """jax-privacy's correlated noise, kept in fixed tangent coordinates."""
  return prism_optax.correlated_tangent_privatizer(
    lambda key: noise_addition.matrix_factorization_privatizer(
      matrix, stddev=stddev, prng_key=key
    ),
    steps=steps,
    prng_key=key,
    layout=layout,
  )


def _prism_correlated() -> Method:
  """PRISM behind correlated noise."""

  def make(rate, release, params, layout):
    del params
    with jax.ensure_compile_time_eval():  # Constants, also inside of a step.
      bands = strategy_coefficients(release.steps, release.epoch)
      matrix = toeplitz.inverse_as_streaming_matrix(bands)
      per_step = transforms.correlated_noise_stddev(
        matrix, release.stddev, release.steps
      )
    return prism_optax.chain(
      correlated_privatizer(
        matrix, release.stddev, release.steps, release.key, layout
      ),
      prism_optax.scale_by_rank_preconditioner(noise_stddev=per_step),
      prism_optax.add_decayed_factors(0.1),
      prism_optax.scale_by_learning_rate(rate),
      prism_optax.retract(),
      layout=layout,
    )

  plain = on_manifold(prism_optax.prism)
  return dataclasses.replace(plain, make=make, correlated=True)


def _dp_muon() -> Method:
  """DP-Muon of the examples, on the kernels themselves."""
  groups = {'weight_dimension_numbers': finetuning_methods.matrices}

  def share(release, params):
    unit = prism_optax.per_matrix_clip(1.0, **groups)
    return release.clip / unit.sensitivity(params=params)

  def make(rate, release, params, layout):
    del layout
    mechanism = release.mechanism
    del mechanism['l2_clip_norm']
    return prism_optax.dp_muon(
      rate,
      l2_clip_norms=share(release, params),
      per_example_gradients=False,
      consistent_rms=0.2,
      **mechanism,
      **groups,
    )

  def coordinates(params, release, layout):
    del layout
    return transforms.clip_each_matrix(share(release, params), **groups)

  return Method(make, coordinates, parameters='matrices')


def _on_factors(
  make_optimizer: Callable[..., optax.GradientTransformation], **fields: Any
) -> Method:
  """``make_optimizer(rate, release)`` behind noise on the factors."""

  def make(rate, release, params, layout):
    del params, layout
    return optax.chain(
      baselines.add_noise(release.stddev, release.key),
      make_optimizer(rate, release),
    )

  return Method(make, **fields)


METHODS = {
  'prism': on_manifold(prism_optax.prism),
  'prism, decayed': on_manifold(prism_optax.prism, weight_decay=1.0),
  'prism, paper mode': on_manifold(prism_optax.published_prism),
  'prism, muon': on_manifold(contrib.prism_muon),
  'prism, correlated noise': _prism_correlated(),
  'dp-adamw': _on_factors(lambda rate, _: optax.adamw(rate)),
  'dp-adamw, decayed': _on_factors(
    lambda rate, _: baselines.adamw_decayed(rate)
  ),
  'lora+': _on_factors(lambda rate, _: baselines.lora_plus(rate)),
  'ffa': _on_factors(
    lambda rate, _: baselines.ffa(rate),
    coordinates=lambda *_: baselines.without_a,
  ),
  'lamb': _on_factors(lambda rate, _: optax.lamb(rate)),
  'lora-rite': _on_factors(lambda rate, _: baselines.lora_rite(rate)),
  'lora-rite, spectral start': _on_factors(
    lambda rate, _: baselines.lora_rite(rate)
  ),
  'dp-adambc': _on_factors(
    lambda rate, release: baselines.adam_bc(rate, release.stddev)
  ),
  'dp-muon': _dp_muon(),
  'linear probe': _on_factors(
    lambda rate, _: optax.adamw(rate), parameters='head'
  ),
}
