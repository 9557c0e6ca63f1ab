"""Transformations of tangent coordinates, and chains of them that fuse.

Every transformation of this package carries its stacked form, a function of
stacked arrays. So a chain finds the pairs once, computes the frames once, and
hands r x r matrices on after the noise, not dense coordinates.
"""

import weakref
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

import jax
import optax

from prism_optax import _validate
from prism_optax._clipped_sum import ClippedSum, afresh, settled
from prism_optax._modules import LayoutLike, Stacks, StepContext
from prism_optax._types import ArrayTree
from prism_optax.transforms import _declared

Kind = Literal['clip', 'noise', 'direction', 'retraction']
Sensitivity = Callable[..., ArrayTree]


class Stacked(NamedTuple):
  """A transformation of stacked coordinates.

  Attributes:
    name: Name of the transformation, for error messages.
    init: ``init(step) -> state``.
    update: ``update(stacks, state, step, **extra_args) -> (stacks, state)``.
      A clip gets the tree of per-example gradients in place of stacks, and
      returns a sum that is not taken yet; a retraction returns a tree of
      updates.
    kinds: What it does, in order; one entry unless it is a chain.
  """

  name: str
  init: Callable[[StepContext], ArrayTree]
  update: Callable[..., tuple[ArrayTree, ArrayTree]]
  kinds: tuple[Kind, ...] = ('direction',)


def _run(
  part: Stacked,
  updates: ArrayTree,
  state: optax.OptState,
  step: StepContext,
  **extra_args: object,
) -> tuple[ArrayTree, ArrayTree]:
  """``part.update``; the sum of a clip stays one for noise alone."""
  if isinstance(updates, ClippedSum) and part.kinds[0] != 'noise':
    updates = updates.to_floats()
  return part.update(updates, state, step, **extra_args)


class _Origin(NamedTuple):
  """What a tree was made of, and the tree itself, weakly."""

  leaves: tuple[weakref.ref[jax.Array], ...]
  stacks: ArrayTree
  step: StepContext


# An attribute of arrays, which take none: by the id of an array of a tree that
# was returned, what the tree was made of. `optax.chain` hands the tree on, and
# whoever of us gets these very arrays goes on with the stacks or the exact sum.
# It is safe because an entry holds its array weakly and goes when the array
# dies, before another can have its id; because all arrays are compared by
# identity, and arrays do not change; and because threads and chains that run at
# once have arrays of their own, and one operation reads or writes a dict.
_origins: dict[int, _Origin] = {}


def _remember(tree: ArrayTree, stacks: ArrayTree, step: StepContext) -> None:
  leaves: list[ArrayTree] = jax.tree.leaves(tree)
  # An array that the entry holds would never die. If it holds all of them, the
  # tree is as good as the stacks. A sum that is not taken yet holds none.
  exact = isinstance(stacks, ClippedSum)
  held = set() if exact else set(map(id, jax.tree.leaves(stacks)))
  key = next((id(x) for x in leaves if id(x) not in held), None)
  if key is not None:
    forget = lambda _: _origins.pop(key, None)  # noqa: E731
    references = tuple(
      weakref.ref(x, forget if id(x) == key else None) for x in leaves
    )
    _origins[key] = _Origin(references, afresh(stacks), step)


def _origin_of(
  tree: ArrayTree, params: ArrayTree, layout: LayoutLike
) -> _Origin | None:
  """What the tree was made of, if it was here and at these parameters."""
  leaves: list[ArrayTree] = jax.tree.leaves(tree)
  for x in leaves:
    if found := _origins.get(id(x)):
      same = [*map(id, leaves)] == [id(y()) for y in found.leaves]
      return found if same and found.step.is_at(params, layout) else None
  return None


def are_coordinates(tree: ArrayTree) -> bool:
  """Whether a tree came out of us as coordinates, which are no updates."""
  return any(
    id(x) in _origins and any(x is y() for y in _origins[id(x)].leaves)
    for x in jax.tree.leaves(tree)
  )


class TangentTransformation(optax.GradientTransformationExtraArgs):
  """A transformation of tangent coordinates, with its stacked form.

  It unpacks into ``init`` and ``update`` like any of optax's, so
  ``optax.chain`` takes it; :func:`prism_optax.chain` fuses it with others.

  Attributes:
    stacked: The stacked form.
    layout: See :func:`prism_optax.lora.describe_pairs`.
    sensitivity: ``sensitivity(neighboring_relation=ADD_OR_REMOVE_ONE)``, the
      largest Euclidean distance between what comes out of a clip for
      neighbouring batches. Only clips and chains after one have it.
  """

  stacked: Stacked
  layout: LayoutLike
  sensitivity: Sensitivity

  def __new__(
    cls,
    stacked: Stacked,
    layout: LayoutLike = None,
    sensitivity: Sensitivity | None = None,
  ):
    takes_gradients = stacked.kinds[0] == 'clip'
    returns_updates = stacked.kinds[-1] == 'retraction'

    def init(params):
      step = StepContext(params, layout)
      step.tree.check_observable(params)
      return stacked.init(step)

    def update(updates, state, params=None, **extra_args):
      _validate.params_given(stacked.name, params)
      origin = None
      if not takes_gradients:
        origin = _origin_of(updates, params, layout)
      step = origin.step if origin else StepContext(params, layout)
      if origin:
        updates = afresh(origin.stacks)
      elif not takes_gradients:
        updates = step.tree.coordinates(updates)
      out, state = _run(stacked, updates, state, step, **extra_args)
      if not returns_updates:
        tree = step.to_tree(out)
        _remember(tree, out, step)
        out = tree
      return out, settled(state)

    self = super().__new__(cls, init, update)
    self.stacked, self.layout = stacked, layout
    if sensitivity is not None:
      self.sensitivity = sensitivity
    return self


