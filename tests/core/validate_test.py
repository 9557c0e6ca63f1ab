"""Messages name the argument and its value; traced values pass."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import _validate as v


@pytest.mark.parametrize(
  ('check', 'bad', 'more'),
  [
    (v.non_negative, -1.0, ()), (v.non_negative, math.nan, ()),
    (v.positive, 0, ()), (v.positive, math.inf, ()), (v.positive, '1', ()),
    (v.positive, None, ()), (v.positive, True, ()), (v.decay_rate, 1.0, ()),
    (v.decay_rate, -0.1, ()), (v.one_of, 'svt', (('svd',),)),
    (v.integer, 1.5, (0,)), (v.at_least, 0.5, (1,)),
    (v.known_number, None, ()), (v.known_number, 'much', ()),
    (v.known_non_negative, -1.0, ()), (v.known_non_negative, math.nan, ()),
    (v.known_positive, 0.0, ()), (v.known_positive, math.inf, ()),
    (v.known_probability, 1.5, ()), (v.known_open_probability, 0.0, ()),
    (v.known_open_probability, 1.0, ()),
    (v.known_open_probability, math.nan, ()),
    # Arrays of one value are no secret.
    (v.non_negative, np.asarray(-1.0), ()),
    (v.non_negative, jnp.asarray(math.nan), ()),
  ],
)  # fmt: skip
def test_bad_values_are_named(check, bad, more):
  shown = '' if isinstance(bad, jax.Array | np.ndarray) else repr(bad)
  with pytest.raises(ValueError, match=f'rate.*{shown}'):
    check('rate', bad, *more)


def test_what_is_missing_or_a_word_is_named():
  with pytest.raises(ValueError, match='scale_by_x.*params'):
    v.params_given('scale_by_x', None)
  with pytest.raises(ValueError, match="neighboring_relation='replace'"):
    v.neighboring_relation('replace')


def test_limits_and_traced_values_pass():
  v.non_negative('x', 0)
  v.non_negative('x', np.asarray(0.5))
  v.decay_rate('x', 0)
  v.at_least('x', 1, 1)

  def build(x):
    v.positive('x', x)
    v.decay_rate('x', x)
    return x

  assert jax.jit(build)(jnp.float32(-3)) == -3


def test_known_numbers_come_back_as_floats():
  assert v.known_non_negative('x', math.inf) == math.inf
  for check in (
    v.known_number, v.known_positive, v.known_probability,
    v.known_open_probability,
  ):  # fmt: skip
    found = check('x', np.float32(0.5))
    assert type(found) is float
    assert found == 0.5
