"""Trainings of `make_private` under attack: each record is its own gradient.

The loss is linear, so that a record can be anything that a gradient can be. The
optimizer hands on what was released: the noised gradient, and the clip norm of
a quantile, which is a release, too. All records are in the batch, the canary's
in the last rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import prism_optax
from prism_optax import training
from tests import cases
from tests.audit import harness
from tests.core import seams

SIGMA, CLIP, QUANTILE_RATE = 2.0, 0.7, 0.2
ROWS, MOST = harness.OTHERS + 1, 3  # Of a batch; most records of a user.
SHAPES = {'lora_a': (6, 2), 'lora_b': (2, 5), 'head': (3,)}
GROUPS = {'lora_a': 'module', 'lora_b': 'module', 'head': 'head'}


def quantile(fraction_stddev):
  return training.QuantileClipping(
    learning_rate=QUANTILE_RATE, fraction_stddev=fraction_stddev
  )


RULES = {
  'flat': None,
  'automatic': training.AutomaticClipping(),
  'groups': training.GroupClipping(GROUPS, {'module': 1.0, 'head': 1.0}),
  'quantile': quantile(0.4),
}


class Release(NamedTuple):
  """What a step gives away.

  Attributes:
    mean: Sum of the bounded gradients over b, in coordinates, with noise.
    vote: The mean of the centred votes of a quantile, with noise; or 0.
  """

  mean: Any
  vote: Any


def params():
  return gradients(0)


def gradients(seed, *lead):
  """Normal entries in the shapes of the parameters."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.normal(size=(*lead, *shape)).astype(np.float32)
    for name, shape in SHAPES.items()
  }


def loss(params, record):
  return sum(jnp.vdot(params[name], record[name]) for name in SHAPES)


def on_manifold(
  *, l2_clip_norm, noise_multiplier, expected_batch_size, prng_key, steps,
  per_example_gradients=True,
):  # fmt: skip
  """`prism` without its preconditioner, remembering what was released."""
  stddev = noise_multiplier * l2_clip_norm / expected_batch_size
  clip = prism_optax.intrinsic_clip(
    l2_clip_norm, normalize_by=expected_batch_size
  )
  return prism_optax.chain(
    *[clip] * per_example_gradients,
    prism_optax.tangent_privatizer(stddev, prng_key=prng_key, steps=steps),
    harness.recorder(), prism_optax.scale_by_learning_rate(0.05),
    prism_optax.retract(),
  )  # fmt: skip


# `dense`: any optimizer of optax, here one that remembers what comes in.
OPTIMIZERS = {'dense': harness.recorder(), 'prism': on_manifold}


def make(
  optimizer='dense', clipping=None, *, users=False, sigma=SIGMA, rows=ROWS
):
  """A training of one step whose batch is all of the data.

  Args:
    optimizer: A key of `OPTIMIZERS`, or one for `make_private`.
    clipping: A key of `RULES`, or a rule.
    users: Whether a row is a user.
    sigma: Its noise multiplier.
    rows: Of the batch.
  """
  if isinstance(optimizer, str):
    optimizer = OPTIMIZERS[optimizer]
  return cases.make(
    optimizer, loss=loss, params=params(), noise_multiplier=sigma,
    clipping=RULES[clipping] if isinstance(clipping, str) else clipping,
    l2_clip_norm=CLIP, expected_batch_size=rows, dataset_size=rows, steps=1,
    execution=training.Execution(padded_batch_size=rows),
    examples_per_user=MOST if users else None, delta=harness.GDP_DELTA,
  )  # fmt: skip


def others(rows=ROWS - 1, users=False, scale=0.2):
  """Rows of all but the canary."""
  lead = (rows, MOST) if users else (rows,)
  return jax.tree.map(lambda x: np.float32(scale) * x, gradients(2, *lead))


def batch_of(known, canary):
  """Rows of a batch: the known ones, then the canary's, (rows, ...)."""
  return jax.tree.map(lambda x, y: np.concatenate([x, y]), known, canary)


def step_of(private):
  """``step(key, examples, is_padding, is_present)``, to params and release.

  The step that `PrivateTraining.step` runs, from its start, with other keys.
  """
  start = private.init(params())

  def other_key(x, words):
    if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
      return x
    return jax.random.fold_in(jax.random.fold_in(x, words[0]), words[1])

  def step(key, examples, is_padding, is_present=None):
    words = jax.random.key_data(key)
    state = jax.tree.map(lambda x: other_key(x, words), start.optimizer)
    new, after, _ = seams.run_step(
      private, start.params, state, None, examples, is_padding, is_present
    )
    before, now = state[0], after[0]
    vote = jnp.zeros(())
    if hasattr(now, 'l2_clip_norm'):  # Its quantile is one half.
      moved = jnp.log(now.l2_clip_norm / before.l2_clip_norm)
      vote = -moved / QUANTILE_RATE
    return new, Release(_recorded(after), vote)

  return step


def _recorded(state):
  """What the recorder saw, a tree of parameters; None without one."""
  if isinstance(state, tuple):
    return next((x for x in map(_recorded, state) if x is not None), None)
  return state if isinstance(state, dict) else None


def shift(step, batch, canaries=1, is_present=None):
  """How far the last rows move a release without noise."""
  rows = len(jax.tree.leaves(batch)[0])
  key = jax.random.key(0)
  inside, outside = (
    step(key, batch, np.arange(rows) >= last, is_present)[1]
    for last in (rows, rows - canaries)
  )
  return jax.tree.map(lambda x, y: np.asarray(x) - np.asarray(y), inside,
                      outside)  # fmt: skip


def attack(
  private, silent, batch, stddevs, draws, *, canaries=1, is_present=None
):
  """Bounds of who sees the release of one step.

  Args:
    private: Whose release it is.
    silent: The same without noise: what the attacker looks for.
    batch: Examples, of which the last rows are the canary's.
    stddevs: Of the noise of the mean, and of that of the vote.
    draws: Keys for each of the two worlds.
    canaries: How many rows are the canary's.
    is_present: With users.
  """
  moved = shift(jax.jit(step_of(silent)), batch, canaries, is_present)
  step, rows = step_of(private), np.arange(private.padded_batch_size)

  def play(key, canary, noise):
    del noise
    padding = ~canary & (rows >= len(rows) - canaries)
    _, seen = step(key, batch, padding, is_present)
    score = optax.tree.vdot(seen.mean, moved.mean)
    # The logarithm of the likelihood ratio, but for a constant.
    return score / stddevs[0] ** 2 + seen.vote * moved.vote / stddevs[1] ** 2

  (bounds,) = harness.attacked(play, draws)
  return bounds
