"""One way to fine-tune privately, with all that can be tuned about it."""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import prism_optax
from benchmarks.common import baselines, methods
from prism_optax import lora

# On the factors as plain arrays: `scale(b1, stddev)` is behind clip and noise,
# and what it gives is multiplied by minus the rate.
FACTORS: dict[str, Callable[..., optax.GradientTransformation]] = {
  'dp-adamw': lambda b1, _: optax.scale_by_adam(b1=b1),
  'lora+': lambda b1, _: optax.chain(
    optax.scale_by_adam(b1=b1), baselines.scale_where('lora_b', 6.0)
  ),
  'ffa': lambda b1, _: optax.chain(
    optax.scale_by_adam(b1=b1), baselines.scale_where('lora_a', 0.0)
  ),
  'dp-adambc': lambda b1, stddev: baselines.adam_bc(-1.0, stddev, b1),
  'lora-rite': lambda b1, _: baselines.lora_rite(-1.0, b1),
  'linear probe': lambda b1, _: optax.scale_by_adam(b1=b1),
}
MANIFOLD = ('prism', 'published_prism')
# Of sentence vectors, without adapters.
ON_VECTORS = ('linear probe', 'head alone')
METHODS = (*MANIFOLD, *FACTORS, 'head alone')


@dataclasses.dataclass(frozen=True)
class Recipe:
  """All that a result depends on.

  Attributes:
    method: One of ``METHODS``; ``'head alone'`` is the start, untrained.
    task: Key of ``problems.TASKS``.
    rate: At the first step; it falls linearly to zero.
    b1: Decay of the first moment. Steps grow as ``1 - b1^t``, a warm-up that
      all methods have but the published one.
    decay: Weight decay of the adapters, times the rate (not published).
    average: Whether the mean of the parameters of the second half of the steps
      is what is used (plain means of arrays: not for ``MANIFOLD``).
    start: ``'default'``, A random and B zero; ``'balanced'``; ``'spectral'``, A
      of the leading directions of what the frozen matrix reads.
    metric: Form of the input metric, or ``''``.
    head: Where the head starts, ``'means'`` or ``'ridge'`` (private releases of
      class means, or of ridge regression) or ``'zero'``. It is trained beside
      the adapters.
    epsilon: Of everything that reads private rows, at delta 1e-5.
    steps: Number of steps.
    batch: Expected batch size.
    seed: Of releases, start, batches and noise.
    head_rate: The head's rate over that of the adapters.
    head_share: Of the square of the clip norm, what the head has for itself; 0
      for one clip of both.
    scales_rows: See ``scale_by_row_moments``; for ``'prism'``.
  """

  method: str
  task: str
  rate: float = 0.0
  b1: float = 0.5
  decay: float = 0.0
  average: bool = False
  start: str = 'default'
  metric: str = ''
  head: str = 'means'
  epsilon: float = 3.0
  steps: int = 60
  batch: int = 256
  seed: int = 100
  head_rate: float = 1.0
  head_share: float = 0.0
  scales_rows: bool = False

  @property
  def name(self) -> str:
    """Of its result, another one for each recipe."""
    options = dataclasses.asdict(self)
    # Results are older than these fields.
    for field in dataclasses.fields(self):
      newer = field.name in ('head_rate', 'head_share', 'scales_rows')
      if newer and options[field.name] == field.default:
        del options[field.name]
    text = json.dumps(options, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class Knobs(NamedTuple):
  """The numbers of a recipe, traced: one program for all of them."""

  rate: Any
  b1: Any
  decay: Any
  head_rate: Any = 1.0


def coordinates(
  method: str, params: Any, head_share: Any = 0.0
) -> Callable[[Any], Any]:
  """What is done to one example's gradient before it is clipped to norm one."""
  if method in MANIFOLD:
    change: Callable[[Any], Any] = prism_optax.tangent_coordinates(params)
  elif method == 'ffa':
    change = baselines.without_a
  else:
    return lambda gradient: _clipped_apart(gradient, head_share)
  return lambda gradient: _clipped_apart(change(gradient), head_share)


def _clipped_apart(gradient: Any, head_share: Any) -> Any:
  """Head and adapters clipped to their shares, whose squares make one."""
  parts = {}
  for name, share in (('head', head_share), ('layers', 1 - head_share)):
    norm = optax.tree.norm(gradient[name])
    bound = jnp.where(head_share > 0, jnp.sqrt(share), jnp.inf)
    factor = jnp.where(norm > bound, bound / norm, 1.0)
    parts[name] = jax.tree.map(lambda g, f=factor: f * g, gradient[name])
  return {**gradient, **parts}


def optimizer(
  method: str,
  knobs: Knobs,
  stddev: Any,
  batch: int,
  key: Any,
  scales_rows: bool = False,
) -> optax.GradientTransformation:
  """What follows the clipped mean, noise first.

  Args:
    method: One of ``METHODS`` that trains.
    knobs: May be traced.
    stddev: Of the noise on the mean of gradients of norm at most 1.
    batch: Expected batch size.
    key: Of the noise.
    scales_rows: As in ``Recipe``.
  """
  return optax.chain(
    _at_one_rate(method, knobs, stddev, batch, key, scales_rows),
    # What is behind a retraction is added to the parameters as it is.
    optax.stateless(
      lambda updates, _: jax.tree.map_with_path(
        lambda path, u: u if _in_adapter(path) else knobs.head_rate * u, updates
      )
    ),
  )


def _at_one_rate(
  method: str,
  knobs: Knobs,
  stddev: Any,
  batch: int,
  key: Any,
  scales_rows: bool,
) -> optax.GradientTransformation:
  if method in FACTORS:
    # The factors decay, not the head; the product with the rate comes last.
    decay = optax.stateless(
      lambda updates, params: jax.tree.map_with_path(
        lambda path, u, p: u + knobs.decay * p if _in_adapter(path) else u,
        updates,
        params,
      )
    )
    return optax.chain(
      baselines.add_noise(stddev, key),
      FACTORS[method](knobs.b1, stddev),
      optax.scale_by_schedule(lambda t: 1 - jnp.power(knobs.b1, t + 1.0)),
      decay,
      optax.scale(-knobs.rate),
    )
  mechanism = {
    'l2_clip_norm': 1.0,
    'noise_multiplier': stddev * batch,
    'expected_batch_size': batch,
    'prng_key': key,
    'per_example_gradients': False,
    'b1': knobs.b1,
  }
  if method == 'published_prism':
    return prism_optax.published_prism(knobs.rate, **mechanism)
  return methods.prism_with(
    knobs.rate,
    weight_decay=knobs.decay,
    bias_correction=False,
    scales_rows=scales_rows,
    **mechanism,
  )


def _in_adapter(path: tuple[Any, ...]) -> bool:
  return path[-1].key in ('lora_a', 'lora_b')


def start(
  recipe: Recipe, kernels: dict[str, jax.Array], rank: int, key: jax.Array
) -> dict[str, dict[str, jax.Array]]:
  """Adapters before training, for the kernels (in, out) of a layer."""
  if recipe.method in ON_VECTORS:
    return {}
  keys = jax.random.split(key)
  adapters = {}
  for i, (name, kernel) in enumerate(sorted(kernels.items())):
    rows, columns = kernel.shape
    a = jax.random.normal(jax.random.fold_in(keys[0], i), (rows, rank))
    b = jnp.zeros((rank, columns))
    adapters[name] = {'lora_a': a * rows**-0.5, 'lora_b': b}
    if recipe.start == 'spectral':
      # The largest left singular vectors: (in, r), the length of the others.
      a = jnp.linalg.svd(kernel, full_matrices=False)[0][:, :rank]
      adapters[name]['lora_a'] = a
  if recipe.start == 'balanced':
    adapters = lora.initialize(adapters, keys[1], method='balanced', size=0.1)
  if recipe.method in MANIFOLD:
    adapters = lora.canonicalize(adapters)
  return adapters
