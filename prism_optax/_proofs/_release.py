"""That nothing of a record leaves a step but through the noise.

Every value of the program of a whole step gets a label:

=========  ===================================================================
public     no record has touched it, or noise was added to what did
clipped    a clip's sum, moved, added up or multiplied by what is public
entering   between a clipped sum and the end of its noise
drawn      depends on who was drawn, and on nothing that a record holds
private    anything else that a record has touched
=========  ===================================================================

An operation on private values gives a private value, whatever it is: zero
times a record counts as the record. Two marks of this package change a label:
a clip makes its sum clipped, and noise makes it public. So nothing has to be
known of the operations of a model, and what is not known is private.
"""

import collections
import dataclasses
import enum
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import source_info_util
from jax.extend import core
from jax.interpreters import partial_eval

from prism_optax._proofs import _equations, _marks
from prism_optax._proofs._proof import Proof

CLAIM = (
  'what leaves depends on a record only through noise on a clipped sum, and no'
  ' control flow depends on one'
)
# Whoever may see the data may see an output of such a name.
LOCAL = 'nonprivate_'


class Kind(enum.IntEnum):
  """The labels above, public below all others and private above them."""

  PUBLIC = 0
  CLIPPED = 1
  ENTERING = 2
  DRAWN = 3
  PRIVATE = 4


@dataclasses.dataclass(frozen=True)
class Label:
  """What is known of one value.

  Attributes:
    kind: The label.
    direct: For the very output of a clip, untouched: the number of the clip and
      the position of the output.
    made: Where the equation is that made the value.
    lost: Where a clipped sum became private.
  """

  kind: Kind
  direct: tuple[int, int] | None = None
  made: 'Site | None' = dataclasses.field(default=None, compare=False)
  lost: 'Site | None' = dataclasses.field(default=None, compare=False)


PUBLIC = Label(Kind.PUBLIC)
DRAWN = Label(Kind.DRAWN)
PRIVATE = Label(Kind.PRIVATE)


class FoundClip(NamedTuple):
  """A clip in the program.

  Attributes:
    what: What is known of it.
    leaves: For each output of the mark the leaf that it belongs to.
    place: Its line.
  """

  what: _marks.Clip
  leaves: tuple[int, ...]
  place: str


class FoundRelease(NamedTuple):
  """Noise that is added to something of the records.

  Attributes:
    what: What is known of it.
    leaves: For each entry the leaf that it belongs to.
    labels: What enters.
    place: Its line.
    repeated: Whether it is in a loop.
  """

  what: _marks.Noise
  leaves: tuple[int, ...]
  labels: tuple[Label, ...]
  place: str
  repeated: bool


class Found(NamedTuple):
  """What was seen in a program.

  Attributes:
    offence: None, or the first one.
    clips: All clips.
    releases: All noise that something of the records enters.
    assumptions: What the analysis rests on.
    primitives: How many equations there are of each primitive.
  """

  offence: str | None
  clips: list[FoundClip]
  releases: list[FoundRelease]
  assumptions: list[str]
  primitives: collections.Counter[str]


# Operations that keep a sum a sum: by the positions of operands that may be
# clipped; all others must be public. None is any position.
_STRUCTURAL = frozenset({
  'add', 'add_any', 'all_gather', 'broadcast_in_dim', 'concatenate', 'copy',
  'copy_p', 'cumsum', 'expand_dims', 'imag', 'mesh_cast', 'neg', 'pad',
  'psum', 'psum_invariant', 'pvary', 'real', 'reduce_precision', 'reduce_sum',
  'reshape', 'reshard', 'rev', 'sharding_constraint', 'slice', 'split',
  'squeeze', 'stop_gradient', 'sub', 'transpose',
})  # fmt: skip
_POSITIONS = {
  'div': (0,),
  'dynamic_slice': (0,),
  'dynamic_update_slice': (0, 1),
  'gather': (0,),
  'scatter': (0, 2),
  'scatter-add': (0, 2),
}
_BILINEAR = frozenset({'conv_general_dilated', 'dot_general', 'mul'})
# Many arrays at once, each on its own.
_ONE_TO_ONE = frozenset({'device_put', 'optimization_barrier'})

_CALLS = {**_equations.CALLS, 'shard_map': 'jaxpr'}
# Kernels: what is inside is no program of the host.
_OPAQUE = frozenset({'pallas_call'})
_CALLBACKS = frozenset(
  {'debug_callback', 'debug_print', 'io_callback', 'pure_callback'}
)

