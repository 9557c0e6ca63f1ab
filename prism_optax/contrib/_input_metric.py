"""A change of variables that evens out what the adapted layers read.

Most of the energy of a layer's inputs lies in few directions. In a random frame
of rank r all columns see these and little else, so the gradients of the columns
are nearly one. With ``right = S right'``, ``S`` small along these directions,
the columns of ``right'`` see an input whose directions count alike. What S is
made of is released once, before the training.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _modules, _validate
from prism_optax._linalg._products import gram, matmul
from prism_optax._modules import LayoutLike, Module
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike
from prism_optax.contrib import _one_shot_release
from prism_optax.fixed_rank import Factors

FORMS = ('second_moment', 'mean')
# The scale along the mean direction; the largest share of the energy of a
# direction, in units of the mean over all of them; the smallest scale.
_MEAN_SCALE, _CAP, _SMALLEST = 0.25, 2.0, 0.1
# An eigenvalue counts from here on, in units of the largest that noise has.
_ABOVE_NOISE = 1.5
# Folded into a key that was given.
_PURPOSES = {
  'second_moment': int.from_bytes(b'MET2'),
  'mean': int.from_bytes(b'MET1'),
}
# Of fields that a program is compiled for.
_STATIC = {'static': True}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class InputMetric:
  """``S = I - Q diag(1 - s) Q^T`` for the inputs of some modules.

  A pytree. It is public once it is released, and everything computed with it is
  post-processing.

  Attributes:
    bases: For each pattern of module names ``Q`` (n, k), orthonormal columns;
      k may be zero.
    scales: For each pattern ``s`` (k,), in (0, 1].
    noise_multiplier: Of the release, a float.
    entries: Number of entries that got noise.
    dataset_size: Number of records that were declared.
    layout: Of the parameters, see :func:`prism_optax.lora.describe_pairs`.
    seeded: Whether the key of the noise was given. Whoever has that key can
      compute the noise.
    digest: Of the values that were released, and public, as
      :class:`prism_optax.contrib.heads.LinearHead` has it.
    key_digest: The same for the key of the noise.
  """

  bases: dict[str, jax.Array]
  scales: dict[str, jax.Array]
  noise_multiplier: float = dataclasses.field(metadata=_STATIC)
  entries: int = dataclasses.field(metadata=_STATIC)
  dataset_size: int = dataclasses.field(metadata=_STATIC)
  layout: LayoutLike = dataclasses.field(default=None, metadata=_STATIC)
  seeded: bool = dataclasses.field(default=False, metadata=_STATIC)
  digest: str = dataclasses.field(default='', metadata=_STATIC)
  key_digest: str = dataclasses.field(default='', metadata=_STATIC, repr=False)

  @property
  def event(self) -> dp_accounting.DpEvent:
    """The event of the release, to be composed with the training's."""
    return dp_accounting.GaussianDpEvent(self.noise_multiplier)

  def to_params(self, coordinates: optax.Params) -> optax.Params:
    """The adapters of the model, ``right = S right'``.

    Train ``right'``: give the loss ``to_params(coordinates)`` and differentiate
    with respect to the coordinates. If the coordinates start as usual, with
    zero on the output side, so does the model.

    Args:
      coordinates: Tree with LoRA pairs; other leaves pass.

    Returns:
      A tree like ``coordinates``, in its types.

    Raises:
      ValueError: If a pattern matches no module, or a module's inputs have
        another dimension.

    Example:
      >>> import jax.numpy as jnp
      >>> from prism_optax import contrib
      >>> metric = contrib.InputMetric(
      ...   {'q': jnp.eye(3, 1)}, {'q': jnp.array([0.5])}, 10.0, 6, 100)
      >>> x = {'q': {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}}
      >>> params = metric.to_params(x)
      >>> params['q']['lora_a'].ravel().tolist()
      [0.5, 1.0, 1.0]
      >>> metric.from_params(params)['q']['lora_a'].ravel().tolist()
      [1.0, 1.0, 1.0]
    """
    return self._changed(coordinates, lambda s: s)

  def from_params(self, params: optax.Params) -> optax.Params:
    """The coordinates of given adapters, ``right' = S^-1 right``.

    Args:
      params: Tree with LoRA pairs; other leaves pass.

    Returns:
      A tree like ``params``, in its types.

    Raises:
      ValueError: As :meth:`to_params`.
    """
    return self._changed(params, lambda s: 1 / s)

  def _changed(
    self, params: optax.Params, of_scale: Callable[..., ArrayTree]
  ) -> optax.Params:
    used = set()

    def changed(module: Module, factors: Factors) -> Factors:
      matches = fnmatch.fnmatch
      found = [x for x in self.bases if matches(module.name, x)]
      used.update(found)
      if not found:
        return factors
      basis, scale = self.bases[found[0]], of_scale(self.scales[found[0]])
      if basis.shape[0] != module.n:
        raise ValueError(
          f'Expected inputs of dimension {module.n} for {module.name!r}, got'
          f' {basis.shape[0]} for {found[0]!r}.'
        )
      along = gram(basis.astype(factors.right.dtype), factors.right)
      change = matmul(basis * (scale - 1), along)
      return Factors(factors.left, factors.right + change)

    new = _modules.map_factors(changed, params, self.layout)
    if unused := set(self.bases) - used:
      names = [x.name for x in _modules.find_modules(params, self.layout)]
      raise ValueError(
        f'{sorted(unused)} match no module; the modules are {names}.'
      )
    return new


