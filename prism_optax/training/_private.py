"""One object that owns all that has to agree for an epsilon to be right."""

import functools
import hashlib
import os
from typing import Any, NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _per_example, accounting
from prism_optax._proofs._proof import Proof
from prism_optax._types import ArrayTree
from prism_optax.accounting import _events
from prism_optax.training import _fingerprint, _releases, _seen, _stops
from prism_optax.training._data_digest import data_digest
from prism_optax.training._fingerprint import Fingerprint
from prism_optax.training._journal import Count, Journal
from prism_optax.training._records import Records
from prism_optax.training._sampling import Batch, Batches
from prism_optax.training._settings import Parts


class TrainingState(NamedTuple):
  """All of a run: save it, restore it, go on.

  As secret as the data: it holds the keys of the noise and of the batches. Only
  ``params`` may be released.

  Attributes:
    params: The trainable parameters.
    optimizer: State of clip, noise and optimizer.
    step: Number of steps done, NumPy, shape ().
    seed: Of the batches, NumPy, (4,) uint32.
    fingerprint: What it belongs to: digests of settings, environment, program
      and data, NumPy, (8,) uint32 each.
  """

  params: Any
  optimizer: Any
  step: np.ndarray
  seed: np.ndarray
  fingerprint: Fingerprint


# What a state may differ in, for messages: nothing private.
_PARTS = {
  'settings': 'sizes, clip, noise, steps, delta, stop, shapes of parameters',
  'environment': 'backend, devices, layout of batches, versions',
  'program': 'loss, optimizer, frozen weights, shapes of records',
  'data': 'the records, or who they are of',
}