_INSTEAD_OF = {
  'div': 'divide by the expected batch size, a public constant, in the clip',
  'select_n': (
    'choose by public values alone, or bound each record inside of the clip'
  ),
}


class _Offence(Exception):
  """The first offence, as a sentence."""


class Site(NamedTuple):
  """Where an equation is.

  Attributes:
    equation: The equation.
    outer: Where the equation is that calls the program that it is in, or None.
    of_jax: Whether that program is a function of JAX itself. It is traced once
      and for all, so its lines are those of whoever called it first.
  """

  equation: Any
  outer: 'Site | None'
  of_jax: bool


_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_MARKS = os.path.basename(_marks.__file__)
_JAX = os.path.dirname(jax.__file__)
_UNKNOWN = 'an unknown line'


def _is_of_jax(jaxpr: Any) -> bool:
  """Whether a program was made of a function of JAX, such as `jnp.where`."""
  info = getattr(jaxpr, 'debug_info', None)
  return _JAX in str(getattr(info, 'func_src_info', ''))


def _frames(equation: Any) -> list[tuple[str, str]]:
  """File and ``file:line`` of the frames, without those of JAX."""
  return [
    (x.file_name, f'{os.path.basename(x.file_name)}:{x.start_line}')
    for x in source_info_util.user_frames(equation.source_info.traceback)
  ]


def _line_of_caller(site: Site) -> str | None:
  """The innermost line that is not in this package or an installed one."""
  for name, line in _frames(site.equation):
    if not name.startswith(_PACKAGE) and 'site-packages' not in name:
      return line
  return None if site.outer is None else _line_of_caller(site.outer)


def _outside_of_jax(site: Site) -> Site:
  while site.of_jax and site.outer is not None:
    site = site.outer
  return site


def _place(site: Site) -> str:
  """Where the caller has a clip, noise, or a loop."""
  site = _outside_of_jax(site)
  line = _line_of_caller(site)
  if line is not None:
    return line
  # Only lines of this package: the one that binds a mark says nothing.
  own = [x for name, x in _frames(site.equation) if _MARKS not in name]
  return own[0] if own else _UNKNOWN


def named(site: Site) -> str:
  """The primitive and its line, and the caller's line if that is another."""
  name = site.equation.primitive.name
  site = _outside_of_jax(site)
  line = _equations.line_of(site.equation) or _UNKNOWN
  caller = _line_of_caller(site)
  called = ''
  if caller is not None and caller != line.partition(' ')[0]:
    called = f', called at {caller}'
  return f'`{name}` at {line}{called}'


def _join(*labels: Label) -> Label:
  """The label of a value that may be any of these."""
  top = max(labels, key=lambda x: x.kind)
  kinds = {x.kind for x in labels} - {Kind.PUBLIC}
  if len(kinds) <= 1:
    same = all(x.direct == top.direct for x in labels)
    return top if same else dataclasses.replace(top, direct=None)
  lost = next((x.lost for x in labels if x.lost is not None), None)
  made = next((x.made for x in labels if x.made is not None), None)
  return Label(Kind.PRIVATE, None, made, lost)


def _moved(label: Label) -> Label:
  """The label of a part, or of several of these values."""
  return dataclasses.replace(label, direct=None)


def _may_be_clipped(equation: Any, labels: Sequence[Label]) -> bool:
  """Whether an operation of clipped and public values keeps a sum a sum."""
  name = equation.primitive.name
  clipped = [i for i, x in enumerate(labels) if x.kind is Kind.CLIPPED]
  if name in _STRUCTURAL:
    return True
  if name == 'convert_element_type':
    return all(
      jax.numpy.issubdtype(x.aval.dtype, jax.numpy.inexact)
      for x in (*equation.invars, *equation.outvars)
    )
  if name in _BILINEAR:
    return len(clipped) == 1
  if name == 'select_n':
    return 0 not in clipped
  return set(clipped) <= set(_POSITIONS.get(name, ()))


def _result(site: Site, labels: Sequence[Label]) -> Label:
  """The label of what an operation makes of its operands."""
  kinds = {x.kind for x in labels} - {Kind.PUBLIC}
  if not kinds:
    return PUBLIC
  if kinds == {Kind.CLIPPED} and _may_be_clipped(site.equation, labels):
    return Label(Kind.CLIPPED, None, site)
  for kind in (Kind.ENTERING, Kind.DRAWN):
    if kinds == {kind}:
      return Label(kind, None, site)
  lost = next((x.lost for x in labels if x.lost is not None), None)
  if Kind.CLIPPED in kinds and lost is None:
    lost = site
  return Label(Kind.PRIVATE, None, site, lost)