def input_metric(
  batches: Iterable[Mapping[str, jax.typing.ArrayLike]],
  *,
  noise_multiplier: float,
  dataset_size: int,
  form: str = 'second_moment',
  prng_key: PRNGKeyLike = None,
  layout: LayoutLike = None,
) -> InputMetric:
  """Releases how the energy of the layers' inputs is spread, privately.

  One pass over all records, before the training, with the frozen model::

    metric = contrib.input_metric(
      ({'*/attention/*': activations(x)} for x in batches),
      noise_multiplier=10.0, dataset_size=len(data))
    training = make_private(loss, params, change_of_variables=metric, ...)
    ...
    adapters = training.adapters(state)

  Without ``make_private``: train coordinates, give the loss
  ``metric.to_params(coordinates)``, and compose ``metric.event`` with the
  training's (``calibrate_noise_multiplier(...,
  prior_events=[metric.event])``).

  With K patterns and the inputs a_it of record i, ``'second_moment'`` sums
  ``B_i = sum_t a_it a_it^T / (sqrt(K) sum_t |a_it|^2)`` and scales each
  eigenvector whose eigenvalue stands out of the noise so that its share of the
  energy is at most twice the mean; ``'mean'`` sums ``m_i / (sqrt(K) |m_i|)``,
  ``m_i = sum_t a_it``, and scales that direction by 1/4. The metric is ours.

  **Privacy.** A record adds at most 1 to the sum in Euclidean norm, over all
  patterns together, whatever is in it (the Frobenius norm of a positive
  semidefinite matrix is at most its trace): one Gaussian mechanism of
  ``noise_multiplier`` for add-or-remove-one neighbours, whose ``.event`` has to
  be composed with the training's. Of the symmetric matrix its diagonal and
  sqrt(2) times the entries above are noised, which keeps lengths. Sums are
  integers and releases are exact, as in :func:`prism_optax.tangent_privatizer`.
  Every record must be in one batch once; ``dataset_size`` is public. For
  privacy of users, all data of a user are one record here, one entry of the
  first axis.

  ==========================  =================================================
  NaN or Inf in a record      it counts as zero, for all patterns
  zeros (padding)             add nothing
  nothing above the noise     ``S = I``
  ``noise_multiplier=0.0``    no privacy, for tests
  ==========================  =================================================

  Args:
    batches: An iterable of dicts from patterns of module names (``fnmatch``; of
      several that match, the first counts) to the inputs of these modules,
      arrays (B, ..., n): one entry of the first axis is one record, all other
      axes but the last are positions, the same number in all batches, which is
      public: fill shorter records with zeros. Modules that read the same share
      one pattern.
    noise_multiplier: Standard deviation of the noise of every entry. 10 costs a
      training of some thousand records at epsilon 2 about a hundredth of its
      noise.
    dataset_size: Number of records, public, over which the mean is taken. More
      records are refused, padding included.
    form: ``'second_moment'``, of n (n + 1) / 2 entries, or ``'mean'``, of n.
    prng_key: As for :func:`prism_optax.tangent_privatizer`; a key that you give
      is for one such release.
    layout: Of the parameters, see :func:`prism_optax.lora.describe_pairs`.

  Returns:
    The metric.

  Raises:
    ValueError: If there is no batch, batches do not have the same patterns,
      positions and dimensions, there are more records than ``dataset_size``, or
      an argument is out of its range.

  Example:
    >>> import numpy as np
    >>> from prism_optax import contrib
    >>> x = np.random.default_rng(0).normal(size=(500, 8)) + 3.0
    >>> metric = contrib.input_metric(
    ...   [{'*': x}], noise_multiplier=5.0, dataset_size=500)
    >>> metric.bases['*'].shape, metric.entries
    ((8, 1), 36)
  """
  _validate.one_of('form', form, FORMS)
  forms: dict[str, tuple[int, ...]] = {}  # Of one record.

  def checked() -> Iterator[dict[str, jax.Array]]:
    for batch in batches:
      inputs = {
        name: _one_shot_release.as_rows(f'inputs of {name!r}', x)
        for name, x in batch.items()
      }
      _check_batch(inputs, forms)
      yield inputs

  released = _one_shot_release.release(
    checked(),
    _mean_of if form == 'mean' else _second_moment_of,
    noise_multiplier=noise_multiplier,
    dataset_size=dataset_size,
    prng_key=prng_key,
    purpose=_PURPOSES[form],
  )
  sigma = float(noise_multiplier)
  of_one = _of_mean if form == 'mean' else _of_second_moment
  pairs = {
    name: of_one(np.asarray(x, np.float64), sigma, dataset_size, len(forms))
    for name, x in released.arrays.items()
  }
  return InputMetric(
    {name: jnp.asarray(q, jnp.float32) for name, (q, _) in pairs.items()},
    {name: jnp.asarray(s, jnp.float32) for name, (_, s) in pairs.items()},
    sigma,
    sum(_entries(shape[-1], form) for shape in forms.values()),
    int(dataset_size),
    layout,
    _keys.is_given(prng_key),
    released.digest,
    released.key_digest,
  )


