"""One jitted step for all methods, and the evaluation."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from prism_optax import lora

from . import data, methods, sampling


class TrainState(NamedTuple):
  """All that a step changes.

  Attributes:
    params: The trainable leaves: adapters and head.
    optimizer: The state of the method's transform. It contains the noise key
      and is as secret as the data.
    step: Number of steps done, int32 of shape ``()``.
    held: Number of steps after which numbers were not finite, so that the
      parameters stayed as they were; likewise.
  """

  params: Any
  optimizer: Any
  step: jax.Array
  held: jax.Array


class Diagnostics(NamedTuple):
  """Means over the private batch, NOT covered by the guarantee."""

  nonprivate_loss: jax.Array
  nonprivate_accuracy: jax.Array
  nonprivate_gradient_norm: jax.Array


def init_state(params: Any, method: methods.Method) -> TrainState:
  """The state before the first step.

  Once for each privacy budget: it fixes the noise key.
  """
  params = method.prepare(params)
  zero = jnp.zeros((), jnp.int32)
  state = TrainState(params, method.transform.init(params), zero, zero)
  # The state is donated to the step: none of its buffers may be another's.
  return jax.tree.map(jnp.copy, state)


def make_loss(graphdef: Any) -> Callable:
  """``loss(params, frozen, batch) -> (mean cross-entropy, hits)``."""

  def loss(params, frozen, batch: sampling.Batch):
    logits = nnx.merge(graphdef, params, frozen)(batch.inputs)
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, batch.labels
    )
    hits = jnp.argmax(logits, axis=-1) == batch.labels
    return jnp.mean(losses), jnp.mean(hits)

  return loss


def make_step(
  graphdef: Any,
  method: methods.Method,
  *,
  microbatch_size: int,
  skip_padding: bool = False,
  nonprivate_diagnostics: bool = False,
  loss: Callable | None = None,
) -> Callable:
  """Builds ``step(state, frozen, batch, is_padding)``.

  Args:
    graphdef: Static part of the model, from ``classifier.split``.
    method: What is done with the gradients.
    microbatch_size: Number of examples at once; divides the padded batch.
    skip_padding: Whether micro-batches of nothing but padding are left out.
    nonprivate_diagnostics: Whether the step also returns ``Diagnostics``, for
      which it computes all gradients a second time.
    loss: See ``make_loss``, which it is if None.

  Returns:
    A function to be jitted, from the state to ``(state, diagnostics)``.
  """
  loss = make_loss(graphdef) if loss is None else loss

  def of_one(params, frozen, example):
    return loss(params, frozen, jax.tree.map(lambda x: x[None], example))

  def gradient(params, example, frozen):
    return jax.grad(of_one, has_aux=True)(params, frozen, example)[0]

  # The clip computes them, so many at once.
  gradients = lora.in_microbatches(
    jax.vmap(gradient, (None, 0, None)),
    microbatch_size,
    skip_padding=skip_padding,
  )

  def diagnose(params, frozen, batch, is_padding):
    def one(example):
      (value, hits), gradient = jax.value_and_grad(of_one, has_aux=True)(
        params, frozen, example
      )
      return value, hits, optax.tree.norm(method.coordinates(params)(gradient))

    each = jax.lax.map(one, batch, batch_size=microbatch_size)
    count = jnp.maximum(jnp.sum(~is_padding), 1)
    return Diagnostics(
      *(jnp.sum(jnp.where(is_padding, 0, x)) / count for x in each)
    )

  def step(state: TrainState, frozen, batch: sampling.Batch, is_padding):
    updates, optimizer = method.transform.update(
      gradients(state.params, batch, frozen),
      state.optimizer,
      state.params,
      is_padding_example=is_padding,
    )
    params = optax.apply_updates(state.params, updates)
    # Too large a learning rate overflows. What is tested is post-processing
    # of the release, so it may decide. The step counts all the same, and keys
    # and counters move on: noise that was drawn must not be drawn again (so
    # never `optax.apply_if_finite`, which puts the old state back).
    finite = jnp.array(True)
    for leaf in jax.tree.leaves((params, optimizer)):
      if jnp.issubdtype(leaf.dtype, jnp.floating):
        finite &= jnp.all(jnp.isfinite(leaf))
    params = jax.tree.map(
      lambda new, old: jnp.where(finite, new, old), params, state.params
    )
    optimizer = jax.tree.map(
      lambda new, old: (
        jnp.where(finite, new, old)
        if jnp.issubdtype(new.dtype, jnp.floating)
        else new
      ),
      optimizer,
      state.optimizer,
    )
    held = state.held + (~finite).astype(jnp.int32)
    diagnostics = None
    if nonprivate_diagnostics:
      diagnostics = diagnose(state.params, frozen, batch, is_padding)
    return TrainState(params, optimizer, state.step + 1, held), diagnostics

  return step


class Placement:
  """Where arrays lie: batches split over devices, all else on each of them.

  Args:
    devices: How many. The number of examples in a micro-batch must be a
      multiple of it.

  Raises:
    ValueError: If there are fewer.
  """

  def __init__(self, devices: int = 1):
    found = jax.devices()
    if devices > len(found):
      raise ValueError(
        f'--mesh asks for {devices} devices, but there are {len(found)}. (On '
        'a CPU: XLA_FLAGS=--xla_force_host_platform_device_count='
        f'{devices}.)'
      )
    mesh = jax.make_mesh(
      (devices,),
      ('data',),
      (jax.sharding.AxisType.Auto,),
      devices=found[:devices],
    )
    self._all = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    self._rows = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec('data')
    )

  def everywhere(self, tree: Any) -> Any:
    """The same arrays on all devices."""
    return jax.device_put(tree, self._all)

  def split(self, tree: Any) -> Any:
    """Arrays split along their first axis."""
    return jax.device_put(tree, self._rows)


def compile_step(
  step: Callable, state: TrainState, frozen: Any, batch: Any, is_padding: Any
) -> Callable:
  """Compiles the step for these shapes, once.

  The result raises on any other shape instead of compiling again. It donates
  the state: the buffers of the one passed in are gone afterwards.
  """
  # The new state lies where the old one did, so that it can be passed again.
  where = (jax.tree.map(lambda x: x.sharding, state), None)
  jitted = jax.jit(step, donate_argnums=0, out_shardings=where)
  return jitted.lower(state, frozen, batch, is_padding).compile()


def make_evaluate(
  graphdef: Any, evaluation: data.Examples, chunk: int = 64
) -> Callable[[Any, Any], dict[str, float]]:
  """Builds ``evaluate(params, frozen)`` over a public set.

  Args:
    graphdef: Static part of the model.
    evaluation: Public rows, no blank label among them.
    chunk: Rows at once; the last chunk is padded to the same shape.

  Returns:
    A function that returns ``eval_loss``, the mean cross-entropy in nats, and
    ``eval_accuracy``, a fraction.
  """
  rows = len(evaluation.labels)
  indices = np.full(-(-rows // chunk) * chunk, -1)
  indices[:rows] = np.arange(rows)
  batch, is_padding = sampling.gather(evaluation, indices)
  chunked = jax.tree.map(
    lambda x: jnp.asarray(x.reshape(-1, chunk, *x.shape[1:])),
    (batch, ~is_padding),
  )

  @jax.jit
  def totals(params, frozen):
    model = nnx.merge(graphdef, params, frozen)

    def one(chunk_of_rows):
      (inputs, labels), weights = chunk_of_rows
      logits = model(inputs)
      losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      hits = jnp.argmax(logits, axis=-1) == labels
      return jnp.sum(losses * weights), jnp.sum(hits * weights)

    losses, hits = jax.lax.map(one, chunked)
    return jnp.sum(losses), jnp.sum(hits)

  def evaluate(params, frozen):
    loss, hits = totals(params, frozen)
    return {
      'eval_loss': float(loss) / rows,
      'eval_accuracy': float(hits) / rows,
    }

  return evaluate