def _inside(value: Any) -> Iterator[Any]:
  """The jaxprs in a parameter of an equation."""
  if isinstance(value, core.Jaxpr | core.ClosedJaxpr):
    yield value
  elif isinstance(value, tuple | list):
    for x in value:
      yield from _inside(x)


def _has_effect(equation: Any) -> bool:
  """Whether an equation does anything but compute its outputs."""
  kinds = {type(x).__name__ for x in equation.effects}
  # The name of an axis that is mapped over is an effect, too.
  return bool(kinds - {'NamedAxisEffect'}) or (
    equation.primitive.name in _CALLBACKS
  )


class _Walk:
  """One walk through a program, which writes down what it meets.

  Args:
    noiseless: Whether noise of standard deviation zero may pass, in tests.
  """

  def __init__(self, noiseless: bool) -> None:
    self._noiseless = noiseless
    self._loops = 0
    self._site: Site | None = None
    self._context = PUBLIC  # What the branch that is run depends on.
    self.clips: list[FoundClip] = []
    self.releases: list[FoundRelease] = []
    self.assumptions: dict[str, None] = {}
    self.primitives: collections.Counter[str] = collections.Counter()

  # Programs and equations.

  def program(self, jaxpr: Any, labels: Sequence[Label]) -> list[Label]:
    """The labels of the outputs of a jaxpr."""
    jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)  # Constants of a closed one: public.
    known: dict[Any, Label] = dict.fromkeys(jaxpr.constvars, PUBLIC)
    known.update(zip(jaxpr.invars, labels, strict=True))

    def read(x: Any) -> Label:
      return PUBLIC if isinstance(x, core.Literal) else known[x]

    outer = self._site
    of_jax = outer is not None and (outer.of_jax or _is_of_jax(jaxpr))
    for equation in jaxpr.eqns:
      self._site = Site(equation, outer, of_jax)
      made = self._equation(self._site, [read(x) for x in equation.invars])
      known.update(zip(equation.outvars, made, strict=True))
    self._site = outer
    return [read(x) for x in jaxpr.outvars]

  def _equation(self, site: Site, labels: list[Label]) -> list[Label]:
    equation = site.equation
    name, count = equation.primitive.name, len(equation.outvars)
    self.primitives[name] += 1
    touched = any(x.kind is not Kind.PUBLIC for x in labels)
    if equation.primitive is _marks.clipped_p:
      return self._clip(site) if touched else labels
    if equation.primitive is _marks.noise_enters_p:
      return self._enters(site, labels) if touched else labels
    if equation.primitive is _marks.released_p:
      return self._released(labels)
    if not touched and self._context is PUBLIC:
      return [PUBLIC] * count
    if name in _CALLS:
      return self.program(equation.params[_CALLS[name]], labels)
    if name == 'cond':
      return self._cond(site, labels)
    if name == 'while':
      return self._while(site, labels)
    if name == 'scan':
      return self._scan(equation, labels)
    if _has_effect(equation):
      self._effect(site, _join(*labels, self._context))
    if name in _ONE_TO_ONE and count == len(labels):
      return labels
    out = _result(site, labels)
    if name not in _OPAQUE:
      for jaxpr in _inside(tuple(equation.params.values())):
        # No value of it is known, but what it does is as above.
        inner = getattr(jaxpr, 'jaxpr', jaxpr)
        self.program(jaxpr, [_moved(out)] * len(inner.invars))
    return [out] * count

  # Marks.

  def _clip(self, site: Site) -> list[Label]:
    params = site.equation.params
    what, leaves, place = params['what'], params['leaves'], _place(site)
    number = len(self.clips)
    self.clips.append(FoundClip(what, leaves, place))
    if what.declared:
      self._assume(f'{place}: what is declared as clipped elsewhere is clipped')
    return [Label(Kind.CLIPPED, (number, i), site) for i in range(len(leaves))]

  def _enters(self, site: Site, labels: list[Label]) -> list[Label]:
    params, place = site.equation.params, _place(site)
    what = params['what']
    for label in labels:
      if label.kind in (Kind.DRAWN, Kind.PRIVATE):
        raise _Offence(_of_noise(label))
    if 0.0 in what.stddevs and not self._noiseless:
      raise _Offence(
        f'noise of standard deviation 0 at {place}: it hides nothing. Give a'
        ' positive one'
      )
    self.releases.append(
      FoundRelease(
        what, params['leaves'], tuple(labels), place, self._loops > 0
      )
    )
    if what.declared:
      self._assume(
        f'{place}: noise that is not of this package is added as you account'
        ' for it'
      )
    return [
      x if x.kind is Kind.PUBLIC else Label(Kind.ENTERING, None, site)
      for x in labels
    ]

  def _released(self, labels: list[Label]) -> list[Label]:
    for label in labels:
      if label.kind not in (Kind.PUBLIC, Kind.ENTERING):
        raise _Offence(
          f'{by(label)}: the size or the key of noise depends on records. Use'
          ' public constants'
        )
    return [PUBLIC] * len(labels)

  # Control flow.

  def _cond(self, site: Site, labels: list[Label]) -> list[Label]:
    which, *operands = labels
    self._decides(site, which, 'which branch is run')
    before, self._context = self._context, _join(self._context, _moved(which))
    branches = [
      self.program(branch, operands)
      for branch in site.equation.params['branches']
    ]
    self._context = before
    by_choice = Label(which.kind, None, site, which.lost)
    return [
      _join(*outs) if which.kind is Kind.PUBLIC else _join(*outs, by_choice)
      for outs in zip(*branches, strict=True)
    ]

  def _while(self, site: Site, labels: list[Label]) -> list[Label]:
    params = site.equation.params
    ends = params['cond_nconsts'], params['body_nconsts']
    of_cond, of_body = labels[: ends[0]], labels[ends[0] : sum(ends)]

    def once(carry: list[Label]) -> tuple[list[Label], list[Label]]:
      (goes_on,) = self.program(params['cond_jaxpr'], of_cond + carry)
      self._decides(site, goes_on, 'how often a loop runs')
      before = self._context
      self._context = _join(before, _moved(goes_on))
      out = self.program(params['body_jaxpr'], of_body + carry)
      self._context = before
      if goes_on.kind is not Kind.PUBLIC:
        out = [_join(x, _moved(goes_on)) for x in out]
      return out, []

    carry, _ = self._fixed_point(once, labels[sum(ends) :])
    return carry

  def _scan(self, equation: Any, labels: list[Label]) -> list[Label]:
    consts = equation.params['num_consts']
    end = consts + equation.params['num_carry']
    items = list(map(_moved, labels[end:]))

    def once(carry: list[Label]) -> tuple[list[Label], list[Label]]:
      out = self.program(
        equation.params['jaxpr'], labels[:consts] + carry + items
      )
      return out[: end - consts], out[end - consts :]

    carry, stacked = self._fixed_point(once, labels[consts:end])
    return carry + list(map(_moved, stacked))

  def _fixed_point(
    self,
    once: Callable[[list[Label]], tuple[list[Label], list[Label]]],
    carry: list[Label],
  ) -> tuple[list[Label], list[Label]]:
    """The labels of a loop's carry that another round does not change."""
    sizes, seen = (len(self.clips), len(self.releases)), self.primitives.copy()
    self._loops += 1
    while True:
      out, others = once(carry)
      after = [_join(x, y) for x, y in zip(carry, out, strict=True)]
      if after == carry:
        self._loops -= 1
        return carry, others
      # Labels only rise, so this ends. Each round is written down anew.
      carry, self.primitives = after, seen.copy()
      del self.clips[sizes[0] :], self.releases[sizes[1] :]

  def _decides(self, site: Site, label: Label, what: str) -> None:
    if label.kind is Kind.PUBLIC:
      return
    if label.kind is Kind.DRAWN:
      self._assume(
        f'{_place(site)}: {what} depends on who was drawn, and nobody'
        ' sees how long a step takes'
      )
      return
    instead = (
      'Compute both and choose by jnp.where, inside of the clip; or loop a'
      ' fixed number of times'
    )
    if label.kind is Kind.CLIPPED or label.lost is not None:
      instead = (
        'It is a clipped sum without noise: add the noise directly behind the'
        ' clip, before anything is decided by it'
      )
    raise _Offence(
      f'{named(site)}: {what} depends on records ({by(label)}), which its time'
      f' tells. {instead}'
    )

  def _effect(self, site: Site, label: Label) -> None:
    if label.kind is not Kind.PUBLIC:
      raise _Offence(
        f'{named(site)}: something of the records leaves the program or is'
        ' kept beside it. Take it out, or return the value under a name that'
        f' begins with {LOCAL}, if those who see it may see the data'
      )

  # What is written down.

  def _assume(self, sentence: str) -> None:
    self.assumptions[sentence] = None