def _check_batch(
  inputs: Mapping[str, jax.Array], forms: dict[str, tuple[int, ...]]
) -> None:
  """Refuses a batch; notes the form of a record of the first one.

  How many positions a batch has is seen by whoever sees a program compile.
  """
  shapes = {name: x.shape for name, x in inputs.items()}
  if not shapes or min(map(len, shapes.values())) < 2:
    raise ValueError(f'Expected inputs of shape (B, ..., n), got {shapes}.')
  found = {name: shape[1:] for name, shape in shapes.items()}
  if len({x[0] for x in shapes.values()}) > 1 or found != (forms or found):
    raise ValueError(
      'Expected one number of records in a batch, and the same patterns,'
      f' positions and dimensions in all batches, got {shapes}'
      f'{f" after {forms}" if forms else ""}: fill positions with zeros.'
    )
  forms.update(found)


def _entries(n: int, form: str) -> int:
  return n if form == 'mean' else math.comb(n + 1, 2)


def _positions(x: jax.Array) -> jax.Array:
  """All positions of a record, (T, n), of a size that no square overflows."""
  x = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
  largest = jnp.max(jnp.abs(x))
  return x / jnp.where(largest > 0, largest, 1)


def _share(term: jax.Array, size: jax.Array, count: int) -> jax.Array:
  """Of size ``1 / sqrt(count)``; zero where there is nothing."""
  return term / (math.sqrt(count) * jnp.where(size > 0, size, 1))


def _mean_of(record: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """The direction of the mean input of each pattern."""
  sums = {name: jnp.sum(_positions(x), 0) for name, x in record.items()}
  return {
    name: _share(v, jnp.linalg.norm(v), len(sums)) for name, v in sums.items()
  }


def _second_moment_of(record: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """The second moment of each pattern, as a vector, over its trace."""
  squares = {}
  for name, x in record.items():
    positions = _positions(x)
    squares[name] = gram(positions, positions)
  return {
    name: _share(_one_shot_release.to_vector(v), jnp.trace(v), len(squares))
    for name, v in squares.items()
  }


def _of_mean(
  v: np.ndarray, sigma: float, size: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
  """Basis and scales of the metric of a noisy sum of directions."""
  del sigma, size, count
  length = np.linalg.norm(v)
  return v[:, None] / max(length, 1e-300), np.array([_MEAN_SCALE])


def _of_second_moment(
  v: np.ndarray, sigma: float, size: int, count: int
) -> tuple[np.ndarray, np.ndarray]:
  """Basis and scales of the metric of a noisy sum of second moments."""
  matrix, edge = _one_shot_release.to_square(v)
  n, edge = len(matrix), edge * sigma
  values, vectors = np.linalg.eigh(matrix)
  mean = size / (math.sqrt(count) * n)  # Of the eigenvalues of the sum.
  kept = values > max(_CAP * mean, _ABOVE_NOISE * edge)
  scales = np.sqrt(_CAP * mean / (values[kept] - edge))
  return vectors[:, kept], np.clip(scales, _SMALLEST, 1.0)
