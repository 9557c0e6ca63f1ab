"""What proofs read and rest on: marks in a program, and rules that fit."""

import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import diagnostics
from prism_optax._proofs import (
  _analysis,
  _equations,
  _independence,
  _kinds,
  _marks,
  _rules,
  _walk,
)
from prism_optax._proofs._labels import Digit, RefusedError
from prism_optax.training import _seen
from tests.proofs.independence_test import FAKE
from tests.proofs.release_test import NOISE, PADDING, PARAMS, X, private_step


def test_marks_are_compiled_to_nothing(monkeypatch):
  """The same program, letter by letter, and so the same bits and kernels."""
  args = PARAMS, NOISE.init(PARAMS), X, PADDING

  def lowered():
    step = jax.jit(lambda *args: private_step(*args), donate_argnums=(0, 1))
    return step.lower(*args).as_text()

  with_marks = lowered()
  monkeypatch.setattr(_marks, '_bound', lambda mark, leaves, what: leaves)
  assert lowered() == with_marks


def test_marks_pass_through_transformations():
  clip = _marks.Clip((_marks.Group((0,), 1.0, 1),), (1.0,))

  def marked(x):
    cut = _marks.clipped([(jnp.sin(x),)], clip)
    ((y,),) = _marks.released(cut, _marks.Noise((1.0,)))
    return y

  x = jnp.linspace(0, 1, 4)
  np.testing.assert_array_equal(jax.vmap(marked)(x), jnp.sin(x))
  np.testing.assert_array_equal(jax.vmap(jax.grad(marked))(x), jnp.cos(x))
  scanned = jax.lax.scan(lambda c, v: (c, marked(v)), 0, x)[1]
  np.testing.assert_array_equal(scanned, jnp.sin(x))
  # One copy of many is not known to be noise of its own.
  found = [
    e.params.get('what') for e in jax.make_jaxpr(jax.vmap(marked))(x).eqns
  ]
  unknown = _marks.Clip((_marks.Group((0,), None, 1),), (None,))
  assert found == [None, unknown, _marks.Noise((None,))]


def test_a_place_within_the_package_is_the_line_that_marks(monkeypatch):
  """For a training that the package itself runs."""
  args = PARAMS, NOISE.init(PARAMS), X, PADDING
  monkeypatch.setattr(_equations, '_PACKAGE', '')  # Every file is in it.
  proof = diagnostics.prove_released(private_step, *args, private=2, padding=3)
  assert 'release at _lattice.py' in str(proof)


def test_a_primitive_is_known_by_the_module_of_jax_that_defined_it():
  """Not one that is called the same, of a module that was loaded before."""
  spec = importlib.util.find_spec(_analysis.__name__)
  again = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(again)
  assert jax.lax.add_p in again.PRIMITIVES
  assert FAKE not in again.PRIMITIVES


def test_of_a_group_the_leaf_of_least_noise_counts():
  stddevs = 1.0, 2.0
  clip = _marks.Clip((_marks.Group((0, 1), 1.0, 1),), stddevs)
  labels = tuple(_kinds.Label(_kinds.Kind.CLIPPED, (0, i)) for i in (0, 1))
  release = _walk.FoundRelease(
    _marks.Noise(stddevs), (0, 1), labels, 'a line', repeated=False
  )
  clips = {0: _walk.FoundClip(clip, (0, 1), 'a line')}
  found = types.SimpleNamespace(clips=clips, releases=[release])
  assert _seen.joint_noise_multiplier(found, 1) == 1.0


def test_a_rule_that_does_not_fit_its_array_proves_nothing(monkeypatch):
  for axes, message in (
    ((), 'another rank'), (((Digit(2, 1),),), 'an unexpected size'),
  ):  # fmt: skip
    rule = lambda e, x, axes=axes: x.with_axes(axes)  # noqa: E731
    monkeypatch.setitem(_analysis._ALL_RULES, 'sin', rule)
    proof = diagnostics.prove_independent(jnp.sin, jnp.ones(3))
    assert message in proof.offence
  odd = types.SimpleNamespace(ins=[(2, 2)], outs=[(2, 3)])
  with pytest.raises(RefusedError, match='not entry by entry'):
    _rules._elementwise(odd, None)


def test_what_does_more_than_return_a_value_is_not_proved():
  program = jax.make_jaxpr(jnp.sin)(jnp.ones(3))
  equations = [x.replace(effects={'more'}) for x in program.jaxpr.eqns]
  odd = program.replace(jaxpr=program.jaxpr.replace(eqns=equations))
  for one, whole in ((program, True), (odd, False)):
    assert bool(_independence.followed(one, ['y'], [True], 3)) is whole
