"""What a proof says of a program is so: an oracle that computes it.

In the place of what has got its noise stand constants. Then nothing that is
proved may change when the records do, whatever the program is.
"""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_optax import diagnostics, transforms
from tests.properties import cases

N = 4

# Operations of two arrays (4,), and of who was drawn: each gives one of them.
OPERATIONS = {
  'add': lambda a, b, d: a + b,
  'multiply': lambda a, b, d: a * b,
  'divide': lambda a, b, d: a / (1 + b * b),
  'scale': lambda a, b, d: 0.5 * a,
  'nothing': lambda a, b, d: 0.0 * a + b,
  'constant': lambda a, b, d: jnp.full(N, a.size, jnp.float32),
  'choose': lambda a, b, d: jnp.where(a > 0, a, b),
  'choose by the drawn': lambda a, b, d: jnp.where(d, a, b),
  'drawn': lambda a, b, d: d.astype(jnp.float32),
  'move': lambda a, b, d: jnp.concatenate([a[2:], b[:2]])[::-1],
  'place': lambda a, b, d: jax.lax.dynamic_update_slice(a, b[:2], (1,)),
  'look up': lambda a, b, d: a[jnp.where(b > 0, 1, jnp.arange(N))],
  'product': lambda a, b, d: jnp.outer(a, b) @ b,
  'sort': lambda a, b, d: jnp.sort(a),
  'round': lambda a, b, d: a.astype(jnp.int32).astype(jnp.float32),
  'one by one': lambda a, b, d: jax.vmap(lambda x, y: x - y)(a, b),
  'in a function': lambda a, b, d: jax.jit(lambda x, y: x * 2 + y)(a, b),
  'rematerialised': lambda a, b, d: jax.checkpoint(lambda x: jnp.sin(x))(a),
  'derivative': lambda a, b, d: jax.grad(lambda x: jnp.sum(x**3 * b))(a),
  'branch': lambda a, b, d: jax.lax.cond(
    a[0] > 0, lambda x, y: x, lambda x, y: x + y, a, b
  ),
  'branch by the drawn': lambda a, b, d: jax.lax.cond(
    jnp.all(d), lambda x, y: x, lambda x, y: y, a, b
  ),
  'carried around': lambda a, b, d: jax.lax.scan(
    lambda carry, x: ((carry[1], carry[2], carry[0] + x), None),
    (a, jnp.ones(N), jnp.zeros(N)),
    b,
  )[0][1],
  'stacked': lambda a, b, d: jax.lax.scan(
    lambda carry, x: (carry + x, carry[0] * x), a, b
  )[1],
  'so often': lambda a, b, d: jax.lax.fori_loop(
    0, 3, lambda i, c: (c[1], c[0] + a), (b, jnp.ones(N))
  )[0],
  'as often as': lambda a, b, d: jax.lax.while_loop(
    lambda c: (c[0] < 4) & (c[0] < b[0]), lambda c: (c[0] + 1, c[1] * 2), (0, a)
  )[1],
  'clip': lambda a, b, d: transforms.clipped_elsewhere(a),
}
ADDS = optax.stateless(lambda tree, _: jax.tree.map(lambda x: x + 1, tree))
NOISE = transforms.noised_elsewhere(ADDS)
STEPS = st.lists(
  st.tuples(
    st.sampled_from([*OPERATIONS, 'noise', *['clip and noise'] * 6]),
    st.integers(0, 99),
    st.integers(0, 99),
  ),
  min_size=4,
  max_size=10,
)


def values(steps, noisy, records, drawn, public):
  """All values of a program; ``noisy`` is what stands for noise."""
  found = [records, public]
  for name, i, j in steps:
    a, b = found[-1 - i % len(found)], found[-1 - j % len(found)]
    if name == 'clip and noise':
      a = transforms.clipped_elsewhere(a)
    noise = name.endswith('noise')
    found.append(noisy(a) if noise else OPERATIONS[name](a, b, drawn))
  return found


def with_noise(x):
  return NOISE.update(x, optax.EmptyState())[0]


@pytest.mark.slow
@hypothesis.settings(cases.settings, max_examples=12)
@given(steps=STEPS)
def test_what_is_proved_depends_on_records_through_noise_alone(steps):
  array = jax.ShapeDtypeStruct((N,), jnp.float32)
  args = array, jax.ShapeDtypeStruct((N,), bool), array
  # Constants in the place of noise, other ones each time.
  hidden = jax.jit(
    lambda *args: values(steps, lambda x: jnp.arange(1.0, N + 1), *args)
  )
  public = np.float32([1, -2, 3, 0.5])
  one, other = (
    hidden(np.float32(x), np.array(d), public)
    for x, d in (
      ([-1, 2, 0, 7], [True] * N),
      ([3, -4, 5, 1], [True, False, True, False]),
    )
  )
  for k, (x, y) in enumerate(zip(one, other, strict=True)):
    proof = diagnostics.prove_released(
      lambda *args, k=k: values(steps, with_noise, *args)[k], *args, private=0,
      padding=1,
    )  # fmt: skip
    if proof:
      np.testing.assert_array_equal(x, y, err_msg=f'{steps}\n{k}: {proof}')