def no_state(step: StepContext) -> optax.EmptyState:
  del step
  return optax.EmptyState()


def tangent_transformation(
  name: str,
  update: Callable[..., tuple[Stacks, ArrayTree]],
  init: Callable[[StepContext], ArrayTree] = no_state,
  *,
  adds_noise: bool = False,
  layout: LayoutLike = None,
) -> TangentTransformation:
  """A transformation of your own that fuses in :func:`prism_optax.chain`.

  ``update(stacks, state, step)`` gets ``stacks.pairs``, one tangent vector for
  each group of modules of the same shapes, stacked along axis 0: coordinates
  ``left`` (k, m, r) and ``right`` (k, n, r), as arrays or as a sum that is not
  multiplied out. ``fixed_rank.multiply_out`` makes arrays of either kind, and
  either kind may be returned. ``stacks.others`` holds the leaves that are no
  factors. ``step.params`` and ``step.frames`` (one for each group, as
  ``fixed_rank.frame`` makes it) say where the update happens.

  Coordinates turn with the frames, so coordinates that you store must be
  carried along (``fixed_rank.transport``), and a function of them should
  commute with orthogonal r x r matrices on the right, or the result depends on
  the gauge.

  **Privacy.** After the noise a transformation is post-processing. With
  ``adds_noise=True`` it takes the place of the noise, and must itself add the
  accounted noise to every entry.

  Args:
    name: For error messages.
    update: As above, plus ``**extra_args`` if it takes them; it returns new
      stacks and the new state.
    init: From the step context at the start to the state; none by default.
    adds_noise: Whether this is the noise of the mechanism.
    layout: See :func:`prism_optax.lora.describe_pairs`.

  Returns:
    The transformation.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import fixed_rank, transforms
    >>> def flip(stacks, state, step):
    ...   def negated(x):
    ...     x = fixed_rank.multiply_out(x)
    ...     return fixed_rank.Tangent(-x.left, -x.right)
    ...   return stacks.map_pairs(negated), state
    >>> tx = transforms.tangent_transformation('flip', flip)
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.ones((1, 2))}
    >>> updates, _ = tx.update(params, tx.init(params), params)
    >>> updates['lora_b'].tolist()
    [[-1.0, -1.0]]
  """

  def without_more(stacks, state, step, **extra_args):
    del extra_args
    if not adds_noise:
      return update(stacks, state, step)
    noisy, state = update(_declared.noise_enters(stacks), state, step)
    return _declared.released(noisy), state

  kind: Kind = 'noise' if adds_noise else 'direction'
  return TangentTransformation(
    Stacked(name, init, without_more, (kind,)), layout
  )


def _dense(tx: optax.GradientTransformation, position: int) -> Stacked:
  """A transformation of optax, on dense coordinates."""
  tx = optax.with_extra_args_support(tx)

  def init(step):
    return tx.init(step.params)

  def update(stacks, state, step, **extra_args):
    tree = step.to_tree(stacks)
    tree, state = tx.update(tree, state, step.params, **extra_args)
    return step.tree.coordinates(tree), state

  return Stacked(f'transformation {position} of the chain', init, update)


def _check_order(
  parts: list[Stacked], noise_elsewhere: bool, retract_elsewhere: bool
) -> None:
  """Refuses chains that void the guarantee or leave the manifold."""
  kinds = [(kind, part.name) for part in parts for kind in part.kinds]
  before: tuple[str, ...] = ()
  for i, (kind, name) in enumerate(kinds):
    if kind == 'clip' and i:
      raise ValueError(
        f'{name} must come first, got {kinds[i - 1][1]} before it: what mixes'
        ' or scales the gradients of several examples before they are clipped'
        ' lets one of them move the sum by any amount.'
      )
    if kind == 'noise' and set(before) - {'clip', 'noise'}:
      raise ValueError(
        f'{name} must come directly after the clip, got {kinds[i - 1][1]}'
        ' between them: what it does to the sum changes how far one example'
        ' moves it, and the noise was made for the clip.'
      )
    if 'retraction' in before:
      raise ValueError(
        f'The retraction must come last, got {name} after it: what it returns'
        ' are no coordinates, and changing them leaves the manifold.'
      )
    before += (kind,)
  if kinds[0][0] == 'clip' and 'noise' not in before and not noise_elsewhere:
    raise ValueError(
      f'No noise after {kinds[0][1]}: what comes out of the chain would not be'
      ' private. Put tangent_privatizer(...) directly after it (it takes other'
      " libraries' privatizers, too), or say noise_elsewhere=True if the noise"
      ' is added outside of this chain.'
    )
  retracts = before[-1] == 'retraction' or retract_elsewhere
  if 'noise' in before and not retracts:
    raise ValueError(
      f'What comes out of {kinds[-1][1]} are tangent coordinates, not updates'
      ' of factors: end with retract(), or say retract_elsewhere=True if a'
      ' chain around this one does.'
    )


