"""The methods that are compared, as `make_private` takes an optimizer.

A method on the manifold is a function that makes PRISM's chain of the constants
of the mechanism. A method on the factors is an optimizer of optax, in front of
which `make_private` clips and noises the gradients as they are.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy import noise_addition
from jax_privacy.matrix_factorization import toeplitz

import prism_optax
from benchmarks.common import baselines
from prism_optax import accounting, contrib, transforms
from prism_optax.finetune.methods import matrices

Scalar = Any


def spelled_out(
  rate: optax.ScalarOrSchedule,
  noise: optax.GradientTransformation,
  noise_stddev: Scalar,
  clip: optax.GradientTransformation | None = None,
  weight_decay: Scalar = 0.1,
  chain: Callable[..., Any] = prism_optax.chain,
  scale: Callable[..., Any] = prism_optax.scale_by_learning_rate,
  adapt: Callable[..., Any] = lambda x: x,
  **preconditioner: Any,
) -> optax.GradientTransformationExtraArgs:
  """The lines of ``prism``, to be changed one by one.

  Args:
    rate: A number or a schedule.
    noise: What privatizes the mean.
    noise_stddev: Its standard deviation.
    clip: In front of the noise.
    weight_decay: Decay of Z.
    chain: Of this library or of optax.
    scale: Likewise.
    adapt: What the preconditioner is put into.
    **preconditioner: Options of ``scale_by_rank_preconditioner``.
  """
  return chain(
    *([] if clip is None else [clip]),
    noise,
    adapt(
      prism_optax.scale_by_rank_preconditioner(
        noise_stddev=noise_stddev, **preconditioner
      )
    ),
    prism_optax.add_decayed_factors(weight_decay),
    scale(rate),
    prism_optax.retract(),
  )


def _of_parts(
  rate: optax.ScalarOrSchedule,
  *,
  l2_clip_norm: Scalar,
  noise_multiplier: Scalar,
  expected_batch_size: Scalar,
  prng_key: Any = None,
  steps: int | None = None,
  per_example_gradients: bool = True,
  options: Mapping[str, Any],
) -> optax.GradientTransformationExtraArgs:
  """``prism`` with options of its parts.

  `make_private` looks at the names of arguments: none may be any name.
  """
  options = dict(options)
  stddev = noise_multiplier * l2_clip_norm / expected_batch_size
  clip = prism_optax.intrinsic_clip(
    l2_clip_norm, normalize_by=expected_batch_size
  )
  if options.pop('adapt', False):
    options['adapt'] = functools.partial(
      transforms.adapt_step_size, noise_stddev=stddev
    )
  return spelled_out(
    rate,
    prism_optax.tangent_privatizer(stddev, prng_key=prng_key, steps=steps),
    stddev,
    clip=clip if per_example_gradients else None,
    **options,
  )


def prism(rate: optax.ScalarOrSchedule, **options: Any) -> Callable[..., Any]:
  """``prism`` with options of its own and of its preconditioner."""
  if set(options) <= {'weight_decay', 'b1', 'b2', 'layout'}:
    return functools.partial(prism_optax.prism, rate, **options)
  return functools.partial(_of_parts, rate, options=options)


MANIFOLD: dict[str, Callable[..., Any]] = {
  'prism': prism,
  'prism, adapted': functools.partial(prism, adapt=True),
  'prism, decayed': functools.partial(prism, weight_decay=1.0),
  'prism, paper mode': lambda rate, **options: functools.partial(
    prism_optax.published_prism, rate, **options
  ),
  'prism, muon': lambda rate: functools.partial(contrib.prism_muon, rate),
}


@dataclasses.dataclass(frozen=True)
class OnFactors:
  """An optimizer of the factors as plain arrays.

  Attributes:
    direction: ``direction(b1, stddev)`` makes the transformation that gives the
      direction; ``stddev`` is that of the noise on the mean.
    weight_decay: As it is usually used; so is the next one.
    warm_up: Whether steps grow as ``1 - b1^t``.
  """

  direction: Callable[[Any, Any], optax.GradientTransformation]
  weight_decay: float = 0.0
  warm_up: bool = False


def _adam(b1: Any, stddev: Any) -> optax.GradientTransformation:
  del stddev
  return optax.scale_by_adam(b1=b1)


FACTORS = {
  'dp-adamw': OnFactors(_adam, weight_decay=1e-4),
  # What helped PRISM: much decay, and a warm-up. The factors are decayed, not
  # their product: in the gauge of a fresh start the two are alike.
  'dp-adamw, decayed': OnFactors(_adam, weight_decay=1.0, warm_up=True),
  'lora+': OnFactors(
    lambda b1, _: optax.chain(
      optax.scale_by_adam(b1=b1), baselines.scale_where('lora_b', 6.0)
    )
  ),
  'ffa': OnFactors(_adam),  # A is not among its parameters.
  'lamb': OnFactors(
    lambda b1, _: optax.chain(
      optax.scale_by_adam(b1=b1, eps=1e-6), optax.scale_by_trust_ratio()
    )
  ),
  'lora-rite': OnFactors(lambda b1, _: baselines.scale_by_rite(b1)),
  'lora-rite, spectral start': OnFactors(
    lambda b1, _: baselines.scale_by_rite(b1)
  ),
  'dp-adambc': OnFactors(lambda b1, stddev: baselines.scale_by_bc(stddev, b1)),
  'linear probe': OnFactors(_adam, weight_decay=1e-4),
}
METHODS = (*MANIFOLD, *FACTORS, 'dp-muon')


def parameters_of(method: str) -> str:
  """``'lora'``, ``'lora_b'``, ``'matrices'`` or ``'head'``: what is trained."""
  names = {'ffa': 'lora_b', 'dp-muon': 'matrices', 'linear probe': 'head'}
  return names.get(method, 'lora')


def is_tangent(method: str) -> bool:
  """Whether the method works on the manifold."""
  return method in MANIFOLD


def sensitivity_of_groups(params: Any) -> float:
  """Of DP-Muon's sum, where each matrix is clipped to norm one."""
  unit = prism_optax.per_matrix_clip(1.0, weight_dimension_numbers=matrices)
  return float(unit.sensitivity(params=params))


