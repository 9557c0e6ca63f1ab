"""One object that owns all that has to agree for an epsilon to be right."""

import functools

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np

from prism_optax import _validate
from prism_optax._proofs._proof import Proof
from prism_optax._randomness import _keys
from prism_optax._types import ArrayTree
from prism_optax.training import _fingerprint, _sampling
from prism_optax.training._claim import Claim
from prism_optax.training._fingerprint import Fingerprint, data_digest
from prism_optax.training._means import Means, means
from prism_optax.training._owner import Owner
from prism_optax.training._program import Program, described
from prism_optax.training._records import DataLike, Records, UsersLike
from prism_optax.training._releases import check_declared
from prism_optax.training._sampling import Batch, Batches
from prism_optax.training._settings import Parts
from prism_optax.training._state import TrainingState


class PrivateTraining:
  """A private training, as :func:`make_private` makes it.

  Attributes:
    parts: The parts of this training.
    noise_multiplier: The accounted noise multiplier of everything that a step
      releases.
    padded_batch_size: Rows of every batch.
    steps: Number of steps.
  """

  def __init__(self, parts: Parts) -> None:
    settings = parts.settings
    self.parts = parts
    self.noise_multiplier = settings.noise_multiplier
    self.padded_batch_size = settings.sampling.padded_batch_size
    self.steps = settings.steps
    self._begun = False
    self._owner = Owner(parts)
    self._program = Program(parts)
    self._step = self._program.run
    self._means = jax.jit(means(parts))

  @property
  def proofs(self) -> tuple[Proof, ...]:
    """What was proved of the program of a step; empty before it is compiled.

    That no record acts on another, and that nothing bypasses the noise.
    """
    return self._program.proofs

  def init(self, params: ArrayTree) -> TrainingState:
    """Makes a state for a new run, with fresh keys and one privacy budget.

    A ``journal`` that does not exist yet is begun for this run.

    Args:
      params: The trainable parameters, of the shapes that ``make_private`` got.

    Returns:
      The state before the first step. Save it, restore it, go on; it is as
      secret as the data, because it holds the keys of the noise and of the
      batches. You may release only two of its fields: ``params``, the trainable
      parameters, and ``held``, the number of steps whose result was not finite
      and which left parameters and moments as they were (int32, shape ()).
      ``step`` is the number of steps done (NumPy, shape ()).

    Raises:
      ValueError: If the parameters have other shapes, or hold a release that is
        not among ``prior_releases``; under ``jit``; or if it is called a second
        time with a given ``prng_key``, because all runs would share its noise.
    """
    found, wanted = (
      jax.tree.map(described, x) for x in (params, self.parts.shapes)
    )
    if found != wanted:
      raise ValueError(
        'Expected params of the shapes that make_private got, got'
        f' {found} for {wanted}.'
      )
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(params)):
      raise ValueError(
        'A new run takes fresh seeds, which would become constants of a'
        ' compiled program: call init outside of jit.'
      )
    if self._begun and _keys.is_given(self.parts.prng_key):
      raise ValueError(
        'This training has begun a run already, and its prng_key was given: a'
        ' second run would have the keys of the first. Go on with the state of'
        ' the first, or leave prng_key out, which makes fresh keys in each'
        ' init.'
      )
    check_declared('params', params, self.parts.declared)
    state = self.parts.transformation.init(params)
    # The step takes these buffers over: none may be the caller's.
    params, state = jax.tree.map(jnp.copy, (params, state))
    unknown = _fingerprint.UNKNOWN.copy
    fingerprint = Fingerprint(
      self._owner.settings.copy(),
      self._owner.environment.copy(),
      unknown(),
      unknown(),
    )
    new = TrainingState(
      params,
      state,
      np.zeros((), np.int64),
      jnp.zeros((), jnp.int32),
      _sampling.new_seed(self.parts.prng_key),
      fingerprint,
    )
    self._owner.begin(new)
    self._begun = True
    return new

  def batches(
    self, state: TrainingState, data: DataLike, *, users: UsersLike = None
  ) -> Batches:
    """The batches from the state's step to the last, drawn at random.

    Each record is drawn for each batch independently, with probability
    ``expected_batch_size / dataset_size``; every batch has the same form,
    filled with zeros. Keep secret which records were drawn.

    **Form.** Structure, shapes and types of one record are public: arrays show
    them, and ``record=`` of ``make_private`` declares them for all other data.
    Each record is converted to this form by itself. Numbers become floats by
    rounding; they become whole numbers or truth values only if they keep their
    value (``3.0`` and ``True`` fit an int32, ``3.5`` and ``2**31`` do not). A
    dict must have exactly the keys of the form; a list may stand for a tuple.

    ================================  =========================================
    another shape, structure, type    the record counts as zero, silently
    text, None, a masked array        likewise
    ``data[i]`` raises                likewise; an error of disk or network
                                      (``ConnectionError``, ``TimeoutError``,
                                      ``OSError`` with ``EIO`` and the like)
                                      stops the run
    NaN or Inf                        fits a float; the clip makes it zero
    fewer records than dataset_size   the last places are empty
    more of them                      those beyond the last place are never
                                      drawn; epsilon does not cover a record
                                      that pushes another one out: declare more
    nothing drawn                     no record is read; nor for padding
    ids that are equal                one user (``1 == 1.0``, ``'1'`` differs)
    None, NaN or a list for an id     all these are one user
    ================================  =========================================

    How long a batch takes to read depends on how many records were drawn, and
    may depend on what they are.

    The batches carry a digest of the data under the seed of the state, which is
    compared when the run continues. For the digest each call reads all records
    of arrays, and 256 records at secret places of other sources, where a change
    of a few records may go unnoticed.

    Args:
      state: A state of this training; the batches continue from its step.
      data: A tuple or dict (any tree of these) of arrays (N, ...), one array,
        or with ``record=`` a source with ``len`` and integer look-up (a list of
        records, a ``datasets.Dataset``, a ``grain`` source). A record that is a
        tuple is unpacked into the arguments of ``loss``.
      users: Only with ``examples_per_user``: the user of each record, (N,), an
        array, or a list of numbers, text, bytes or ``uuid.UUID``.

    Returns:
      An iterable with a length. ``tqdm.tqdm(...)`` may show its progress,
      because the number of steps is public. Iterated again it gives the same
      batches again. A batch has ``examples``, a tree of arrays (padded size,
      ...), or with users (padded size, examples per user, ...);
      ``is_padding_example`` (padded size,), True where there is no record;
      ``is_present``, None, or with users (padded size, examples per user), True
      for records that count; and ``step``, the number of the step that it was
      drawn for.

    Raises:
      ValueError: If the state belongs to another training or environment, or
        began with other data; for a source without ``record=``; for arrays of
        different lengths, without numbers, or of another form than ``record=``.
    """
    self._owner.check_state(state)
    settings, seed = self.parts.settings, np.asarray(state.seed)
    sampling = settings.sampling
    sharding = self.parts.execution.batch_sharding
    records = Records(sampling, data, users, settings.record)
    run = self._owner.name(state)
    digest = _fingerprint.agreed(data_digest(records, seed))
    self._owner.check_fits(
      state,
      state.fingerprint._replace(
        environment=self._owner.environment, data=digest
      ),
    )

    def draw(step: int) -> Batch:
      rows = records.collect(
        sampling.draw(seed, step),
        functools.partial(sampling.choose, seed, step),
      )
      # They may share the memory of rows, which nobody writes to again.
      examples, is_padding, is_present = jax.device_put(rows, sharding)
      return Batch(examples, is_padding, is_present, step, run, digest)

    return Batches(range(int(state.step), self.steps), draw)

  def nonprivate_misfits(
    self, data: DataLike, *, users: UsersLike = None
  ) -> np.ndarray:
    """Which records never count, because of their form or of their number.

    Use it before a long run: if no record fits the declared form, a training is
    noise alone, and nothing in it may say so. Only people who may see the data
    may see the result, because no epsilon covers it. Do not publish it, and let
    nothing that you publish depend on it. It reads all records.

    Args:
      data: As for :meth:`batches`.
      users: As for :meth:`batches`.

    Returns:
      Positions in ``data``, NumPy, shape (number of them,).

    Raises:
      ValueError: As :meth:`batches`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from prism_optax import training
      >>> private = training.make_private(
      ...   lambda params, x: jnp.vdot(params, x), jnp.zeros(2),
      ...   optimizer=optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=1.0,
      ...   expected_batch_size=2, dataset_size=4, steps=1, delta=1e-5,
      ...   record=jax.ShapeDtypeStruct((2,), 'float32'))
      >>> records = [[1, 2], [3.5, 4], [5], 'six']
      >>> private.nonprivate_misfits(records).tolist()
      [2, 3]
    """
    settings = self.parts.settings
    return Records(settings.sampling, data, users, settings.record).misfits()

  def compile(
    self, state: TrainingState, frozen: ArrayTree | None = None
  ) -> None:
    """Compiles and proves the step before any record is read.

    So errors and the wait for the compiler come first. Later no other program
    is compiled, and other shapes raise. It needs ``record=`` of
    ``make_private``, the form of one record. Without this call the first
    :meth:`step` does the same.

    Args:
      state: Of this training, new or restored. It stays as it is.
      frozen: As for :meth:`step`.

    Raises:
      ValueError: If no ``record`` was declared; for a state of another
        training, program or environment; and, like :meth:`step`, for a loss
        that mixes records or a value that bypasses the noise.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from prism_optax import training
      >>> private = training.make_private(
      ...   lambda params, x: jnp.vdot(params, x), jnp.zeros(2),
      ...   optimizer=optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=1.0,
      ...   expected_batch_size=2, dataset_size=4, steps=1, delta=1e-5,
      ...   record=jax.ShapeDtypeStruct((2,), 'float32'))
      >>> private.compile(private.init(jnp.zeros(2)))
      >>> all(private.proofs)
      True
    """
    self._owner.check_state(state)
    settings = self.parts.settings
    if settings.record is None:
      raise ValueError(
        'Expected make_private(..., record=...), the form of one record, to'
        ' compile before there are any: record=(jax.ShapeDtypeStruct((128,),'
        " 'int32'), ...)."
      )
    users: UsersLike = [] if self.parts.of_users else None
    padding = Records(settings.sampling, [], users, settings.record).collect(
      np.full(self.padded_batch_size, -1), lambda place, count: np.zeros(0, int)
    )
    examples, is_padding, is_present = jax.device_put(
      padding, self.parts.execution.batch_sharding
    )
    unknown = _fingerprint.UNKNOWN
    batch = Batch(examples, is_padding, is_present, 0, b'', unknown)
    arguments = _arguments(state, frozen, batch)
    _fingerprint.of_arrays(arguments[3:])
    program = self._program.compile(arguments, batch)
    found = Fingerprint(
      self._owner.settings,
      self._owner.environment,
      program,
      _fingerprint.UNKNOWN,
    )
    self._owner.check_fits(state, found)

  def step(
    self, state: TrainingState, batch: Batch, frozen: ArrayTree | None = None
  ) -> TrainingState:
    """One private update: clip, sum, noise, optimizer.

    It is compiled once, also under ``jax.disable_jit``, because only the
    program was proved; call it outside of ``jit``. The new state takes over
    the arrays of the old one, so do not use the old state again.

    If the result has a number that is not finite, parameters and moments stay
    as they were and ``held`` of the state counts the step. Its release counts
    like any other.

    The noise is a function of the keys of the state and of settings, data,
    program, environment, parameters and batch. If all of them are the same, a
    repeated step is the same release, to the bit. If one differs, the step is
    refused, or at least its noise is another: data that are edited in place
    show only in the batch. With a ``journal`` another environment is accepted;
    the repeated step is then another release, which is counted.

    Args:
      state: Of this training.
      batch: The next one of :meth:`batches`.
      frozen: Public arrays that ``loss`` takes besides the parameters, such as
        frozen weights.

    Returns:
      The new state.

    Raises:
      ValueError: If all steps are done; for a state that an earlier step has
        taken over, or of another training, data, loss, optimizer, frozen
        weights or environment, which is named; if the loss takes other
        arguments, with or without ``frozen``; for anything that is not this
        run's batch for this step; if the loss mixes records, or a value
        bypasses the noise; for frozen weights or a loss that hold a release
        which is not among ``prior_releases``; for the journal of another run.
      FileNotFoundError: If the journal is gone.
      RuntimeError: If the journal was changed by hand.
    """
    self._owner.check_state(state)
    number = int(state.step)
    if number >= self.steps:
      raise ValueError(
        f'All steps={self.steps} are done, and no other is accounted for. To'
        ' train on, make a training of more steps before it starts, or account'
        ' for both: accounting.epsilon of their composed events.'
      )
    if not isinstance(batch, Batch):
      raise ValueError(
        'Expected a batch of PrivateTraining.batches(state, data), which draws'
        ' records as the accounting says (Poisson), got'
        f' {type(batch).__name__}. Shuffled or fixed-size batches have another'
        ' epsilon.'
      )
    run = self._owner.name(state)
    if batch.run != run or batch.step != number:
      raise ValueError(
        f'Expected the batch of step {number} of this run, got that of step'
        f' {batch.step}{"" if batch.run == run else " of another"}'
        '. Each batch is for one step: iterate batches(state, data) once.'
      )
    arguments = _arguments(state, frozen, batch)
    found = Fingerprint(
      self._owner.settings,
      self._owner.environment,
      self._program.digest(arguments, batch),
      batch.data,
    )
    self._owner.check_fits(state, found)
    rows = np.asarray(_fingerprint.of_arrays(arguments[3:]))
    # Before it is released.
    attempt = self._owner.written_down(state, found, rows)
    with jax.disable_jit(False):  # What runs is what was proved.
      params, optimizer, held = self._step(
        *arguments, _fingerprint.release(found, rows, attempt)
      )
    return TrainingState(
      params,
      optimizer,
      np.asarray(number + 1),
      state.held + held,
      state.seed,
      found,
    )

  def nonprivate_means(
    self, state: TrainingState, batch: Batch, frozen: ArrayTree | None = None
  ) -> Means:
    """Means over the records of a batch, which no epsilon covers.

    Only people who may see the data may see the result, which is not clipped
    and has no noise. Do not publish it, and let nothing that you publish depend
    on it, such as a learning rate, a clip norm or the time to stop. It runs
    apart from the step and computes the gradients a second time.

    Args:
      state: Of this training, before the step of this batch.
      batch: Of :meth:`batches`.
      frozen: As for :meth:`step`.

    Returns:
      Means over the records (or users) of the batch that count, zeros if
      there are none: ``loss``, ``gradient_norm`` before the clip (of the
      gradient, or for PRISM of its tangent coordinates) and ``aux``, the other
      results of the loss, leaf by leaf; ``()`` if there are none.

    Raises:
      ValueError: For a state of another training.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> import optax
      >>> from prism_optax import training
      >>> private = training.make_private(
      ...   lambda params, x: (jnp.vdot(params, x), {'first': x[0]}),
      ...   jnp.zeros(2), has_aux=True,
      ...   optimizer=optax.sgd(0.1), l2_clip_norm=1.0, noise_multiplier=1.0,
      ...   expected_batch_size=4, dataset_size=4, steps=1, delta=1e-5)
      >>> state = private.init(jnp.zeros(2))
      >>> (batch,) = private.batches(state, np.full((4, 2), [3.0, 4.0]))
      >>> means = private.nonprivate_means(state, batch)
      >>> float(means.gradient_norm), float(means.aux['first'])
      (5.0, 3.0)
    """
    self._owner.check_state(state)
    params, _, frozen, *rows = _arguments(state, frozen, batch)
    found: Means = self._means(params, frozen, *rows)
    return found

  def adapters(self, state: TrainingState) -> ArrayTree:
    """The trained parameters as the model takes them.

    Args:
      state: Of this training.

    Returns:
      ``state.params``; with a change of variables ``to_params`` of them.

    Raises:
      ValueError: For a state of another training.
    """
    self._owner.check_state(state)
    change = self.parts.change
    return state.params if change is None else change.to_params(state.params)

  def event(self, steps: int | None = None) -> dp_accounting.DpEvent:
    """The event of some steps, and of prior releases, for an accountant.

    Steps that were done again elsewhere, as the journal has them, count again.

    Args:
      steps: How many; None is all.

    Returns:
      A dp-accounting event.
    """
    claim = Claim(self.parts.settings, self._owner.count())
    return claim.event(self.steps if steps is None else steps)

  def epsilon(self, steps: int | None = None) -> float:
    """Epsilon of some steps, of the noise as it is drawn.

    Args:
      steps: How many; None is all. Fix the number beforehand. With
        ``stop='adaptive'`` any number will do, and the result is the epsilon of
        the next possible stop.

    Returns:
      The upper bound at the training's delta, for add-or-remove-one neighbours.

    Raises:
      ValueError: With ``stop='adaptive'``, for more steps than there are.
    """
    claim = Claim(self.parts.settings, self._owner.count())
    return claim.epsilon(self.steps if steps is None else steps)

  def statement(
    self,
    state: TrainingState | None = None,
    *,
    stop_was_fixed: bool = False,
    released_steps: int = 0,
  ) -> str:
    """The sentence to report.

    It has the epsilon of all steps of the training, also before the last one,
    because a run that stops early shows a part of the full run, whatever made
    it stop. The epsilon of the steps done is smaller, and holds only if the
    stop did not depend on releases.

    ==============================  ===========================================
    all steps done                  epsilon of all steps
    stopped early                   epsilon of all steps
    ``stop_was_fixed=True``         epsilon of the steps done
    ``stop='adaptive'``             epsilon of the next possible stop, at its
                                    share of delta
    ``released_steps``, a journal   their number of steps, if it is larger than
                                    the state's
    steps done again elsewhere      counted again, as the journal has them
    ==============================  ===========================================

    It ends with the proofs about the program of a step, once this training has
    done its first step or was compiled.

    Args:
      state: Of this training; None for all of its steps.
      stop_was_fixed: Declares that the number of steps was fixed before the
        first one, or followed from something that does not depend on the
        records (such as the time that was left). It does not hold if somebody
        looked at released parameters, or at a score of them on any data.
      released_steps: How many steps were released, or may have been, by your
        own ledger. It may be ahead of a restored state.

    Returns:
      Epsilon, delta, the relation, the sampling, the unit of privacy and the
      number of steps.

    Raises:
      ValueError: For a state of another training; for ``stop_was_fixed`` with
        ``stop='adaptive'``, which makes another claim; for more released steps
        than the training has; for the journal of another run.
      FileNotFoundError: If a state is given, and its journal is gone.
    """
    _validate.integer('released_steps', released_steps, 0)
    if stop_was_fixed and len(self.parts.settings.stops) > 1:
      raise ValueError(
        "This training was made with stop='adaptive': its epsilon is for the"
        ' next possible stop, and not for a stop fixed beforehand, got'
        f' {stop_was_fixed=}.'
      )
    count, done = self._owner.count(state), self.steps
    if state is not None:
      self._owner.check_state(state)
      # An old state does not undo what was released after it.
      done = max(int(state.step), count.steps, released_steps)
    claim = Claim(self.parts.settings, count)
    return claim.statement(done, stop_was_fixed, self.proofs)


def _arguments(
  state: TrainingState, frozen: ArrayTree, batch: Batch
) -> tuple[ArrayTree, ...]:
  """The arguments of a step.

  Raises:
    ValueError: For a state whose arrays a step has taken over.
  """
  if any(
    isinstance(x, jax.Array) and x.is_deleted()
    for x in jax.tree.leaves((state.params, state.optimizer))
  ):
    raise ValueError(
      'Expected the newest state, got one that was spent: step takes over the'
      ' arrays of the state it is given. Go on with the state that it returned'
      f' (this one is of step {int(state.step)}); keep a copy with save_state.'
    )
  return (
    state.params,
    state.optimizer,
    frozen,
    batch.examples,
    batch.is_padding_example,
    batch.is_present,
  )
