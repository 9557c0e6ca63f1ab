"""Where an equation is, in words for the people who wrote it."""

import os
from typing import NamedTuple

import jax
from jax._src import source_info_util
from jax.extend import core

from prism_optax._proofs import _equations, _marks


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
_MARKS = os.path.basename(_marks.__file__)
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