def by(label: Label) -> str:
  """Which equation made a value private."""
  site = label.made if label.lost is None else label.lost
  return 'an argument as it is' if site is None else named(site)


def _of_noise(label: Label) -> str:
  """Why something may not enter noise."""
  if label.lost is None:
    return (
      f'{by(label)}: noise is added to what no clip bounds. Put a clip of this'
      ' package directly before the noise, or, for the sum of a clip of another'
      ' library, transforms.clipped_elsewhere'
    )
  instead = _INSTEAD_OF.get(
    label.lost.equation.primitive.name, 'put the noise directly behind the clip'
  )
  return (
    f'{named(label.lost)}: between the clip and its noise stands what may move'
    f' the sum by any amount when a record changes; {instead}'
  )


def _of_output(label: Label, name: str) -> str:
  """Why something may not leave."""
  where = f'output{name} ' if name else 'the output '
  if label.kind is Kind.CLIPPED:
    return (
      f'{by(label)}: {where}holds a clipped sum without noise. Add the noise'
      ' directly behind the clip, in the same step'
    )
  return (
    f'{by(label)}: {where}depends on records, and no noise is added to it.'
    ' Leave it out, add noise to a clipped sum instead, or, if those who see it'
    f' may see the data, return it in a dict under a name that begins with'
    f' {LOCAL}'
  )


