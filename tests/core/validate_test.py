"""Messages name the argument and its value; traced values pass."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import _validate


@pytest.mark.parametrize(
  ('check', 'bad'),
  [
    (_validate.non_negative, -1.0),
    (_validate.non_negative, math.nan),
    (_validate.positive, 0),
    (_validate.positive, math.inf),
    (_validate.positive, '1'),
    (_validate.positive, None),
    (_validate.positive, True),
    (_validate.decay_rate, 1.0),
    (_validate.decay_rate, -0.1),
  ],
)
def test_bad_values_are_named(check, bad):
  with pytest.raises(ValueError, match=f'rate.*{bad!r}'):
    check('rate', bad)


@pytest.mark.parametrize('make', [np.asarray, jnp.asarray])
@pytest.mark.parametrize('bad', [-1.0, math.nan])
def test_arrays_of_one_value_are_no_secret(make, bad):
  with pytest.raises(ValueError, match='rate'):
    _validate.non_negative('rate', make(bad))
  _validate.non_negative('rate', make(0.5))


def test_other_checks_name_the_value():
  with pytest.raises(ValueError, match='mode.*svt'):
    _validate.one_of('mode', 'svt', ('svd',))
  with pytest.raises(ValueError, match='steps=1.5'):
    _validate.integer('steps', 1.5, 0)
  with pytest.raises(ValueError, match='cap=0.5'):
    _validate.at_least('cap', 0.5, 1)
  with pytest.raises(ValueError, match='scale_by_x.*params'):
    _validate.params_given('scale_by_x', None)


def test_limits_pass():
  _validate.non_negative('x', 0)
  _validate.decay_rate('x', 0)
  _validate.at_least('x', 1, 1)


def test_traced_values_pass():
  def build(x):
    _validate.positive('x', x)
    _validate.decay_rate('x', x)
    return x

  assert jax.jit(build)(jnp.float32(-3)) == -3


@pytest.mark.parametrize(
  ('check', 'bad'),
  [
    (_validate.known_number, None),
    (_validate.known_number, 'much'),
    (_validate.known_non_negative, -1.0),
    (_validate.known_non_negative, math.nan),
    (_validate.known_positive, 0.0),
    (_validate.known_positive, math.inf),
    (_validate.known_probability, 1.5),
    (_validate.known_open_probability, 0.0),
    (_validate.known_open_probability, 1.0),
    (_validate.known_open_probability, math.nan),
  ],
)
def test_numbers_that_must_be_known_are_named(check, bad):
  with pytest.raises(ValueError, match=f'rate.*{bad!r}'):
    check('rate', bad)


def test_known_numbers_come_back_as_floats():
  assert _validate.known_non_negative('x', math.inf) == math.inf
  for check in (
    _validate.known_number,
    _validate.known_positive,
    _validate.known_probability,
    _validate.known_open_probability,
  ):
    found = check('x', np.float32(0.5))
    assert type(found) is float
    assert found == 0.5


def test_a_relation_is_not_a_word():
  with pytest.raises(ValueError, match="neighboring_relation='replace'"):
    _validate.neighboring_relation('replace')
