"""Noise that is correlated over steps, on a moving tangent space.

Matrix factorization (Denisov et al. 2022, arXiv:2202.08312; Choquette-Choo et
al. 2023, arXiv:2306.08153) draws noise that partly cancels in the sum of all
updates. It cancels only if the noises of different steps are in the same
coordinates. Tangent coordinates of different points are not: they turn with the
frames. Here the stream of noise stays in FIXED coordinates. They are tied to
the moving ones by frames that are carried from point to point with the smallest
possible turn.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _validate, fixed_rank
from prism_optax._linalg import _products
from prism_optax._linalg._products import gram, matmul
from prism_optax._modules import LayoutLike, StepContext, map_pairs
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike
from prism_optax.fixed_rank import Factors, Tangent
from prism_optax.fixed_rank._points import Frame, map_ranks
from prism_optax.fixed_rank._tangents import projected
from prism_optax.transforms._chain import Stacked, TangentTransformation
from prism_optax.transforms._declared import noised_elsewhere
from prism_optax.transforms._privatizer import PrivatizerState, limited


class Turns(NamedTuple):
  """Orthogonal matrices from a frame to the aligned one: ``Q W``.

  Attributes:
    left: (..., r, r), turns ``Q_L`` and with it the columns of ``X_R``.
    right: (..., r, r), turns ``Q_R`` and with it the columns of ``X_L``.
  """

  left: jax.Array
  right: jax.Array


def turns(bases: Factors | Frame, frame: Frame) -> Turns:
  """The turns that bring ``frame`` closest to ``bases``, the frame before.

  They are the orthogonal polar factors of the overlaps (orthogonal Procrustes),
  orthogonal also where an overlap is singular: a turn must keep all norms.
  """
  return Turns(
    _products.orthogonal_polar(gram(frame.left, bases.left)),
    _products.orthogonal_polar(gram(frame.right, bases.right)),
  )


def turned_bases(frame: Frame, turn: Turns) -> Factors:
  """Bases of the aligned frame; the next point's frame is aligned with it."""
  return Factors(matmul(frame.left, turn.left), matmul(frame.right, turn.right))


def to_fixed(tangent: Tangent, turn: Turns) -> Tangent:
  """Turns coordinates in the frame to fixed ones: ``(X_L W_R, X_R W_L)``."""
  return Tangent(
    matmul(tangent.left, turn.right), matmul(tangent.right, turn.left)
  )


def from_fixed(tangent: Tangent, turn: Turns) -> Tangent:
  """The inverse of :func:`to_fixed`."""
  return Tangent(
    matmul(tangent.left, turn.right.mT), matmul(tangent.right, turn.left.mT)
  )


def starting_bases(step: StepContext) -> tuple[Factors, ...]:
  """The frames at the start of a stream of noise.

  Raises:
    ValueError: If a factor has lost rank, where values are known.
  """
  bases = tuple(Factors(f.left, f.right) for f in step.frames)
  if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(bases)):
    return bases
  rank_lost = [
    jnp.minimum(*(jnp.sum(jnp.square(q), (-2, -1)) for q in pair))
    < pair.left.shape[-1] - 0.5  # Squares of a frame add up to its rank.
    for pair in bases
  ]
  lost_at = step.tree.by_module(rank_lost)
  names = [name for name, lost in lost_at.items() if lost.any()]
  if names:
    raise ValueError(
      'Noise that is to cancel over steps needs factors of full rank to start'
      f' from, and those of {names} are zero or rank-deficient in params: their'
      ' frames change altogether with the first steps. Start from'
      ' factors of full rank, or warm up with independent noise'
      ' (tangent_privatizer(stddev)) and call `init` at the parameters reached.'
    )
  return bases


class CorrelatedPrivatizerState(NamedTuple):
  """State of :func:`correlated_tangent_privatizer`.

  Attributes:
    bases: The aligned frames of the last update, (k, m, r) and (k, n, r), one
      pair for each stack of same-shape modules. They say what the fixed
      coordinates mean at that point.
    prng_key: Typed key, shape (), which the privatizer is made with. Secret.
    inner: Step count and state of the privatizer.
  """

  bases: tuple[Factors, ...]
  prng_key: jax.Array
  inner: PrivatizerState


