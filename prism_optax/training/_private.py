"""One object that owns all that has to agree for an epsilon to be right."""

import functools
import hashlib
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
from prism_optax.training import _releases, _seen
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
    fingerprint: Of the settings that the guarantee depends on, NumPy, (8,)
      uint32.
  """

  params: Any
  optimizer: Any
  step: np.ndarray
  seed: np.ndarray
  fingerprint: np.ndarray


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
    self._checked = False
    self._frozen_ids: list[int] | None = None
    words = repr((settings, jax.tree.map(_described, parts.shapes))).encode()
    digest = hashlib.sha256(words).digest()
    self._fingerprint = np.frombuffer(digest, np.uint32)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
      params: Any,
      state: Any,
      frozen: Any,
      examples: Any,
      is_padding_example: jax.Array,
      is_present: jax.Array | None,
    ) -> tuple[Any, Any]:
      rows = examples if is_present is None else (examples, is_present)
      lazy = _per_example.LazyGradients(
        rows,
        jax.jit(functools.partial(parts.gradients, params, frozen)),
        settings.sampling.microbatch_size,
        parts.skip_padding,
      )
      updates, state = parts.transformation.update(
        lazy, state, params, is_padding_example=is_padding_example
      )
      return optax.apply_updates(params, updates), state

    self._step = step

  def init(self, params: ArrayTree) -> TrainingState:
    """A state for a new run: fresh keys, one budget of privacy.

    Args:
      params: The trainable parameters, of the shapes that ``make_private`` got.

    Returns:
      The state before the first step.

    Raises:
      ValueError: If the parameters have other shapes, or hold a release that
        is not among ``prior_releases``; or under ``jit``.
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
    self.parts.check_declared('params', params)
    state = self.parts.transformation.init(params)
    # The step takes these buffers over: none may be the caller's.
    params, state = jax.tree.map(jnp.copy, (params, state))
    return TrainingState(
      params,
      state,
      np.zeros((), np.int64),
      self.parts.new_seed(),
      self._fingerprint.copy(),
    )

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
      ValueError: If the state is of another training, for a source without
        ``record=``, for arrays of several lengths, that are no numbers or of
        another form than ``record=``.
    """
    self._check_state(state)
    settings, seed = self.parts.settings, np.asarray(state.seed)
    sampling = settings.sampling
    records = Records(sampling, data, users, settings.record)
    run = self._run(state)

    def draw(step: int) -> Batch:
      rows = records.collect(
        sampling.draw(seed, step),
        functools.partial(sampling.choose, seed, step),
      )
      examples, is_padding, is_present = self.parts.put(rows)
      return Batch(examples, is_padding, is_present, step, run)

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

    Args:
      state: Of this training.
      batch: The next one of :meth:`batches`.
      frozen: What ``loss`` takes besides the parameters, public.

    Returns:
      The new state.

    Raises:
      ValueError: If all steps are done; for a state of another training, or
        anything that is not this run's batch for this step; for frozen weights
        or a loss that hold a release which is not among ``prior_releases``; the
        first time if the loss mixes records, or if anything of them passes the
        noise.
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
    inputs = _arguments(state, frozen, batch)
    frozen_ids = [id(x) for x in jax.tree.leaves(frozen)]
    if frozen_ids != self._frozen_ids:  # Once for the same weights.
      self.parts.check_declared('frozen', frozen)
      self._frozen_ids = frozen_ids
    if not self._checked:
      independence: Proof | None = self.parts.check(state.params, frozen, batch)
      # What is traced here is what runs: it is not traced again.
      traced = self._step.trace(*inputs)
      constants = _releases.constants_of(traced.jaxpr)
      self.parts.check_declared('the constants of loss', list(constants))
      release = self._prove_release(traced, inputs)
      self.proofs = tuple(x for x in (independence, release) if x is not None)
      self._checked = True
    params, optimizer = self._step(*inputs)
    return state._replace(
      params=params, optimizer=optimizer, step=np.asarray(number + 1)
    )

  def adapters(self, state: TrainingState) -> Any:
    """The trained parameters as the model takes them.

    Args:
      state: Of this training.

    Returns:
      ``state.params``; with an input metric ``metric.to_params`` of them.

    Raises:
      ValueError: For a state of another training.
    """
    self._check_state(state)
    return self.parts.adapters(state.params)

  def event(self, steps: int | None = None) -> dp_accounting.DpEvent:
    """The event of some steps, and of prior releases, for an accountant.

    Args:
      steps: How many; None is all.

    Returns:
      A dp-accounting event.
    """
    settings = self.parts.settings
    cut = settings.sampling.truncated_batch_size
    training = accounting.dpsgd_event(
      settings.noise_multiplier,
      settings.sampling.probability,
      self.steps if steps is None else steps,
      truncated_batch_size=cut,
      dataset_size=None if cut is None else settings.sampling.dataset_size,
    )
    return _events.composed([training, *settings.prior_releases.events])

  def epsilon(self, steps: int | None = None) -> float:
    """Epsilon of some steps, with ideal noise.

    Args:
      steps: How many; None is all.

    Returns:
      The upper bound at the training's delta, for add-or-remove-one neighbours.
    """
    settings = self.parts.settings
    size = settings.sampling.dataset_size
    return accounting.epsilon(
      self.event(steps), settings.delta, dataset_size=size
    )

  def statement(self, state: TrainingState | None = None) -> str:
    """The sentence to report, for the steps that a state has done.

    It ends in what was proved of the program of a step, when this training did
    its first one; before that nothing is said.

    Args:
      state: Of this training; None for all of its steps.

    Returns:
      Epsilon, delta, the relation, the sampling, the unit of privacy.

    Raises:
      ValueError: For a state of another training.
    """
    settings = self.parts.settings
    done = self.steps
    if state is not None:
      self._check_state(state)
      done = int(state.step)
    most = settings.sampling.examples_per_user
    unit = 'unit: one record'
    if most is not None:
      unit = f'unit: one user with all records, at most {most} in a batch'
    text = accounting.privacy_statement(
      self.event(done),
      settings.delta,
      dataset_size=settings.sampling.dataset_size,
      entries=done * settings.entries + settings.prior_releases.entries,
    )
    void = '; VOID for all who know prng_key' if settings.seeded else ''
    prior = settings.prior_releases.words
    return (
      f'{text}, {unit}, {done} of {self.steps} steps{prior}{void}'
      f'{_proved(self.proofs)}'
    )

  def _prove_release(
    self, traced: Any, inputs: tuple[Any, ...]
  ) -> Proof | None:
    """Refuses a step that lets something past the noise, by its program."""
    return _seen.prove_step(
      traced, inputs, self.noise_multiplier, self.parts.releases_per_step
    )

  def _check_state(self, state: TrainingState) -> None:
    same = isinstance(state, TrainingState) and np.array_equal(
      np.asarray(state.fingerprint), self._fingerprint
    )
    if not same:
      raise ValueError(
        'Expected a state of this training: of its init, or restored from a run'
        ' with the same sizes, clip, noise, steps and shapes of parameters.'
        f' Got {type(state).__name__} of another.'
      )

  def _run(self, state: TrainingState) -> bytes:
    seed = np.asarray(state.seed, np.uint32).tobytes()
    return hashlib.sha256(seed + self._fingerprint.tobytes()).digest()


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
