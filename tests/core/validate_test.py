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
