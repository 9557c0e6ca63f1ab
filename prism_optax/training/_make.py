"""The one call: from a loss and public constants to a private training."""

import os
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from prism_optax import _validate, accounting
from prism_optax._clip import Clip, FlatClipping, QuantileClipping
from prism_optax._clip_rules import description, gradients_noise_multiplier
from prism_optax._modules import warn_if_mostly_no_adapters
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree, PRNGKeyLike
from prism_optax.accounting import _events
from prism_optax.training import (
  _claim,
  _optimizer,
  _program,
  _sampling,
  _seen,
  _words,
)
from prism_optax.training._optimizer import Optimizer
from prism_optax.training._private import PrivateTraining
from prism_optax.training._records import Form
from prism_optax.training._releases import (
  ChangeOfVariables,
  PriorReleases,
  Release,
  check_declared,
)
from prism_optax.training._sampling import Execution, Sampling
from prism_optax.training._settings import Parts, Settings, Tag

# Folded into a key that was given, for the noise of a quantile.
_QUANTILE = int.from_bytes(b'QUAN')

# Of clip norms. Beyond, numbers of float32 may vanish in units of them.
_LEAST_NORM, _LARGEST_NORM = 1e-30, 1e30


@_words.answered
def make_private(
  loss: Callable[..., ArrayTree],
  params: ArrayTree,
  *,
  optimizer: Optimizer,
  l2_clip_norm: float,
  expected_batch_size: int,
  dataset_size: int,
  steps: int,
  delta: float,
  target_epsilon: float | None = None,
  noise_multiplier: float | None = None,
  clipping: FlatClipping | None = None,
  examples_per_user: int | None = None,
  record: ArrayTree | None = None,
  batched_loss: bool = False,
  has_aux: bool = False,
  change_of_variables: ChangeOfVariables | None = None,
  prior_releases: Sequence[Release] = (),
  stop: str = 'planned',
  journal: str | os.PathLike[str] | None = None,
  tags: Mapping[str, Tag] | None = None,
  prng_key: PRNGKeyLike = None,
  execution: Execution | None = None,
) -> PrivateTraining:
  """A differentially private training whose parts agree.

  Clip, noise, divisor, sampling, padding, number of steps and event come from
  one set of public constants::

    training = make_private(loss, params, optimizer=..., ...)
    state = training.init(params)
    for batch in training.batches(state, (x, y)):
      state = training.step(state, batch)
    print(training.statement(state))

  **Privacy.** Each record (or user) is drawn for each batch with probability
  ``expected_batch_size / dataset_size``, contributes a gradient of norm at most
  C, and the sum gets Gaussian noise of standard deviation ``noise_multiplier *
  C`` on every entry: ``steps`` truncated Poisson-subsampled Gaussian mechanisms
  (Abadi et al. 2016, arXiv:1607.00133; arXiv:2508.15089), composed by the PLD
  accountant for add-or-remove-one neighbours. You may release the parameters
  after every step and ``held``, and nothing else that a state holds. Epsilon
  does not cover choices that you made by looking at the data (the constants
  themselves, a learning rate tuned on them); records that were prepared
  together (normalised by their mean, packed into rows); more records than
  ``dataset_size``; the time to read a batch, nor, with
  ``Execution.skip_padding``, the time of a step.

  ==============================  =============================================
  NaN or Inf in a gradient        the record counts as zero
  a batch of no records           noise alone
  padding                         zeros, for which no record is read; they
                                  count as zero
  a record of another form        counts as zero, see
                                  :meth:`PrivateTraining.batches`
  fewer records than declared     the places that are left are empty
  more records than a batch has   a random subset, which the event accounts for
  ``noise_multiplier=0.0``        no privacy, for tests: epsilon is infinite
  a loss that mixes records       the first ``step`` raises, unless the proof of
                                  ``diagnostics.prove_independent`` holds
  a step that is not finite       is held: it counts, parameters and moments
                                  stay as they were
  step ``steps + 1``              ValueError
  prints or loops on a record     the first ``step`` raises: see
                                  ``PrivateTraining.proofs``
  a restored state                the same batches and the same noise, where
                                  data, loss, optimizer and machine are the same
  a state that does not fit       ValueError, for other data, loss, optimizer or
                                  frozen weights; its noise would differ, too
  weights beside their adapters   UserWarning: ``nnx.Param`` as a filter lets
                                  them through; likewise if nine tenths of
                                  ``params`` with adapters are no factors
  another machine or version      ValueError; with ``journal`` fresh noise, and
                                  a step done again counts again
  ==============================  =============================================

  Args:
    loss: ``loss(params, *example)``, or ``loss(params, frozen, *example)`` if
      ``step`` is given frozen weights: the scalar loss of ONE example without a
      batch axis. With ``batched_loss`` it takes many examples.
    params: The trainable parameters, arrays or shapes.
    optimizer: Either any optimizer of optax, which follows a clip and noise on
      the plain gradients (DP-SGD, DP-Adam, ...). Or a function that takes the
      constants of the mechanism by name and makes a transformation that begins
      with its own clip: ``prism_optax.prism``, or with a learning rate of
      yours ``functools.partial(prism_optax.prism, 3e-2)``; likewise
      ``published_prism``, ``dp_muon``, or a function of yours with a
      :func:`prism_optax.chain`. The transformation is traced, and its clip and
      noise are compared with the accounting. If you write its ``update``, hand
      the gradients and ``**extra_args`` to the clip, and ``**extra_args`` to
      the noise, as they come.
    l2_clip_norm: C, the largest norm of one record's contribution to the sum.
      For ``dp_muon`` it holds for each matrix; for a quantile it is the first
      value.
    expected_batch_size: b, which divides the sum.
    dataset_size: N, the public number of places for records (or users). Round
      up the number of records, and neither epsilon nor the batches depend on
      it. If there are more, no error says so, and epsilon does not hold.
    steps: Number of steps.
    delta: Below ``1 / dataset_size``.
    target_epsilon: Epsilon of all steps, for the noise as it is drawn. A search
      of some seconds finds the smallest noise multiplier that meets it.
    noise_multiplier: An alternative to ``target_epsilon``: the standard
      deviation of the noise over C, for everything that a step releases.
    clipping: The rule. None is the flat clip of DP-SGD, ``min(1, C / norm)``
      of a record's whole gradient; others are :class:`AutomaticClipping`,
      :class:`GroupClipping` and :class:`QuantileClipping`.
    examples_per_user: For privacy of users: the largest number of records that
      a user contributes to one batch. Batches then draw users, and a user's
      gradient is the gradient of the mean loss of these records.
    record: The form of one record, which is public: a tree of
      ``jax.ShapeDtypeStruct``, or of anything with a shape and a type (its
      numbers do not matter). Arrays do not need it, but must have these shapes
      if you give it. All other data need it.
    batched_loss: ``loss`` takes copies of the parameters, with leaves ``(B,
      *shape)``, and examples with a batch axis, and returns (B,). Their
      gradients take one backward pass, as in
      :func:`prism_optax.lora.per_example_gradients`.
    has_aux: ``loss`` returns ``(loss, aux)``, as for ``jax.grad``: a tree of
      arrays for one example (with ``batched_loss``, leaves (B, ...)). A step
      ignores it; ``PrivateTraining.nonprivate_means`` shows it.
    change_of_variables: An earlier release about the same records (or users)
      that says in which variables to train: any :class:`ChangeOfVariables`.
      ``params`` and the parameters of a state are then its variables, and
      ``training.adapters(state)`` returns the parameters of the model. Target,
      epsilon and every statement include its event.
    prior_releases: All other earlier releases about them, each any
      :class:`Release`. Target, epsilon and every statement include them, too. A
      training refuses a release that it recognises by its numbers (as with
      heads) in ``params``, frozen weights or ``loss``, unless it is given here.
      A release that is neither recognised nor given is not accounted for.
    stop: ``'planned'`` reports the epsilon of all steps, whenever the run
      stops. ``'adaptive'`` reports a smaller epsilon if you stop early by
      looking at releases. Possible stops are all steps, a half, a quarter, an
      eighth and a sixteenth. Each gets a fifth of delta, and a run reports the
      epsilon of the next one. A run to the end then reports a larger epsilon
      than a planned one; compare :meth:`PrivateTraining.epsilon` of both.
    journal: File in which every release is written down before it is made (each
      step waits for the disk). With it a run may continue in another
      environment, on other devices or versions. (The program is not compared
      there, because versions change it.) Each run has its own file, which
      ``init`` begins. Without it, a checkpoint of the run cannot be used.
    tags: Public names with short texts or numbers, such as the hash of a base
      model. A state with other tags is refused.
    prng_key: As for :func:`prism_optax.tangent_privatizer`. Anyone who knows a
      key that you give knows the noise and the batches. With such a key
      ``init`` may be called only once.
    execution: Micro-batches, padding and sharding: :class:`Execution`.

  Returns:
    The training.

  Raises:
    TypeError: For an unknown argument; the message names the right one.
    ValueError: If constants do not fit or delta is too large; if an optimizer
      has its own clip; if a function's chain has other noise, less noise or
      none, or returns coordinates in place of updates; if a recognised release
      is missing in ``prior_releases``, or two releases share a key; unless
      exactly one of ``target_epsilon`` and ``noise_multiplier`` is given.

  Example:
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import prism_optax
    >>> from prism_optax import training
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
    >>> def loss(params, x, y):
    ...   return jnp.sum((x @ params['lora_a'] @ params['lora_b'] - y) ** 2)
    >>> private = training.make_private(
    ...   loss, params, optimizer=prism_optax.prism,
    ...   l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=20,
    ...   dataset_size=100, steps=3, delta=1e-5)
    >>> data = np.ones((100, 3), np.float32), np.ones((100, 2), np.float32)
    >>> state = private.init(params)
    >>> for batch in private.batches(state, data):
    ...   state = private.step(state, batch)
    >>> print(*private.statement(state).split(', '), sep='\\n')
    epsilon <= 3.293 at delta = 1e-05
    add-or-remove-one neighbours (PLD)
    Poisson sampling
    noise as drawn
    unit: one record
    3 of 3 steps; proved: no record acts on another
    and nothing bypasses the noise
  """
  c = _validate.known_positive('l2_clip_norm', l2_clip_norm)
  if not _LEAST_NORM <= c <= _LARGEST_NORM:
    raise ValueError(
      f'Expected {_LEAST_NORM:g} <= l2_clip_norm <= {_LARGEST_NORM:g}, for'
      f' which no number of float32 vanishes, got {l2_clip_norm=}.'
    )
  _validate.integer('steps', steps, 1)
  _keys.check_key('prng_key', prng_key, words=4)
  delta = _validate.known_open_probability('delta', delta)
  if (target_epsilon is None) == (noise_multiplier is None):
    raise ValueError(
      'Expected exactly one of target_epsilon and noise_multiplier, got'
      f' {target_epsilon=} and {noise_multiplier=}.'
    )
  if batched_loss and examples_per_user is not None:
    raise ValueError(
      'A loss of a batch of users is not supported: give the loss of one'
      f' example, got {batched_loss=} and {examples_per_user=}.'
    )
  execution = Execution() if execution is None else execution
  if batched_loss and _has_explicit_axes(execution.batch_sharding):
    raise ValueError(
      'A loss of a batch is not supported on a mesh with explicit axes: make'
      ' it with axis_types=(jax.sharding.AxisType.Auto,), or give the loss of'
      f' one example, got {batched_loss=} and {execution.batch_sharding}.'
    )
  sampling = Sampling.of(
    expected_batch_size, dataset_size, execution, examples_per_user
  )
  shapes = jax.tree.map(_shape, params)
  follows = isinstance(clipping, QuantileClipping)
  entries = sum(x.size for x in jax.tree.leaves(shapes)) + follows
  stops = _claim.possible_stops(stop, steps)
  prior = PriorReleases.of(change_of_variables, prior_releases, dataset_size)
  change = change_of_variables
  declared = (*prior_releases, *([] if change is None else [change]))
  check_declared('params', params, declared)
  if target_epsilon is not None:
    noise_multiplier = accounting.calibrate_noise_multiplier(
      target_epsilon,
      delta / len(stops),
      sampling.probability,
      steps,
      dataset_size=dataset_size,
      truncated_batch_size=sampling.truncated_batch_size,
      prior_events=prior.events,
      entries=entries * steps + prior.entries,
    )
  sigma = _validate.known_non_negative('noise_multiplier', noise_multiplier)
  given = _keys.is_given(prng_key)
  clipping = FlatClipping() if clipping is None else clipping
  clip = Clip(clipping, c, expected_batch_size, prng_key)
  if follows and given:
    clip = clip._replace(prng_key=_sampling.derived(prng_key, _QUANTILE))
  own = gradients_noise_multiplier(clipping, sigma, expected_batch_size)
  settings = Settings(
    sampling,
    sigma,
    steps,
    delta,
    c,
    description(clipping, shapes),
    given or prior.seeded,
    entries,
    prior,
    stops,
    None if record is None else Form.declared(record),
    _checked_tags(tags),
  )
  transformation = _optimizer.assemble(
    optimizer, clip, noise_multiplier=own, steps=steps, prng_key=prng_key
  )
  warn_if_mostly_no_adapters(shapes, getattr(transformation, 'layout', None))
  found = _seen.look(transformation, shapes, sampling.padded_batch_size)
  _seen.check(found, sigma, 1 + follows)
  training = PrivateTraining(
    Parts(
      settings,
      _program.prepared(loss, has_aux, change, batched_loss),
      batched_loss,
      transformation,
      1 + follows,
      shapes,
      execution,
      change,
      declared,
      prng_key,
      journal,
    )
  )
  _events.check_delta(training.event(), delta, dataset_size)
  return training


def _shape(x: ArrayTree) -> jax.ShapeDtypeStruct:
  if isinstance(x, jax.ShapeDtypeStruct):
    return x
  shape: jax.ShapeDtypeStruct = jax.eval_shape(lambda: jnp.asarray(x))
  return shape


def _has_explicit_axes(sharding: jax.sharding.Sharding | None) -> bool:
  types = getattr(getattr(sharding, 'mesh', None), 'axis_types', ())
  return jax.sharding.AxisType.Explicit in types


def _checked_tags(
  tags: Mapping[str, Tag] | None,
) -> tuple[tuple[str, Tag], ...]:
  """Tags in an order of their own.

  Raises:
    ValueError: For what is not a name with a short text or a number.
  """
  found = {} if tags is None else dict(tags)
  for name, value in found.items():
    is_tag = isinstance(value, str | int | float) and len(str(value)) <= 200
    if not isinstance(name, str) or not is_tag:
      raise ValueError(
        'Expected tags to be names with numbers or texts of at most 200'
        f' characters, got tags[{name!r}]={str(value)[:40]!r} of'
        f' {type(value).__name__}.'
      )
  return tuple(sorted(found.items()))
