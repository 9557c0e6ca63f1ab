"""One backward pass of a batch gives what vmap over examples gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import prism_optax
from prism_optax import lora

ROWS, COLUMNS, RANK = 7, 6, 2
_rng = np.random.default_rng(0)
PARAMS = {
  'lora_a': _rng.normal(size=(ROWS, RANK)),
  'lora_b': _rng.normal(size=(RANK, COLUMNS)),
}
X = _rng.normal(size=(4, 3, ROWS))


def _losses(params, x):
  return jnp.sum(lora.per_example_product(x, **params) ** 2, (1, 2))


def test_flat_tokens_and_many_axes_of_them(x64):
  def gradients(shape, **tokens):
    def losses(copies, x):
      y = lora.per_example_product(x.reshape(shape), **copies, **tokens)
      return jnp.sum(y.reshape(4, -1) ** 3, 1)

    return jax.jit(lora.per_example_gradients(losses))(PARAMS, X)

  want = gradients((4, 3, ROWS))
  for found in (
    gradients((12, ROWS), tokens_per_example=3),
    gradients((4, 1, 3, ROWS)),
  ):
    jax.tree.map(np.testing.assert_array_equal, found, want)
  # Without a gradient all forms are a plain product.
  flat = X.reshape(12, -1)
  copies = {k: np.stack([x] * 4) for k, x in PARAMS.items()}
  for factors, tokens in ((PARAMS, None), (PARAMS, 3), (copies, 3)):
    one = lora.per_example_product(flat, **factors, tokens_per_example=tokens)
    np.testing.assert_allclose(
      one, flat @ PARAMS['lora_a'] @ PARAMS['lora_b'], rtol=1e-12
    )


def test_time_major_tokens_are_refused():
  """One record would have as many clipped parts as there are records.

  As many tokens as examples: no shape tells, but a proof does
  (tests/proofs/independence_test.py).
  """

  def losses(params, x):  # (B, T, in) comes, and the model turns it around.
    return _losses(params, x.swapaxes(0, 1)).reshape(4, -1).sum(1)

  with pytest.raises(
    ValueError, match=r'\(B, \.\.\., in\).*x.shape=\(8, 4, 7\)'
  ):
    jax.eval_shape(
      lora.per_example_gradients(losses), PARAMS, np.zeros((4, 8, ROWS))
    )


def test_of_no_example_there_are_no_tokens():
  copies = np.zeros((0, ROWS, 2)), np.zeros((0, 2, 6))
  y = lora.per_example_product(np.zeros((0, 5, ROWS)), *copies)
  assert y.shape == (0, 5, 6)


def test_bfloat16_tokens_are_summed_in_float32():
  size, tokens = 2, 513
  x = np.ones((size, tokens, 1), jnp.bfloat16)
  params = {name: np.ones((1, 1), np.float32) for name in ('lora_a', 'lora_b')}

  def losses(params, x):
    y = lora.per_example_product(x, **params)
    return jnp.sum(y.astype(jnp.float32), (1, 2))

  grads = jax.device_get(jax.jit(lora.per_example_gradients(losses))(params, x))
  # 513 needs ten bits, and bfloat16 has eight.
  np.testing.assert_array_equal(grads['lora_a'].ravel(), tokens)
  np.testing.assert_array_equal(grads['lora_b'].ravel(), tokens)


@pytest.mark.parametrize('skips', [False, True])
def test_parts_of_padding_are_computed_unless_they_are_to_be_skipped(skips):
  padding, computed = np.array([0, 1, 0, 0, 1, 0], bool), []
  clip = prism_optax.per_matrix_clip(1.0)
  params = {'w': jnp.ones((1, 1))}

  def gradients(params, rows):
    jax.debug.callback(lambda rows: computed.append(rows.tolist()), rows)
    return {'w': rows[:, None, None] * params['w']}

  in_parts = lora.in_microbatches(gradients, 2, skip_padding=skips)

  @jax.jit
  def total(rows, padding):
    lazy = in_parts(params, rows)
    return clip.update(lazy, (), params, is_padding_example=padding)[0]['w']

  # Rows of norm 1 and less, which are not cut; those that count are 1 to 4.
  rows = jnp.array([0.1, 9, 0.2, 0.3, 9, 0.4])
  found = total(rows, padding)
  jax.effects_barrier()
  np.testing.assert_allclose(found, 1.0, rtol=1e-6)
  # Part k has rows k and k + 3: the second one is padding alone.
  assert len(computed) == (2 if skips else 3)
  assert any(9.0 in rows for rows in computed) != skips
  np.testing.assert_allclose(total(rows, None), 3.0, rtol=1e-6)


def test_parts_hold_the_gradients_of_a_part():
  size, part, width, rank = 64, 4, 256, 8
  params = {
    'lora_a': jnp.ones((width, rank)),
    'lora_b': jnp.ones((rank, width)),
  }
  clip = prism_optax.intrinsic_clip(1.0)
  gradients = jax.vmap(
    jax.grad(lambda p, x: jnp.sum((x @ p['lora_a'] @ p['lora_b']) ** 2)),
    (None, 0),
  )

  def bytes_of(gradients):
    def mean(params, x):
      return clip.update(gradients(params, x), (), params)[0]

    lowered = jax.jit(mean).lower(params, jnp.ones((size, 1, width)))
    return lowered.compile().memory_analysis().temp_size_in_bytes

  one = 2 * width * rank * 4
  whole, in_parts = map(
    bytes_of, (gradients, lora.in_microbatches(gradients, part))
  )
  assert whole >= size * one
  # The gradients of a part, and a few sums of the size of one.
  assert in_parts < (part + 12) * one


@pytest.mark.parametrize(
  ('a', 'b', 'x', 'tokens'),
  [
    ((4, 7, 2), (2, 6), (4, 3, 7), None), ((7, 2), (4, 2, 6), (4, 3, 7), None),
    ((4, 7, 2), (3, 2, 6), (4, 3, 7), None),
    ((4, 7, 2), (4, 2, 6), (5, 3, 7), None),
    ((4, 7, 2), (4, 2, 6), (8, 7), None), ((7, 7, 2), (7, 2, 6), (7,), None),
    ((0, 7, 2), (0, 2, 6), (5, 3, 7), None), ((7,), (2, 6), (4, 3, 7), None),
    ((4, 7, 2), (4, 2, 6), (12, 7), 2), ((4, 7, 2), (4, 2, 6), (4, 3, 7), 3),
    ((4, 7, 2), (4, 2, 6), (12, 1, 7), 3),
  ],
)  # fmt: skip
def test_factors_that_do_not_fit_are_refused(a, b, x, tokens):
  with pytest.raises(
    ValueError, match=rf'a copy of both.*lora_a\.shape.*example={tokens}'
  ):
    lora.per_example_product(
      jnp.ones(x), jnp.ones(a), jnp.ones(b), tokens_per_example=tokens
    )


def test_losses_of_another_shape_are_refused():
  def mean(params, x):
    return jnp.mean(_losses(params, x))

  with pytest.raises(ValueError, match=r'losses of shape \(4,\).*got \(\)'):
    jax.eval_shape(lora.per_example_gradients(mean), PARAMS, X)


def test_parts_that_are_no_parts_are_refused():
  clip = prism_optax.intrinsic_clip(1.0)
  gradients = lora.per_example_gradients(_losses)
  with pytest.raises(ValueError, match='divide .* 4, got microbatch_size=3'):
    clip.update(lora.in_microbatches(gradients, 3)(PARAMS, X), (), PARAMS)
  gradients = lora.in_microbatches(gradients, 2)
  lazy = lora.in_microbatches(gradients, 2)(PARAMS, X)
  with pytest.raises(TypeError, match='in micro-batches already'):
    clip.update(lazy, (), PARAMS)
