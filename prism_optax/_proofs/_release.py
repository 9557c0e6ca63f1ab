"""That nothing of a record leaves a step but through the noise.

Every value of the program of a whole step gets a label (``_kinds``), and the
records are followed through its equations (``_walk``). Two marks of this
package change a label: a clip makes its sum clipped, and noise makes it public
(``_marks``).
"""

import re
from collections.abc import Callable, Sequence

import jax
from jax.extend import core
from jax.interpreters import partial_eval

from prism_optax._proofs._equations import names_of
from prism_optax._proofs._kinds import (
  DRAWN,
  LOCAL,
  PRIVATE,
  PUBLIC,
  Kind,
  Label,
  OffenceError,
  of_output,
)
from prism_optax._proofs._proof import Proof
from prism_optax._proofs._walk import FoundRelease, Walk
from prism_optax._types import ArrayTree

CLAIM = (
  'what leaves depends on a record only through noise on a clipped sum, and no'
  ' control flow depends on one'
)


def look(
  jaxpr: core.ClosedJaxpr, labels: Sequence[Label], names: Sequence[str]
) -> Walk:
  """Follows the records through a program.

  Args:
    jaxpr: The program.
    labels: Of its inputs.
    names: Of its outputs. Those in which a part begins with ``nonprivate_``
      may be private.

  Returns:
    What was seen.
  """
  walk = Walk()
  used, _ = partial_eval.dce_jaxpr(
    jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True
  )
  try:
    for name, label in zip(names, walk.program(used, labels), strict=True):
      if label.kind is Kind.PUBLIC:
        continue
      if not re.search(rf"(\['|\.){LOCAL}", name):
        raise OffenceError(of_output(label, name))
      walk.assume(f'output{name} stays with those who may see the data')
  except OffenceError as error:
    walk.offence = str(error)
  return walk


def proof(found: Walk) -> Proof:
  """What was seen, as a proof."""
  most = found.primitives.most_common(8)
  counted = ', '.join(f'{n} {name}' for name, n in most)
  trace = [f'{found.primitives.total()} equations: {counted}, ...']
  trace += map(_described, found.releases)
  assumptions = [
    'arguments that are not named, and what the program closes over, do not'
    ' depend on records',
    'each noise has a secret key of its own',
    *found.assumptions,
  ]
  return Proof(CLAIM, found.offence, tuple(trace), tuple(assumptions))


def _described(release: FoundRelease) -> str:
  """A release in words."""
  known = sorted({x for x in release.what.stddevs if x is not None})
  size = 'noise of unknown size'
  if None not in release.what.stddevs:
    size = f'noise of standard deviation {", ".join(f"{x:.6g}" for x in known)}'
  often = ', in a loop' if release.repeated else ''
  count = len(set(release.leaves))
  return f'a release at {release.place}: {size} on {count} arrays{often}'


def prove_released(
  step: Callable[..., ArrayTree],
  *args: ArrayTree,
  private: int | Sequence[int],
  padding: int | Sequence[int] = (),
) -> Proof:
  """Proves that a step lets nothing of a record out but through the noise.

  The step's program is read, not run. Every value that depends on a record is
  private. Only noise that is added to the sum of a clip makes a value public.
  The proof knows the noise and clips of this package; declare those of other
  packages (:func:`prism_optax.transforms.clipped_elsewhere`,
  :func:`prism_optax.transforms.noised_elsewhere`). The results of the step must
  be public, and so must the values that choose a branch or the number of rounds
  of a loop. See the page "Nothing bypasses the noise".

  **Privacy.** If the proof holds, the results of the step depend on records
  only through the listed releases. The proof does not compare their size with
  your accounting (``training.make_private`` does), nor does it prove that each
  gradient depends on one record alone (:func:`prove_independent` does), that
  the ``is_padding_example`` of a clip is ``padding`` (it proves that the clip
  gets one), that keys are fresh, or how long the step takes.

  =================================  ==========================================
  a loss returned beside the update  refused, unless its name begins with
                                     ``nonprivate_``: a key of a dict
  ``debug.print`` of a record        refused, as are all callbacks
  division by the size of the batch  refused: the expected size is public
  ``lax.cond`` on a record           refused, under ``vmap`` it is a choice
  ``lax.cond`` on ``padding``        accepted, and named as an assumption
  a clip without is_padding_example  refused: rows of padding count as records
  noise of stddev 0                  refused
  an operation that is not known     private, if a record goes in
  =================================  ==========================================

  Args:
    step: The whole step, with or without ``jit``.
    *args: Its arguments, arrays or shapes (``jax.ShapeDtypeStruct``), in any
      tree.
    private: Positions of the arguments that hold records.
    padding: Positions of the arguments that only show who was drawn, such as
      ``is_padding_example``.

  Returns:
    The proof. It is true if the claim holds; else ``offence`` is the
    first equation against it. ``assumptions`` lists what else the proof rests
    on. ``print`` shows all of it.

  Raises:
    ValueError: If a position belongs to no argument, or none is private.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import prism_optax
    >>> from prism_optax import diagnostics
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
    >>> loss = lambda p, x: jnp.sum((x @ p['lora_a'] @ p['lora_b'] - 1.0) ** 2)
    >>> tx = prism_optax.prism(
    ...   0.1, l2_clip_norm=1.0, noise_multiplier=0.5, expected_batch_size=8)
    >>> def step(params, state, batch):
    ...   grads = jax.vmap(jax.grad(loss), (None, 0))(params, batch)
    ...   updates, state = tx.update(grads, state, params)
    ...   return optax.apply_updates(params, updates), state
    >>> args = params, tx.init(params), jnp.ones((8, 3))
    >>> bool(diagnostics.prove_released(step, *args, private=2))
    True
    >>> def with_loss(params, state, batch):
    ...   losses = jax.vmap(loss, (None, 0))(params, batch)
    ...   return *step(params, state, batch), jnp.mean(losses)
    >>> proof = diagnostics.prove_released(with_loss, *args, private=2)
    >>> bool(proof), proof.offence.split(' at ')[0]
    (False, '`div`')
  """
  positions = {}
  for name, given, label in (
    ('private', private, PRIVATE),
    ('padding', padding, DRAWN),
  ):
    for i in (given,) if isinstance(given, int) else given:
      if isinstance(i, bool) or not 0 <= i < len(args) or i in positions:
        raise ValueError(
          f'Expected {name} to be positions of the {len(args)} arguments, each'
          f' named once, got {name}={given!r}.'
        )
      positions[i] = label
  if PRIVATE not in positions.values():
    raise ValueError(
      'Expected the position of an argument that holds records, got'
      f' {private=}.'
    )
  labels = [
    positions.get(i, PUBLIC)
    for i, arg in enumerate(args)
    for _ in jax.tree.leaves(arg)
  ]
  jaxpr, out = jax.make_jaxpr(step, return_shape=True)(*args)
  found = look(jaxpr, labels, names_of(out))
  _, used = partial_eval.dce_jaxpr(
    jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars)
  )
  unaware = [
    f'the clip at {clip.place} does not get'
    for clip in found.clips
    if not (clip.what.declared or clip.what.with_padding)
  ]
  if DRAWN in [
    x for x, is_used in zip(labels, used, strict=True) if not is_used
  ]:
    unaware.append('the step does not use')
  if DRAWN in labels and unaware and found.offence is None:
    # Which row fills a batch up is the caller's choice: often the first one,
    # many times, each with a clipped gradient of its own.
    found.offence = (
      f'{unaware[0]} `padding`, so rows of padding count as records: give it to'
      ' the clip as is_padding_example'
    )
  return proof(found)
