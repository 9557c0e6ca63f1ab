"""Programs of JAX: jaxprs, the equations in them, and where these are."""

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import jax
from jax._src import source_info_util
from jax.extend import core

from prism_optax._proofs import _marks
from prism_optax._types import ArrayTree

Program: TypeAlias = core.Jaxpr | core.ClosedJaxpr
Known = TypeVar('Known')
Beside = TypeVar('Beside')

# Primitives that call one jaxpr, and the parameter that holds it. A
# `custom_vmap_call` that is left runs its own function, not its rule.
CALLS = {
  'jit': 'jaxpr', 'pjit': 'jaxpr', 'remat2': 'jaxpr', 'checkpoint': 'jaxpr',
  'closed_call': 'call_jaxpr', 'core_call': 'call_jaxpr',
  'custom_jvp_call': 'call_jaxpr', 'custom_vjp_call': 'call_jaxpr',
  'custom_vmap_call': 'call',
}  # fmt: skip


def opened(program: Program) -> core.Jaxpr:
  """A jaxpr without its constants, whether it is closed or not."""
  if not isinstance(program, core.ClosedJaxpr):
    return program
  jaxpr: core.Jaxpr = program.jaxpr
  return jaxpr


def run(
  program: Program,
  values: Sequence[Known],
  constant: Callable[[object], Known],
  step: Callable[[core.JaxprEqn, list[Known]], Sequence[Known]],
) -> list[Known]:
  """What is known of a program's results.

  Args:
    program: Closed or not.
    values: What is known of its arguments.
    constant: What is known of a constant with such an ``aval``.
    step: What is known of the results of an equation, from what is known of its
      operands.
  """
  jaxpr = opened(program)
  known = dict(zip(jaxpr.invars, values, strict=True))
  known |= {x: constant(x.aval) for x in jaxpr.constvars}

  def read(x: core.Var | core.Literal) -> Known:
    return constant(x.aval) if isinstance(x, core.Literal) else known[x]

  for equation in jaxpr.eqns:
    made = step(equation, [read(x) for x in equation.invars])
    known.update(zip(equation.outvars, made, strict=True))
  return [read(x) for x in jaxpr.outvars]


def settled(
  carry: list[Known], once: Callable[[list[Known]], tuple[list[Known], Beside]]
) -> tuple[list[Known], Beside]:
  """What another round of a loop does not change.

  Args:
    carry: What is known of the carry before the first round.
    once: What is known of the carry after one more round, which says no more
      than it did before, and what else the round gives.

  Returns:
    The carry, and what else the last round gives.
  """
  while True:
    new, beside = once(carry)
    if new == carry:
      return carry, beside
    carry = new


def parted(values: Sequence[Known], *sizes: int) -> list[list[Known]]:
  """Parts of these sizes, and the rest."""
  parts, start = [], 0
  for size in sizes:
    parts.append(list(values[start : start + size]))
    start += size
  return [*parts, list(values[start:])]


def line_of(equation: core.JaxprEqn) -> str | None:
  """``file.py:12 (function)`` in the user's code, or None if there is none."""
  frame = source_info_util.user_frame(equation.source_info.traceback)
  if frame is None:
    return None
  file = os.path.basename(frame.file_name)
  return f'{file}:{frame.start_line} ({frame.function_name})'


def inside(equation: core.JaxprEqn) -> Iterator[Program]:
  """The programs in the parameters of an equation."""
  for value in equation.params.values():
    for x in value if isinstance(value, tuple | list) else [value]:
      if isinstance(x, core.Jaxpr | core.ClosedJaxpr):
        yield x


def calls_of(program: Program, name: str) -> Iterator[core.ClosedJaxpr]:
  """What a program calls under this name, wherever; none inside of another."""
  for equation in opened(program).eqns:
    holds = CALLS.get(equation.primitive.name)
    if holds is not None and equation.params.get('name') == name:
      yield equation.params[holds]
      continue
    for inner in inside(equation):
      yield from calls_of(inner, name)


def names_of(tree: ArrayTree) -> list[str]:
  """The paths of the leaves of a tree, to name them."""
  return [
    jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)
  ]


class Site(NamedTuple):
  """Where an equation is.

  Attributes:
    equation: The equation.
    outer: Where the equation is that calls the program that it is in, or None.
    of_jax: Whether that program is a function of JAX itself. It is traced once
      and for all, so its lines are those of whoever called it first.
  """

  equation: core.JaxprEqn
  outer: 'Site | None'
  of_jax: bool


_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_JAX = os.path.dirname(jax.__file__)
_UNKNOWN = 'an unknown line'


def is_of_jax(jaxpr: core.Jaxpr) -> bool:
  """Whether a program was made of a function of JAX, such as `jnp.where`."""
  info = getattr(jaxpr, 'debug_info', None)
  return _JAX in str(getattr(info, 'func_src_info', ''))


def _frames(equation: core.JaxprEqn) -> list[tuple[str, str]]:
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


def place_of(site: Site) -> str:
  """Where the caller has a clip, noise, or a loop."""
  site = _outside_of_jax(site)
  line = _line_of_caller(site)
  if line is not None:
    return line
  # Only lines of this package: the one that binds a mark says nothing.
  own = [x for name, x in _frames(site.equation) if name != _marks.__file__]
  return own[0] if own else _UNKNOWN


def named(site: Site) -> str:
  """The primitive and its line, and the caller's line if that is another."""
  name = site.equation.primitive.name
  site = _outside_of_jax(site)
  line = line_of(site.equation) or _UNKNOWN
  caller = _line_of_caller(site)
  called = ''
  if caller is not None and caller != line.partition(' ')[0]:
    called = f', called at {caller}'
  return f'`{name}` at {line}{called}'
