"""The one call: from a loss and public constants to a private training."""

import os
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp

from prism_optax import _validate, accounting
from prism_optax._clip import Clip
from prism_optax._clip_rules import (
  FlatClipping,
  QuantileClipping,
  gradients_noise_multiplier,
)
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
_QUANTILE = 0x5155414E

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
  accountant for add-or-remove-one neighbours. The parameters after every step
  may be released, all else that a state holds may not. Not covered: choices
  that were made by looking at the data (the constants themselves, a learning
  rate tuned on them), and with ``Execution.skip_padding`` how long a step
  takes.

  ==============================  =============================================
  NaN or Inf in a gradient        the record counts as zero
  a batch of no records           noise alone
  padding                         zeros, for which no record is read; they
                                  count as zero
  a record of another form        counts as zero, see
                                  :meth:`PrivateTraining.batches`
  fewer records than declared     the places that are left are empty
  more records than a batch has   a random subset, which the event knows of
  ``noise_multiplier=0.0``        no privacy, for tests: epsilon is infinite
  a loss that mixes records       the first ``step`` raises, unless the proof of
                                  ``diagnostics.prove_independent`` holds
  a step that is not finite       is held: it counts, parameters and moments
                                  stay as they were
  step ``steps + 1``              ValueError
  a loss that prints a record,    the first ``step`` raises, by the program: see
  or loops as one of them says    ``PrivateTraining.proofs``
  a restored state                the same batches and the same noise, where
                                  data, loss, optimizer and machine are the same
  other data, loss, optimizer     ValueError (and the noise would be another
  or frozen weights               one)
  weights beside their adapters   UserWarning: ``nnx.Param`` as a filter lets
                                  them through; likewise if nine tenths of
                                  ``params`` with adapters are no factors
  another machine or version      ValueError; with ``journal`` fresh noise, and
                                  a step done again counts again
  ==============================  =============================================

  Args:
    loss: ``loss(params, *example)``, or ``loss(params, frozen, *example)`` if
      ``step`` is given frozen weights: a scalar, of ONE example without a batch
      axis. With ``batched_loss`` of many.
    params: The trainable parameters, arrays or shapes.
    optimizer: What follows the clip and the noise. Any optimizer of optax: then
      it is DP-SGD, DP-Adam, ..., on gradients as they are. Or a function that
      takes the constants of the mechanism by name and makes a transformation
      that begins with its own clip: ``functools.partial(prism_optax.prism,
      3e-2)``, likewise ``published_prism``, ``dp_muon``, or a function of yours
      with a :func:`prism_optax.chain`. What it makes is traced, and its clip
      and noise are compared with what is accounted for.
    l2_clip_norm: C, the largest norm of one record's contribution to the sum;
      of each matrix for ``dp_muon``; where it starts for a quantile.
    expected_batch_size: b, which divides the sum.
    dataset_size: N, of records, or of users. Public, and at least as many as
      there are: with the number rounded up, neither epsilon nor batches depend
      on how many there are.
    steps: Number of steps.
    delta: Below ``1 / dataset_size``.
    target_epsilon: Epsilon of all steps, of the noise as it is drawn. The
      smallest noise multiplier that meets it is looked for (some seconds).
    noise_multiplier: In its place: standard deviation of the noise over C, of
      everything that a step releases.
    clipping: The rule. None is the flat clip of DP-SGD, ``min(1, C / norm)``
      of a record's whole gradient; others are :class:`AutomaticClipping`,
      :class:`GroupClipping` and :class:`QuantileClipping`.
    examples_per_user: For privacy of users: the most records that a user
      contributes to one batch. Users are drawn, not records; a user's gradient
      is that of the mean loss of these records.
    record: The form of one record, which is public: a tree of
      ``jax.ShapeDtypeStruct``, or of anything with a shape and a type (whose
      numbers do not matter). Arrays show it, and have to be of these shapes if
      it is given; all other data need it.
    batched_loss: ``loss`` takes copies of the parameters, leaves ``(B,
      *shape)``, and examples with a batch axis, and returns (B,), as for
      :func:`prism_optax.lora.per_example_gradients`: one backward pass.
    has_aux: ``loss`` returns ``(loss, aux)``, as for ``jax.grad``: a tree of
      arrays, of one example (with ``batched_loss`` leaves (B, ...)). A step
      does not compute it; ``PrivateTraining.nonprivate_means`` shows it.
    change_of_variables: What was released of the same records, or of the same
      users with ``examples_per_user``, to train in other variables: any
      :class:`ChangeOfVariables`. ``params`` and those of a state are its
      variables then, and ``training.adapters(state)`` what the model takes; its
      event is part of epsilon, of a target and of every statement.
    prior_releases: What else was released of them before, each any
      :class:`Release`: part of all these, too. A release that is known by its
      numbers, as heads are, and is found in ``params``, in frozen weights or in
      ``loss``, is refused unless it is given here. What is neither found nor
      given is not accounted for.
    stop: ``'planned'``: epsilon is that of all steps, whenever the run stops.
      ``'adaptive'``: who stops early by looking at what was released has a
      smaller one. Possible stops are all steps, a half, a quarter, an eighth
      and a sixteenth; each gets a fifth of delta, and epsilon is that of the
      next one. A run to the end costs more for it, by some 10 to 25 %; to
      stop pays off before a third of the steps.
    journal: File in which every release is written down before it is made (a
      wait for the disk at each step). With it a run may go on in another
      environment: other devices or versions. One file for each run; ``init``
      begins it. As needed as the checkpoint beside it.
    tags: What else a state belongs to, public: names with short texts or
      numbers, such as the hash of a base model. A state of other tags is
      refused.
    prng_key: As for :func:`prism_optax.tangent_privatizer`. Anybody who knows a
      key that was given knows the noise and the batches, and ``init`` may be
      called once.
    execution: Micro-batches, padding and sharding: :class:`Execution`.

  Returns:
    The training.

  Raises:
    TypeError: For a word that this function has not; names the right one.
    ValueError: For constants that do not fit, delta too large, an optimizer
      with a clip of its own, a function whose chain has other noise, less of
      it, or none, a release that is found and not in ``prior_releases``, two
      releases of one key; unless exactly one of ``target_epsilon`` and
      ``noise_multiplier`` is given.

  Example:
    >>> import functools
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import prism_optax
    >>> from prism_optax import training
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
    >>> def loss(params, x, y):
    ...   return jnp.sum((x @ params['lora_a'] @ params['lora_b'] - y) ** 2)
    >>> private = training.make_private(
    ...   loss, params, optimizer=functools.partial(prism_optax.prism, 0.1),
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
    3 of 3 steps; proved: records do not meet
    and nothing passes the noise
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
    clip.description(shapes),
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
