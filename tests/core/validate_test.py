"""Messages name the argument and its value; traced values pass."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_optax import _validate as v


@pytest.mark.parametrize(
  ('check', 'bad'),
  [
    (v.positive, None), (v.positive, True), (v.known_positive, math.inf),
    # Arrays of one value are no secret.
    (v.non_negative, np.asarray(-1.0)), (v.non_negative, jnp.asarray(math.nan)),
  ],
)  # fmt: skip
def test_bad_values_that_no_public_table_has(check, bad):
  shown = '' if isinstance(bad, jax.Array | np.ndarray) else repr(bad)
  with pytest.raises(ValueError, match=f'rate.*{shown}'):
    check('rate', bad)


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
