"""Follows the records through the program of a step."""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from jax.extend import core

from prism_optax._proofs import _equations, _marks
from prism_optax._proofs._equations import (
  Beside,
  Program,
  Site,
  inside,
  is_of_jax,
  named,
  parted,
  place_of,
)
from prism_optax._proofs._kinds import (
  LOCAL,
  PUBLIC,
  Kind,
  Label,
  OffenceError,
  by,
  join,
  moved,
  of_decision,
  of_noise,
  result,
)


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


# Many arrays at once, each on its own.
_ONE_TO_ONE = frozenset({'device_put', 'optimization_barrier'})

_CALLS = {**_equations.CALLS, 'shard_map': 'jaxpr'}
# Kernels: what is inside is no program of the host.
_OPAQUE = frozenset({'pallas_call'})
_CALLBACKS = frozenset(
  {'debug_callback', 'debug_print', 'io_callback', 'pure_callback'}
)


def _has_effect(equation: core.JaxprEqn) -> bool:
  """Whether an equation does anything but compute its outputs."""
  kinds = {type(x).__name__ for x in equation.effects}
  # The name of an axis that is mapped over is an effect, too.
  return bool(kinds - {'NamedAxisEffect'}) or (
    equation.primitive.name in _CALLBACKS
  )


class Walk:
  """One walk through a program, which writes down what it meets.

  Attributes:
    offence: None, or the first one.
    clips: All clips.
    releases: All noise that something of the records enters.
    assumptions: What the proof rests on, in order.
    primitives: How many equations there are of each primitive.
  """

  def __init__(self) -> None:
    self.offence: str | None = None
    self._loops = 0
    self._site: Site | None = None
    self._context = PUBLIC  # What the branch that is run depends on.
    self.clips: list[FoundClip] = []
    self.releases: list[FoundRelease] = []
    self.assumptions: dict[str, None] = {}
    self.primitives: collections.Counter[str] = collections.Counter()

  # Programs and equations.

  def program(self, program: Program, labels: Sequence[Label]) -> list[Label]:
    """The labels of the outputs of a jaxpr."""
    outer, jaxpr = self._site, _equations.opened(program)
    of_jax = outer is not None and (outer.of_jax or is_of_jax(jaxpr))

    def step(equation: core.JaxprEqn, labels: list[Label]) -> list[Label]:
      self._site = Site(equation, outer, of_jax)
      return self._equation(self._site, labels)

    out = _equations.run(jaxpr, labels, lambda _: PUBLIC, step)
    self._site = outer
    return out

  def _equation(self, site: Site, labels: list[Label]) -> list[Label]:
    equation = site.equation
    name, count = equation.primitive.name, len(equation.outvars)
    self.primitives[name] += 1
    touched = any(x.kind is not Kind.PUBLIC for x in labels)
    if equation.primitive in _OF_MARKS:
      mark = _OF_MARKS[equation.primitive]
      return mark(self, site, labels) if touched else labels
    if not touched and self._context.kind is Kind.PUBLIC:
      return [PUBLIC] * count
    if name in _CALLS:
      return self.program(equation.params[_CALLS[name]], labels)
    if name in _OF_CONTROL:
      return _OF_CONTROL[name](self, site, labels)
    out = result(site, labels)
    if _has_effect(equation) and (
      join(out, self._context).kind is not Kind.PUBLIC
    ):
      raise OffenceError(
        f'{named(site)}: something of the records leaves the program or is'
        ' kept beside it. Take it out, or return the value under a name that'
        f' begins with {LOCAL}, if those who see it may see the data'
      )
    if name in _ONE_TO_ONE and count == len(labels):
      return labels
    if name not in _OPAQUE:
      for jaxpr in inside(equation):
        # No value of it is known, but what it does is as above.
        inputs = _equations.opened(jaxpr).invars
        self.program(jaxpr, [moved(out)] * len(inputs))
    return [out] * count

  def assume(self, sentence: str) -> None:
    """Writes down what the proof rests on."""
    self.assumptions[sentence] = None

  # Marks.

  def _clip(self, site: Site, labels: list[Label]) -> list[Label]:
    params = site.equation.params
    what, leaves, place = params['what'], params['leaves'], place_of(site)
    number = len(self.clips)
    self.clips.append(FoundClip(what, leaves, place))
    if what.declared:
      self.assume(f'{place}: what is declared as clipped elsewhere is clipped')
    return [Label(Kind.CLIPPED, (number, i), site) for i in range(len(leaves))]

  def _enters(self, site: Site, labels: list[Label]) -> list[Label]:
    params, place = site.equation.params, place_of(site)
    what, leaves = params['what'], params['leaves']
    for label in labels:
      if label.kind in (Kind.DRAWN, Kind.PRIVATE):
        raise OffenceError(of_noise(label))
    if 0.0 in what.stddevs:
      raise OffenceError(
        f'noise of standard deviation 0 at {place}: it hides nothing. Give a'
        ' positive one'
      )
    repeated = self._loops > 0
    self.releases.append(
      FoundRelease(what, leaves, tuple(labels), place, repeated)
    )
    if what.declared:
      self.assume(
        f'{place}: noise that is not of this package is added as you account'
        ' for it'
      )
    return [
      x if x.kind is Kind.PUBLIC else Label(Kind.ENTERING, None, site)
      for x in labels
    ]

  def _released(self, site: Site, labels: list[Label]) -> list[Label]:
    for label in labels:
      if label.kind not in (Kind.PUBLIC, Kind.ENTERING):
        raise OffenceError(
          f'{by(label)}: the size or the key of noise depends on records. Use'
          ' public constants'
        )
    return [PUBLIC] * len(labels)

  # Control flow.

  def _cond(self, site: Site, labels: list[Label]) -> list[Label]:
    which, *operands = labels
    self._decides(site, which, 'which branch is run')
    branches = [
      self._because(which, x, operands)
      for x in site.equation.params['branches']
    ]
    if which.kind is not Kind.PUBLIC:
      chosen = Label(which.kind, None, site, which.lost)
      branches.append([chosen] * len(site.equation.outvars))
    return [join(*outs) for outs in zip(*branches, strict=True)]

  def _while(self, site: Site, labels: list[Label]) -> list[Label]:
    p = site.equation.params
    of_cond, of_body, carry = parted(
      labels, p['cond_nconsts'], p['body_nconsts']
    )

    def once(carry: list[Label]) -> tuple[list[Label], None]:
      (goes_on,) = self.program(p['cond_jaxpr'], of_cond + carry)
      self._decides(site, goes_on, 'how often a loop runs')
      out = self._because(goes_on, p['body_jaxpr'], of_body + carry)
      if goes_on.kind is not Kind.PUBLIC:
        out = [join(x, moved(goes_on)) for x in out]
      return out, None

    return self._settled(carry, once)[0]

  def _scan(self, site: Site, labels: list[Label]) -> list[Label]:
    p = site.equation.params
    consts, carry, items = parted(labels, p['num_consts'], p['num_carry'])
    rows = list(map(moved, items))

    def once(carry: list[Label]) -> tuple[list[Label], list[Label]]:
      out = self.program(p['jaxpr'], consts + carry + rows)
      after, stacked = parted(out, len(carry))
      return after, stacked

    carry, stacked = self._settled(carry, once)
    return carry + list(map(moved, stacked))

  def _because(
    self, of: Label, program: Program, labels: list[Label]
  ) -> list[Label]:
    """The labels of the outputs of a program that a value has chosen."""
    before, self._context = self._context, join(self._context, moved(of))
    out = self.program(program, labels)
    self._context = before
    return out

  def _settled(
    self,
    carry: list[Label],
    once: Callable[[list[Label]], tuple[list[Label], Beside]],
  ) -> tuple[list[Label], Beside]:
    """The labels of a loop's carry that another round does not change."""
    sizes, seen = (len(self.clips), len(self.releases)), self.primitives.copy()

    def anew(carry: list[Label]) -> tuple[list[Label], Beside]:
      # Labels only rise, so this ends. Each round is written down anew.
      self.primitives = seen.copy()
      del self.clips[sizes[0] :], self.releases[sizes[1] :]
      out, beside = once(carry)
      return [join(x, y) for x, y in zip(carry, out, strict=True)], beside

    self._loops += 1
    found = _equations.settled(carry, anew)
    self._loops -= 1
    return found

  def _decides(self, site: Site, label: Label, what: str) -> None:
    if label.kind is Kind.DRAWN:
      self.assume(
        f'{place_of(site)}: {what} depends on who was drawn, and nobody'
        ' sees how long a step takes'
      )
    elif label.kind is not Kind.PUBLIC:
      raise OffenceError(of_decision(label, site, what))


_Rule: TypeAlias = Callable[[Walk, Site, list[Label]], list[Label]]
_OF_MARKS: dict[core.Primitive, _Rule] = {
  _marks.clipped_p: Walk._clip,
  _marks.noise_enters_p: Walk._enters,
  _marks.released_p: Walk._released,
}
_OF_CONTROL: dict[str, _Rule] = {
  'cond': Walk._cond,
  'while': Walk._while,
  'scan': Walk._scan,
}
