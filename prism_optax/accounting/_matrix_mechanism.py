"""The privacy of noise that is correlated over steps.

All T releases ``x_t + (C^-1 Z)_t`` together say as much as the one release
``C x + Z``: a Gaussian mechanism whose sensitivity follows from the strategy
matrix C and from the steps that one record may take part in. With a
lower-triangular C this also holds where each query depends on the releases
before it (Denisov et al. 2022, arXiv:2202.08312, Theorem 2.1).
"""

import math

import dp_accounting
import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation

from prism_optax import _validate
from prism_optax.accounting import _gaussian
from prism_optax.accounting._events import ADD_OR_REMOVE_ONE


def matrix_mechanism_sensitivity(
  strategy_matrix: npt.ArrayLike,
  *,
  max_participations: int | None,
  min_separation: int = 1,
) -> float:
  """Returns how far one record moves ``C x``, for contributions of norm 1.

  ``max ||sum_i C e_i u_i^T||_F`` over the steps i that one record may take part
  in and unit vectors ``u_i``: adding or removing a record. Replacing one moves
  twice as far.

  Args:
    strategy_matrix: C, (T, T), lower triangular with a positive diagonal: the
      INVERSE of the noising matrix that privatizers take.
    max_participations: How many steps one record may take part in, at most: a
      promise about how batches are chosen. 1 for a single pass over the data,
      None for as many as the separation allows.
    min_separation: b: steps i < j with the same record have j - i >= b, also a
      promise. T / epochs for a fixed order that repeats; 1 for no promise.

  Returns:
    For a single participation the largest column norm of C, exactly. Otherwise
    the bound of Choquette-Choo et al. 2023 (arXiv:2306.08153, Algorithm 4),
    made of products of columns b or more apart alone, and so never larger;
    exact where columns b or more apart are orthogonal (at most b bands).

  Raises:
    ValueError: If the matrix is not square, finite and lower triangular with
      a positive diagonal, or the pattern is no pair of integers >= 1.

  Examples:
    >>> from prism_optax.accounting import _matrix_mechanism
    >>> c = [[1.0, 0.0, 0.0], [0.75, 1.0, 0.0], [0.0, 0.75, 1.0]]
    >>> _matrix_mechanism.matrix_mechanism_sensitivity(c, max_participations=1)
    1.25
  """
  c = _strategy(strategy_matrix)
  _validate.integer('min_separation', min_separation, 1)
  steps = len(c)
  possible = -(-steps // min_separation)
  if max_participations is not None:
    _validate.integer('max_participations', max_participations, 1)
    possible = min(possible, max_participations)
  if possible == 1:
    return float(np.linalg.norm(c, axis=0).max())
  gram = np.abs(c.T @ c)
  # No record is in two steps that are closer than that.
  apart = np.abs(np.subtract.outer(range(steps), range(steps)))
  gram[(apart > 0) & (apart < min_separation)] = 0
  # Over patterns S: sum_{i, j in S} |X_ij| <= max over S of sum_{i in S} of the
  # largest sum_{j in S'} |X_ij|, each by dynamic programming.
  rows = _heaviest_pattern(gram, min_separation, possible)
  squared = _heaviest_pattern(rows[None], min_separation, possible)
  return float(np.sqrt(squared[0]))


def _strategy(strategy_matrix: npt.ArrayLike) -> np.ndarray:
  c = np.asarray(strategy_matrix, np.float64)
  if c.ndim != 2 or c.shape[0] != c.shape[1] or not c.size:
    raise ValueError(
      f'Expected strategy_matrix to be square, got shape {c.shape}.'
    )
  above, least = np.abs(np.triu(c, 1)).max(), np.diag(c).min()
  triangular = above <= 1e-6 * np.abs(c).max()
  if not (np.isfinite(c).all() and triangular and least > 0):
    raise ValueError(
      'Expected strategy_matrix to be finite and lower triangular (later'
      ' queries depend on earlier releases) with a positive diagonal, got at'
      f' least {least:g} on the diagonal and up to {above:g} above it.'
    )
  return c


def _heaviest_pattern(
  weights: np.ndarray, separation: int, count: int
) -> np.ndarray:
  """Largest sum of at most ``count`` entries ``separation`` apart, each row.

  ``weights`` (k, T) are not negative.
  """
  best = np.zeros((len(weights), weights.shape[1] + separation))
  for _ in range(count):
    # best[:, i]: of the entries from i on, with one choice more than before.
    taken = weights + best[:, separation:]
    largest = np.maximum.accumulate(taken[:, ::-1], axis=1)
    best[:, : weights.shape[1]] = largest[:, ::-1]
  return best[:, 0]


def matrix_mechanism_event(
  noise_multiplier: float,
  strategy_matrix: npt.ArrayLike,
  *,
  max_participations: int | None,
  min_separation: int = 1,
) -> dp_accounting.DpEvent:
  """Returns the event of a whole run with noise correlated over steps.

  The run is one Gaussian mechanism (Denisov et al. 2022, arXiv:2202.08312,
  Theorem 2.1), without amplification by sampling. The event is valid if no
  record takes part in other steps than declared. For ``ADD_OR_REMOVE_ONE`` the
  steps of the other records must not depend on whether a record is there (a
  removed record leaves its places empty).

  Args:
    noise_multiplier: The privatizer's stddev (of Z, before the noising matrix)
      over the largest norm of one contribution, ``C / normalize_by``.
    strategy_matrix: C, (T, T), lower triangular with a positive diagonal: the
      INVERSE of the noising matrix that privatizers take.
    max_participations: How many steps one record may take part in, at most: a
      promise about how batches are chosen. 1 for a single pass over the data,
      None for as many as the separation allows.
    min_separation: b: steps i < j with the same record have j - i >= b, also a
      promise. T / epochs for a fixed order that repeats; 1 for no promise.

  Returns:
    ``GaussianDpEvent(noise_multiplier / sensitivity)``, for :func:`epsilon`.
    The sensitivity is exact for a single participation (the largest column norm
    of C) and where columns b or more apart are orthogonal (at most b bands);
    otherwise a bound (Choquette-Choo et al. 2023, arXiv:2306.08153, Algorithm
    4).

  Raises:
    ValueError: If the multiplier is negative or NaN, the matrix is not square,
      finite and lower triangular with a positive diagonal, or the pattern is no
      pair of integers >= 1.

  Examples:
    Independent noise, one pass: each record is in one release only.

    >>> import numpy as np
    >>> from prism_optax import accounting
    >>> event = accounting.matrix_mechanism_event(
    ...   4.8448, np.eye(100), max_participations=1
    ... )
    >>> round(accounting.epsilon(event, 1e-5), 3)
    0.751
  """
  sigma = _validate.known_non_negative('noise_multiplier', noise_multiplier)
  sensitivity = matrix_mechanism_sensitivity(
    strategy_matrix,
    max_participations=max_participations,
    min_separation=min_separation,
  )
  return dp_accounting.GaussianDpEvent(sigma / sensitivity)


def calibrate_matrix_mechanism(
  target_epsilon: float,
  delta: float,
  strategy_matrix: npt.ArrayLike,
  *,
  max_participations: int | None,
  min_separation: int = 1,
  neighboring_relation: NeighboringRelation = ADD_OR_REMOVE_ONE,
) -> float:
  """Returns the smallest noise multiplier of a run with correlated noise.

  Exact for the Gaussian mechanism of :func:`matrix_mechanism_event` (Balle and
  Wang 2018, arXiv:1805.06530), and never rounded towards less noise.

  Args:
    target_epsilon: Epsilon to meet, positive and finite.
    delta: Delta at which to meet it, between 0 and 1, both excluded.
    strategy_matrix: C, as for :func:`matrix_mechanism_event`.
    max_participations: How many steps one record may take part in, at most.
    min_separation: Least distance between two steps with the same record.
    neighboring_relation: The relation under which epsilon is meant. Replacing a
      record moves twice as far as adding or removing one.

  Returns:
    The privatizer's stddev over ``C / normalize_by``.

  Raises:
    ValueError: If an argument is out of its range.

  Examples:
    >>> import numpy as np
    >>> from prism_optax import accounting
    >>> sigma = accounting.calibrate_matrix_mechanism(
    ...   1.0, 1e-5, np.eye(100), max_participations=1
    ... )
    >>> round(sigma, 6)
    3.730632
  """
  target_epsilon = _validate.known_positive('target_epsilon', target_epsilon)
  delta = _validate.known_open_probability('delta', delta)
  _validate.neighboring_relation(neighboring_relation)
  sensitivity = matrix_mechanism_sensitivity(
    strategy_matrix,
    max_participations=max_participations,
    min_separation=min_separation,
  )
  if neighboring_relation is NeighboringRelation.REPLACE_ONE:
    sensitivity *= 2
  mu = _gaussian.gaussian_mu(target_epsilon, delta)
  # Dividing twice, here and in the event, may round twice.
  return math.nextafter(math.nextafter(sensitivity / mu, math.inf), math.inf)
