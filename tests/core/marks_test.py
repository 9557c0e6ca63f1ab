"""The marks that clips and noise leave in a program, for proofs."""

import jax
import jax.numpy as jnp
import numpy as np

from prism_optax._proofs import _marks
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
  clip = _marks.Clip((_marks.Group((0,), 1.0),), (1.0,))

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
  unknown = _marks.Clip((_marks.Group((0,), None),), (None,))
  assert found == [None, unknown, _marks.Noise((None,))]