class PrivateTraining:
  """A private training, as :func:`make_private` makes it.

  Attributes:
    parts: What it is made of.
    noise_multiplier: Of all that a step releases, as it is accounted.
    padded_batch_size: Rows of every batch.
    steps: Number of steps.
    proofs: What was proved of the program of a step, when the first one was
      done: that no record meets another, and that nothing passes the noise.
  """

  def __init__(self, parts: Parts) -> None:
    settings = parts.settings
    self.parts = parts
    self.noise_multiplier = settings.noise_multiplier
    self.padded_batch_size = settings.sampling.padded_batch_size
    self.steps = settings.steps
    self.proofs: tuple[Proof, ...] = ()
    self._begun = False
    self._frozen = _fingerprint.FrozenWeights()
    self._programs: dict[str, np.ndarray] = {}
    self._journal = None if parts.journal is None else Journal(parts.journal)
    words = repr((settings, jax.tree.map(_described, parts.shapes)))
    self._settings = _fingerprint.words(words)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
      params: Any,
      state: Any,
      frozen: Any,
      examples: Any,
      is_padding_example: jax.Array,
      is_present: jax.Array | None,
      release: jax.Array | None = None,
    ) -> tuple[Any, Any]:
      if release is not None:  # Other parameters have other gradients.
        release = release ^ _fingerprint.of_arrays(params)
      rows = examples if is_present is None else (examples, is_present)
      lazy = _per_example.LazyGradients(
        rows,
        jax.jit(functools.partial(parts.gradients, params, frozen)),
        settings.sampling.microbatch_size,
        parts.skip_padding,
      )
      updates, state = parts.transformation.update(
        lazy,
        state,
        params,
        is_padding_example=is_padding_example,
        release_digest=release,
      )
      return optax.apply_updates(params, updates), state

    self._step = step

  def init(self, params: ArrayTree) -> TrainingState:
    """A state for a new run: fresh keys, one budget of privacy.

    A ``journal`` that does not exist yet is begun for this run.

    Args:
      params: The trainable parameters, of the shapes that ``make_private`` got.

    Returns:
      The state before the first step.

    Raises:
      ValueError: If the parameters have other shapes, or hold a release that
        is not among ``prior_releases``; under ``jit``; a second time where
        ``prng_key`` was given, because all runs would share its noise.
    """
    found, wanted = (
      jax.tree.map(_described, x) for x in (params, self.parts.shapes)
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
    if self._begun and self.parts.key_is_given:
      raise ValueError(
        'This training has begun a run already, and its prng_key was given: a'
        ' second run would have the keys of the first. Go on with the state of'
        ' the first, or leave prng_key out, which makes fresh keys in each'
        ' init.'
      )
    self.parts.check_declared('params', params)
    state = self.parts.transformation.init(params)
    # The step takes these buffers over: none may be the caller's.
    params, state = jax.tree.map(jnp.copy, (params, state))
    unknown = _fingerprint.UNKNOWN.copy
    fingerprint = Fingerprint(
      self._settings.copy(), self._environment.copy(), unknown(), unknown()
    )
    new = TrainingState(
      params,
      state,
      np.zeros((), np.int64),
      self.parts.new_seed(),
      fingerprint,
    )
    if self._journal is not None and jax.process_index() == 0:
      self._journal.begin(self._run(new))
    self._begun = True
    return new

  def batches(
    self, state: TrainingState, data: Any, *, users: Any = None
  ) -> Batches:
    """The batches from the state's step to the last, drawn at random.

    Each record is drawn for each batch independently, with probability
    ``expected_batch_size / dataset_size``; a batch has one form, filled with
    zeros. Nobody may see which records were drawn.

    **Form.** Structure, shapes and types of one record are public: arrays show
    them, and ``record=`` of ``make_private`` declares them for all other data.
    Each record is brought to this form by itself. Numbers become floats by
    rounding; they become whole numbers or truth values only if they keep their
    value (``3.0`` and ``True`` fit an int32, ``3.5`` and ``2**31`` do not). Of
    a dict all keys have to be those of the form; a list may stand for a tuple.

    ================================  =========================================
    another shape, structure, type    the record counts as zero, silently
    text, None, a masked array        likewise
    ``data[i]`` raises                likewise; an error of disk or network
                                      (``ConnectionError``, ``TimeoutError``,
                                      ``OSError`` with ``EIO`` and the like)
                                      stops the run
    NaN or Inf                        fits a float; the clip sees to it
    fewer records than dataset_size   the last places are empty
    more of them                      those beyond the last place are never
                                      drawn; declare more
    nothing drawn                     no record is read; nor for padding
    ids that are equal                one user (``1 == 1.0``, ``'1'`` differs)
    None, NaN or a list for an id     all these are one user
    ================================  =========================================

    How long a batch takes to read may depend on its records.

    The batches carry a digest of the data under the seed of the state, which is
    compared when the run goes on. Each call reads all records of arrays for it;
    of other sources 256 records at secret places, so that a change of a few
    records of many passes unseen.

    Args:
      state: Of this training; the batches go on where it stands.
      data: A tuple or dict (any tree of these) of arrays (N, ...), one array,
        or with ``record=`` a source with ``len`` and integer look-up (a list of
        records, a ``datasets.Dataset``, a ``grain`` source). A record that is a
        tuple is unpacked into the arguments of ``loss``.
      users: With ``examples_per_user`` alone: who each record is of, (N,), an
        array, or a list of numbers, text, bytes or ``uuid.UUID``.

    Returns:
      An iterable with a length.

    Raises:
      ValueError: If the state is of another training or environment, or began
        with other data; for a source without ``record=``, for arrays of several
        lengths, that are no numbers or of another form than ``record=``.
    """
    self._check_state(state)
    settings, seed = self.parts.settings, np.asarray(state.seed)
    sampling = settings.sampling
    records = Records(sampling, data, users, settings.record)
    run = self._run(state)
    digest = _fingerprint.agreed(data_digest(records, seed))
    self._check_fits(
      state,
      state.fingerprint._replace(environment=self._environment, data=digest),
    )

    def draw(step: int) -> Batch:
      rows = records.collect(
        sampling.draw(seed, step),
        functools.partial(sampling.choose, seed, step),
      )
      examples, is_padding, is_present = self.parts.put(rows)
      return Batch(examples, is_padding, is_present, step, run, digest)

    return Batches(range(int(state.step), self.steps), draw)

  def nonprivate_misfits(self, data: Any, *, users: Any = None) -> np.ndarray:
    """Which records never count, because of their form or of their number.

    For your eyes alone, before a long run: if no record fits what was declared,
    a training is noise alone, and nothing in it may say so. What this returns
    is no release and has no epsilon: do not publish it, and let nothing that is
    published depend on it. It reads all records.

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

  def step(
    self, state: TrainingState, batch: Batch, frozen: ArrayTree | None = None
  ) -> TrainingState:
    """One private update: clip, sum, noise, optimizer.

    It is compiled once; call it outside of ``jit``. The arrays of the old state
    are taken over by the new one.

    The noise is a function of the keys of the state and of settings, data,
    program, environment and parameters. A step that is done again where all of
    them are the same is the same release, to the bit. What differs is refused;
    with a ``journal`` another environment is not, and gives another release,
    which is counted.

    Args:
      state: Of this training.
      batch: The next one of :meth:`batches`.
      frozen: What ``loss`` takes besides the parameters, public.

    Returns:
      The new state.

    Raises:
      ValueError: If all steps are done; for a state of another training, data,
        loss, optimizer, frozen weights or environment, which is named; for
        anything that is not this run's batch for this step; if the loss mixes
        records, or anything of them passes the noise; for frozen weights or a
        loss that hold a release which is not among ``prior_releases``; for the
        journal of another run.
      FileNotFoundError: If the journal is gone.
      RuntimeError: If the journal was changed by hand.
    """
    self._check_state(state)
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
    if batch.run != self._run(state) or batch.step != number:
      raise ValueError(
        f'Expected the batch of step {number} of this run, got that of step'
        f' {batch.step}{"" if batch.run == self._run(state) else " of another"}'
        '. Each batch is for one step: iterate batches(state, data) once.'
      )
    arguments = _arguments(state, frozen, batch)
    found = Fingerprint(
      self._settings,
      self._environment,
      self._program(arguments, batch),
      batch.data,
    )
    self._check_fits(state, found)
    attempt = self._written_down(state, found)  # Before it is released.
    params, optimizer = self._step(
      *arguments, _fingerprint.release(found, attempt)
    )
    return TrainingState(
      params, optimizer, np.asarray(number + 1), state.seed, found
    )

  def adapters(self, state: TrainingState) -> Any:
    """The trained parameters as the model takes them.

    Args:
      state: Of this training.

    Returns:
      ``state.params``; with a change of variables ``to_params`` of them.

    Raises:
      ValueError: For a state of another training.
    """
    self._check_state(state)
    return self.parts.adapters(state.params)

  def event(self, steps: int | None = None) -> dp_accounting.DpEvent:
    """The event of some steps, and of prior releases, for an accountant.

    Steps that were done again elsewhere, as the journal has them, count again.

    Args:
      steps: How many; None is all.

    Returns:
      A dp-accounting event.
    """
    return self._event((self.steps if steps is None else steps), self._count())

  def epsilon(self, steps: int | None = None) -> float:
    """Epsilon of some steps, with ideal noise.

    Args:
      steps: How many; None is all. A number that was fixed beforehand, or with
        ``stop='adaptive'`` any: epsilon is that of the next possible stop.

    Returns:
      The upper bound at the training's delta, for add-or-remove-one neighbours.

    Raises:
      ValueError: With ``stop='adaptive'``, for more steps than there are.
    """
    settings = self.parts.settings
    n = self.steps if steps is None else steps
    if len(settings.stops) > 1:
      n = _stops.next_stop(settings.stops, n)
    return accounting.epsilon(
      self.event(n),
      settings.delta / len(settings.stops),
      dataset_size=settings.sampling.dataset_size,
    )

  def statement(
    self, state: TrainingState | None = None, *, stop_was_fixed: bool = False
  ) -> str:
    """The sentence to report.

    Epsilon is that of all steps of the training, also before the last one: who
    stops early shows a part of what the whole run would have shown, whatever
    made them stop. Epsilon of the steps done is smaller, and holds only if the
    stop did not depend on what was released.

    ==============================  ===========================================
    all steps done                  epsilon of all steps
    stopped early                   epsilon of all steps
    stopped early,                  epsilon of the steps done
    ``stop_was_fixed=True``
    ``stop='adaptive'``             epsilon of the next possible stop, at its
                                    share of delta
    steps done again elsewhere      counted again, as the journal has them
    ==============================  ===========================================

    It ends in what was proved of the program of a step, when this training did
    its first one; before that nothing is said.

    Args:
      state: Of this training; None for all of its steps.
      stop_was_fixed: Says that the number of steps was fixed before the first
        one, or follows from what does not depend on the records (the time that
        was left). Not where somebody looked at released parameters, or at a
        score of them on whatever data.

    Returns:
      Epsilon, delta, the relation, the sampling, the unit of privacy and the
      number of steps.

    Raises:
      ValueError: For a state of another training; for ``stop_was_fixed`` of a
        training with ``stop='adaptive'``, whose claim is another; for the
        journal of another run.
      FileNotFoundError: If a state is given, and its journal is gone.
    """
    settings = self.parts.settings
    stops = settings.stops
    if stop_was_fixed and len(stops) > 1:
      raise ValueError(
        "This training was made with stop='adaptive': its epsilon is that of"
        ' the next possible stop, and not that of a stop fixed beforehand, got'
        f' {stop_was_fixed=}.'
      )
    count, done = self._count(state), self.steps
    if state is not None:
      self._check_state(state)
      # An old state does not undo what was released after it.
      done = max(int(state.step), count.steps)
    reported = done if stop_was_fixed else _stops.next_stop(stops, done)
    most = settings.sampling.examples_per_user
    unit = 'unit: one record'
    if most is not None:
      unit = f'unit: one user with all records, at most {most} in a batch'
    text = accounting.privacy_statement(
      self._event(reported, count),
      settings.delta,
      dataset_size=settings.sampling.dataset_size,
      entries=(reported + count.again) * settings.entries
      + settings.prior_releases.entries,
      possible_stops=len(stops),
    )
    void = (
      '; no guarantee against anyone who knows prng_key'
      if settings.seeded
      else ''
    )
    prior = settings.prior_releases.words
    steps = _in_words(done, reported, self.steps, len(stops), count.again)
    return f'{text}, {unit}, {steps}{prior}{void}{_proved(self.proofs)}'

  def _event(self, steps: int, count: Count) -> dp_accounting.DpEvent:
    settings = self.parts.settings
    cut = settings.sampling.truncated_batch_size
    training = accounting.dpsgd_event(
      settings.noise_multiplier,
      settings.sampling.probability,
      steps + count.again,
      truncated_batch_size=cut,
      dataset_size=None if cut is None else settings.sampling.dataset_size,
    )
    return _events.composed([training, *settings.prior_releases.events])

  def _check_state(self, state: TrainingState) -> None:
    same = (
      isinstance(state, TrainingState)
      and isinstance(state.fingerprint, Fingerprint)  # Once it was one array.
      and np.array_equal(np.asarray(state.fingerprint.settings), self._settings)
    )
    if not same:
      raise ValueError(
        'Expected a state of this training: of its init, or restored from a run'
        f' with the same settings ({_PARTS["settings"]}). Got'
        f' {type(state).__name__} of another.'
      )

  def _check_fits(self, state: TrainingState, found: Fingerprint) -> None:
    """Refuses to use the keys of a state for another sum."""
    other = _fingerprint.differing(state.fingerprint, found)
    if 'environment' in other:
      if self._journal is None:
        raise ValueError(
          'The state was made in another environment'
          f' ({_PARTS["environment"]}), which rounds gradients in its own way,'
          ' so that a step done again here would be a second release, and'
          ' nobody could count it. Go on where the run began; or begin a new'
          ' run, with make_private(journal=path), which counts them, and'
          ' account for both.'
        )
      # What a program is made of differs by version, too.
      other = [x for x in other if x not in ('environment', 'program')]
    if other:
      raise ValueError(
        'Expected what the run began with, got another one: '
        + ' and '.join(f'{x} ({_PARTS[x]})' for x in other)
        + '. The keys of a state are for one run alone. Begin a new one with'
        ' init, and account for both.'
      )

  @functools.cached_property
  def _environment(self) -> np.ndarray:
    found = _fingerprint.environment(self.parts.sharding, os.urandom(16).hex())
    return _fingerprint.agreed(_fingerprint.words(found))

  def _program(self, arguments: tuple[Any, ...], batch: Batch) -> np.ndarray:
    """A digest of the program that runs, which is proved when it is new."""
    params, _, frozen, *rows = arguments
    shapes = jax.tree.map(
      lambda x: _described(x) if hasattr(x, 'dtype') else type(x),
      (frozen, rows),
    )
    weights = self._frozen.digest(frozen)
    name = f'{shapes} {weights!r}'
    if name not in self._programs:
      self.parts.check_declared('frozen', frozen)
      independence = self.parts.check(params, frozen, batch)
      arguments = (*arguments, _fingerprint.UNKNOWN)
      traced = self._step.trace(*arguments)  # JAX runs what is traced here.
      constants = _releases.constants_of(traced.jaxpr)
      self.parts.check_declared('the constants of loss', list(constants))
      release = _seen.prove_step(
        traced,
        arguments,
        self.noise_multiplier,
        self.parts.releases_per_step,
      )
      self.proofs = tuple(x for x in (independence, release) if x is not None)
      self._programs[name] = _fingerprint.agreed(
        _fingerprint.words(_fingerprint.program(traced.jaxpr), weights)
      )
    return self._programs[name]

  def _written_down(self, state: TrainingState, found: Fingerprint) -> int:
    """Number of the release of this step among those in the journal."""
    if self._journal is None:
      return 0
    attempt = 0
    if jax.process_index() == 0:
      params = np.asarray(_fingerprint.jitted_of_arrays(state.params))
      attempt = self._journal.record(
        self._run(state),
        int(state.step),
        _fingerprint.words(*(x.tobytes() for x in (*found, params))),
      )
    return int(_fingerprint.agreed(np.array([attempt], np.uint32))[0])

  def _count(self, state: TrainingState | None = None) -> Count:
    """What the journal has, of the run of a state or whose it is."""
    if self._journal is None:
      return Count()
    count = Count()
    if jax.process_index() == 0:
      run = None if state is None else self._run(state)
      count = self._journal.count(run)
    found = _fingerprint.agreed(np.array(count, np.uint32))
    return Count(*map(int, found))

  def _run(self, state: TrainingState) -> bytes:
    seed = np.asarray(state.seed, np.uint32).tobytes()
    return hashlib.sha256(seed + self._settings.tobytes()).digest()


def _in_words(
  done: int, reported: int, steps: int, stops: int, again: int
) -> str:
  """How many steps were done, and of how many epsilon is."""
  words = f'{done} of {steps} steps'
  if stops > 1:
    words += f' (epsilon is that of {reported}, one of {stops} possible stops)'
  elif reported != done:
    words += f' (epsilon is that of all {reported})'
  elif done < steps:
    words += ' (a stop that was fixed beforehand)'
  if again:
    words += f' and {again} of them done again elsewhere'
  return words


def _arguments(
  state: TrainingState, frozen: Any, batch: Batch
) -> tuple[Any, ...]:
  """The arguments of a step."""
  return (
    state.params,
    state.optimizer,
    frozen,
    batch.examples,
    batch.is_padding_example,
    batch.is_present,
  )


def _proved(proofs: tuple[Proof, ...]) -> str:
  """The end of a statement."""
  words = [
    'nothing passes the noise'
    if x.claim == _seen.CLAIM
    else 'records do not meet'
    for x in proofs
    if x
  ]
  return f'; proved: {", and ".join(words)}' if words else ''


def _described(x: Any) -> tuple[Any, ...]:
  return tuple(x.shape), str(x.dtype)