def look(
  jaxpr: core.ClosedJaxpr,
  labels: Sequence[Label],
  names: Sequence[str],
  *,
  noiseless: bool = False,
) -> Found:
  """Follows the records through a program.

  Args:
    jaxpr: The program.
    labels: Of its inputs.
    names: Of its outputs. Those in which a part begins with ``nonprivate_``
      may be private.
    noiseless: Whether noise of standard deviation zero may pass, in tests.

  Returns:
    What was seen.
  """
  used, _ = partial_eval.dce_jaxpr(
    jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True
  )
  walk, offence = _Walk(noiseless), None
  try:
    for name, label in zip(names, walk.program(used, labels), strict=True):
      if label.kind is Kind.PUBLIC:
        continue
      if not re.search(rf"(\['|\.){LOCAL}", name):
        raise _Offence(_of_output(label, name))
      walk.assumptions[
        f'output{name} stays with those who may see the data'
      ] = None
  except _Offence as error:
    offence = str(error)
  return Found(
    offence,
    walk.clips,
    walk.releases,
    list(walk.assumptions),
    walk.primitives,
  )


def proof(found: Found) -> Proof:
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
  step: Callable[..., Any],
  *args: Any,
  private: int | Sequence[int],
  padding: int | Sequence[int] = (),
) -> Proof:
  """Proves that a step lets nothing of a record out but through the noise.

  The step's program is read, not run. Whatever a record has touched is
  private. Only noise that is added to the sum of a clip makes it public: noise
  and clips of this package are known, those of others are declared
  (:func:`prism_optax.transforms.clipped_elsewhere`,
  :func:`prism_optax.transforms.noised_elsewhere`). What the step returns must
  be public, and so must what decides which branch is run or how often a loop
  runs. See the page "No way around the noise".

  **Privacy.** If the proof holds, then what the step returns depends on records
  only through the releases that it lists. Their size is not compared with what
  you account for (``training.make_private`` does so), nor is it proved that
  single gradients are those of single records
  (:func:`prove_independent` does), that keys are fresh, or how
  long the step takes.

  =================================  ==========================================
  a loss returned beside the update  refused, unless its name begins with
                                     ``nonprivate_``: a key of a dict
  ``debug.print`` of a record        refused, as are all callbacks
  division by the size of the batch  refused: the expected size is public
  ``lax.cond`` on a record           refused, under ``vmap`` it is a choice
  ``lax.cond`` on ``padding``        accepted, and named as an assumption
  noise of stddev 0                  refused
  an operation that is not known     private, if a record goes in
  =================================  ==========================================

  Args:
    step: The whole step, with or without ``jit``.
    *args: Its arguments, arrays or shapes (``jax.ShapeDtypeStruct``), in any
      tree.
    private: Positions of the arguments that hold records.
    padding: Positions of the arguments that say who was drawn alone, such as
      ``is_padding_example``.

  Returns:
    The proof. It is true if the claim holds; else ``offence`` is the first
    equation against it. ``assumptions`` are what the proof rests on besides the
    program. ``print`` shows all of it.

  Raises:
    ValueError: If a position is not that of an argument, or none is private.

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
  return proof(look(jaxpr, labels, names_of(out)))


def names_of(tree: Any) -> list[str]:
  """The paths of the leaves of a tree, to name them."""
  return [
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  ]