def correlated_tangent_privatizer(
  make_privatizer: Callable[[jax.Array], optax.GradientTransformation],
  *,
  steps: int,
  prng_key: PRNGKeyLike = None,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """Adds noise that is correlated over steps to tangent coordinates.

  Each update turns the incoming coordinates into fixed ones by an orthogonal
  r x r matrix on either side of each module, calls the privatizer, turns the
  sum back, and projects and masks it as :func:`tangent_privatizer` does.

  **Privacy.** The turns are orthogonal, so the privatizer's input has the norm
  of the incoming coordinates: adding or removing one record moves it by at most
  the clip's sensitivity Delta, in the unit of the incoming sum or mean. The
  input is in one space of fixed dimension, ``r (m + n)`` for each module and
  the entries of the other leaves. Point, frames and turns of a step are
  functions of the parameters, that is, of the start and of past releases. So
  this is the matrix mechanism on adaptively chosen queries: with a
  lower-triangular strategy matrix C and noise ``C^-1 Z``, all releases together
  have the privacy of one Gaussian mechanism of sensitivity ``Delta max ||sum_i
  C e_i u_i^T||_F`` over the steps i that one record may take part in and unit
  vectors ``u_i`` (arXiv:2202.08312, Theorem 2.1; arXiv:2306.08153). You declare
  these steps to :func:`prism_optax.accounting.matrix_mechanism_event` and
  :func:`prism_optax.accounting.calibrate_matrix_mechanism`, and your batches
  must keep to the declaration. Turn, projector and mask after the noise are
  post-processing. Not covered: ``dpsgd_event`` does not hold for correlated
  noise, whose amplification needs a banded strategy and cyclic Poisson batches;
  and nothing checks that ``make_privatizer`` adds the declared noise.

  **Use.** Cancellation is lost as the column spaces move: from a
  well-conditioned start, 100 steps of 1 %, 10 % and 100 % of Z keep nearly all,
  most and little of it. From a zero factor, the usual start of LoRA, nothing
  cancels and the sum is noisier than with independent noise. Therefore ``init``
  needs factors of full rank: warm up with :func:`tangent_privatizer` and
  compose the two events.

  =============================  ==============================================
  factor zero or of lower rank   ValueError in ``init``, where values are known
  later loss of rank             masked after the noise; the stream goes on
  beyond ``steps``               ValueError, or under ``jit`` zeros: no release
  zeros come in (empty batch)    noise all the same
  NaN or Inf comes in            NaN or Inf goes out: put a clip before it
  parameters that never move     the turns are identities: the noise cancels as
                                 in flat space
  =============================  ==============================================

  Args:
    make_privatizer: Makes a privatizer in the manner of optax (jax-privacy's),
      for trees in the shapes of the parameters, from a typed key. It is called
      while tracing. The privatizer must add its own noise, of the standard
      deviation wanted in the unit of the input, with this key and no other
      randomness.
    steps: The number of updates that noise and sensitivity were computed
      for. Beyond it nothing is released: an update raises where the step count
      is known, and under ``jit`` returns zeros, neither signal nor noise.
    prng_key: As for :func:`tangent_privatizer`. The key is part of the state:
      a restored checkpoint continues the same stream of noise, whatever the
      privatizer keeps in its own state.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    A transformation on trees in the shapes of the parameters; ``update`` needs
    ``params``. The noise of step t has the standard deviation
    :func:`correlated_noise_stddev` per coordinate; pass it to
    :func:`scale_by_rank_preconditioner`.

  Raises:
    ValueError: If ``steps`` is no integer >= 1, ``make_privatizer`` no
      function or ``prng_key`` no key; in ``init`` if it is traced with
      ``prng_key=None``, or if a factor is zero or rank-deficient (where values
      are known).

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import prism_optax
    >>> def differences(key):  # z_t - z_{t-1}: the sum of all noise is one z.
    ...   def init(tree):
    ...     return key, optax.tree.zeros_like(tree)
    ...   def update(tree, state, params=None):
    ...     next_key, key = jax.random.split(state[0])
    ...     z = optax.tree.random_like(key, tree, jax.random.normal)
    ...     out = jax.tree.map(lambda x, new, old: x + new - old, tree, z,
    ...                        state[1])
    ...     return out, (next_key, z)
    ...   return optax.GradientTransformation(init, update)
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> tx = prism_optax.correlated_tangent_privatizer(
    ...   differences, steps=5, prng_key=0)
    >>> state, zeros = tx.init(params), optax.tree.zeros_like(params)
    >>> total = zeros
    >>> for _ in range(5):  # The parameters stay: the noises cancel.
    ...   noise, state = tx.update(zeros, state, params)
    ...   total = optax.tree.add(total, noise)
    >>> last = state.inner.inner[1]
    >>> bool(jnp.allclose(total['lora_a'], last['lora_a'], atol=1e-6))
    True
  """
  if isinstance(make_privatizer, tuple) or not callable(make_privatizer):
    raise ValueError(
      'Expected make_privatizer to be a function from a key to a privatizer,'
      f' got {make_privatizer!r}.'
    )
  _validate.integer('steps', steps, 1)
  _keys.check_key('prng_key', prng_key)

  def privatizer(key: jax.Array) -> optax.GradientTransformation:
    return limited(noised_elsewhere(make_privatizer(key)), steps)

  def init(step):
    bases = starting_bases(step)
    key = _keys.resolve_key('prng_key', prng_key, step.params)
    # A copy: a state that holds one buffer twice cannot be donated.
    inner = privatizer(jnp.copy(key)).init(
      step.to_tree(step.tree.coordinates(step.params))
    )
    return CorrelatedPrivatizerState(bases, key, inner)

  def update(stacks, state, step, **extra_args):
    del extra_args
    turn = map_pairs(turns, state.bases, step.frames)
    fixed = stacks.map_pairs(
      lambda x, w: to_fixed(fixed_rank.multiply_out(x), w), turn
    )
    noisy, inner = privatizer(state.prng_key).update(
      step.to_tree(fixed), state.inner
    )
    stacks = step.tree.coordinates(noisy)
    pairs = map_ranks(
      lambda frame, x, w: projected(frame, from_fixed(x, w)),
      step.frames, stacks.pairs, turn,
    )  # fmt: skip
    bases = map_pairs(turned_bases, step.frames, turn)
    state = CorrelatedPrivatizerState(bases, state.prng_key, inner)
    return stacks._replace(pairs=pairs), state

  return TangentTransformation(
    Stacked('correlated_tangent_privatizer', init, update, ('noise',)), layout
  )


def correlated_noise_stddev(
  noising_matrix: ArrayTree, stddev: float, steps: int
) -> np.ndarray:
  """Standard deviation per coordinate of correlated noise, step by step.

  It is ``s_t = stddev ||B_t||`` with row t of the noising matrix B, the inverse
  of the strategy matrix (Choquette-Choo et al. 2023, arXiv:2306.08153). Pass it
  as ``noise_stddev`` to :func:`scale_by_rank_preconditioner`. It depends on
  public constants only.

  Args:
    noising_matrix: B, (n, n) with n >= steps, or an object with a method
      ``row_norms_squared(steps)``, as jax-privacy's streaming matrices.
    stddev: Standard deviation of the privatizer's independent noise Z, per
      coordinate; 0.0 gives zeros.
    steps: Length of the result.

  Returns:
    Shape (steps,), per coordinate, in the unit of ``stddev``.

  Raises:
    ValueError: If ``stddev`` is negative, ``steps`` no integer >= 1, or a dense
      matrix has fewer rows.

  Example:
    >>> from prism_optax import transforms
    >>> matrix = [[1.0, 0.0], [-1.0, 1.0]]
    >>> transforms.correlated_noise_stddev(matrix, 2.0, 2).round(3)
    array([2.   , 2.828])
  """
  _validate.non_negative('stddev', stddev)
  _validate.integer('steps', steps, 1)
  if hasattr(noising_matrix, 'row_norms_squared'):
    squares = np.asarray(noising_matrix.row_norms_squared(steps))
  else:
    rows = np.asarray(noising_matrix)
    if rows.ndim != 2 or rows.shape[0] < steps:
      raise ValueError(
        f'Expected noising_matrix of at least {steps=} rows, got shape'
        f' {rows.shape}.'
      )
    squares = np.sum(np.square(rows[:steps]), axis=1)
  return stddev * np.sqrt(squares)