def in_adapter(path: tuple[Any, ...]) -> bool:
  """Whether a leaf is a factor."""
  return path[-1].key in ('lora_a', 'lora_b')


def _decayed(decay: Any) -> optax.GradientTransformation:
  """Weight decay of the factors, not of the head."""
  return optax.stateless(
    lambda updates, params: jax.tree.map_with_path(
      lambda path, u, p: u + decay * p if in_adapter(path) else u,
      updates,
      params,
    )
  )


def optimizer(
  method: str,
  rate: Any,
  *,
  stddev: Any,
  b1: Any = None,
  decay: Any = None,
  **options: Any,
) -> Any:
  """What `make_private` takes.

  Args:
    method: One of ``METHODS``.
    rate: A number or a schedule.
    stddev: Of the noise on the mean.
    b1: Decay of the first moment, with a warm-up of ``1 - b1^t`` for all, and
      ``decay`` of the factors; None for what the method usually has.
    decay: Weight decay, with ``b1``.
    **options: Of ``prism``.
  """
  if method == 'dp-muon':
    return functools.partial(
      prism_optax.dp_muon,
      rate,
      consistent_rms=0.2,
      weight_dimension_numbers=matrices,
    )
  if method in MANIFOLD:
    if b1 is not None:
      options['b1'] = b1
      if method != 'prism, paper mode':
        options['weight_decay'] = decay
    return MANIFOLD[method](rate, **options)
  found = FACTORS[method]
  usual = b1 is None
  b1 = 0.9 if usual else b1
  parts = [found.direction(b1, stddev)]
  if found.warm_up and usual:  # The decay is as slow as the steps.
    parts += [
      optax.add_decayed_weights(found.weight_decay),
      optax.scale_by_schedule(lambda t: 1 - jnp.power(b1, t + 1.0)),
    ]
  elif usual:
    parts.append(optax.add_decayed_weights(found.weight_decay))
  else:
    parts += [
      optax.scale_by_schedule(lambda t: 1 - jnp.power(b1, t + 1.0)),
      _decayed(decay),
    ]
  return optax.chain(*parts, optax.scale_by_learning_rate(rate))


def strategy_coefficients(steps: int, epoch: int) -> jax.Array:
  """Bands of the matrix of prefix sums, none longer than an epoch.

  Toeplitz, optimal for the largest error of a prefix sum (Fichtenberger et al.
  2023, arXiv:2202.11205).
  """
  coefficients = toeplitz.optimal_max_error_strategy_coefs(steps)
  return jnp.where(jnp.arange(steps) < epoch, coefficients, 0.0)


def correlated_noise_multiplier(
  epsilon: float, delta: float, strategy: Any, epoch: int
) -> float:
  """Of a strategy matrix, where each record is drawn once in an epoch."""
  return float(
    accounting.calibrate_matrix_mechanism(
      epsilon, delta, np.asarray(strategy),
      max_participations=-(-len(strategy) // epoch), min_separation=epoch,
    )
  )  # fmt: skip


def correlated_privatizer(
  matrix: Any, stddev: Any, steps: int, key: Any
) -> optax.GradientTransformation:
  """jax-privacy's correlated noise, kept in fixed tangent coordinates."""
  return prism_optax.correlated_tangent_privatizer(
    lambda key: noise_addition.matrix_factorization_privatizer(
      matrix, stddev=stddev, prng_key=key
    ),
    steps=steps,
    prng_key=key,
  )


def correlated(
  rate: Any,
  matrix: Any,
  *,
  l2_clip_norm: float,
  noise_multiplier: float,
  expected_batch_size: int,
  steps: int,
  prng_key: Any,
  weight_decay: float = 0.1,
) -> optax.GradientTransformation:
  """PRISM with correlated noise.

  Not by `make_private`, whose batches are Poisson samples: correlated noise is
  accounted for batches in a fixed order.
  """
  stddev = noise_multiplier * l2_clip_norm / expected_batch_size
  with jax.ensure_compile_time_eval():  # A constant, also inside of a step.
    per_step = transforms.correlated_noise_stddev(matrix, stddev, steps)
  return spelled_out(
    rate,
    correlated_privatizer(matrix, stddev, steps, prng_key),
    per_step,
    clip=prism_optax.intrinsic_clip(
      l2_clip_norm, normalize_by=expected_batch_size
    ),
    weight_decay=weight_decay,
  )