def _one_layout(
  transformations: Iterable[object], layout: LayoutLike
) -> LayoutLike:
  """The layout of a chain and its transformations, which must agree."""
  for tx in transformations:
    own = getattr(tx, 'layout', None)
    if own is not None and layout is not None and own != layout:
      raise ValueError(
        f'Expected one layout for the whole chain, got {layout!r} and {own!r}.'
      )
    layout = own if layout is None else layout
  return layout


def chain(
  *transformations: optax.GradientTransformation,
  layout: LayoutLike = None,
  noise_elsewhere: bool = False,
  retract_elsewhere: bool = False,
) -> TangentTransformation:
  """Chains transformations of tangent coordinates into one that is fused.

  It gives the same numbers as ``optax.chain`` of the same transformations, and
  is faster, because it finds pairs and computes frames once, and hands on r x r
  matrices after the noise. Transformations of other packages (``optax.ema``)
  get dense coordinates in the shapes of ``params``.

  **Privacy.** A chain that starts with :func:`intrinsic_clip`, directly
  followed by :func:`tangent_privatizer`, is a Gaussian mechanism followed by
  post-processing; ``.sensitivity`` of the clip is the sensitivity of the chain.
  It refuses orders in which this would not hold: anything before the clip
  (``optax.clip_by_global_norm``, ``optax.MultiSteps``, a mask), anything
  between the clip and the noise, a clip without noise. It cannot check that the
  standard deviation of the noise fits the clip, nor what happens outside of the
  chain.

  A chain with noise in it must end with :func:`retract`, because tangent
  coordinates are not updates of factors: added to ``params`` they would lead
  elsewhere. ``optax.chain`` checks none of this. What it makes
  :func:`prism_optax.training.make_private` refuses if its last transformation
  is one of this package and returns coordinates; after one of optax they
  cannot be told from updates.

  Args:
    *transformations: At least one, in the order in which updates pass them.
    layout: Layout of the parameters, see
      :func:`prism_optax.lora.describe_pairs`. If one of the transformations
      has a layout of its own, it must be the same.
    noise_elsewhere: Allow a clip without noise in this chain, because the
      receiver of its updates adds the noise.
    retract_elsewhere: Allow noise without a retraction in this chain, because
      the receiver of its updates ends with :func:`retract`.

  Returns:
    A transformation whose state is the tuple of its parts' states, as
    with ``optax.chain``; it can be chained again.

  Raises:
    ValueError: If there is no transformation, for an order that is refused, or
      for layouts that differ; in ``init``, if no pair is found or both factors
      of a module are zero; in ``update``, without ``params``.

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> tx = prism_optax.chain(
    ...   prism_optax.intrinsic_clip(1.0, normalize_by=8.0),
    ...   prism_optax.tangent_privatizer(0.1),
    ...   prism_optax.scale_by_learning_rate(0.5),
    ...   prism_optax.retract())
    >>> tx.sensitivity()
    0.125
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.eye(1, 2)}
    >>> grads = {'lora_a': jnp.ones((4, 3, 1)), 'lora_b': jnp.ones((4, 1, 2))}
    >>> updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    >>> updates['lora_b'].shape, len(state)
    ((1, 2), 4)
  """
  if not transformations:
    raise ValueError('Expected at least one transformation, got none.')
  parts = []
  for i, tx in enumerate(transformations):
    if isinstance(tx, TangentTransformation):
      parts.append(tx.stacked)
      continue
    if hasattr(tx, 'sensitivity'):
      raise ValueError(
        f'Transformation {i} clips gradients as they are and returns no tangent'
        ' coordinates: chain it by optax.chain, with transformations of dense'
        ' gradients after it.'
      )
    parts.append(_dense(tx, i))
  _check_order(parts, noise_elsewhere, retract_elsewhere)
  layout = _one_layout(transformations, layout)

  def init(step):
    return tuple(part.init(step) for part in parts)

  def update(updates, state, step, **extra_args):
    if len(state) != len(parts):
      raise ValueError(
        f'Expected a state of {len(parts)} parts, got {len(state)}: it belongs'
        ' to another chain.'
      )
    states = []
    for part, old in zip(parts, state, strict=True):
      updates, new = _run(part, updates, old, step, **extra_args)
      states.append(new)
    return updates, tuple(states)

  kinds = tuple(kind for part in parts for kind in part.kinds)
  name = parts[0].name if len(parts) == 1 else f'chain({parts[0].name}, ...)'
  return TangentTransformation(
    Stacked(name, init, update, kinds),
    layout,
    getattr(transformations[0], 'sensitivity', None),
  )
