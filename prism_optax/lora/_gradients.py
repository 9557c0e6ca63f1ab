"""Gradients of every example from one backward pass of a whole batch.

``jax.vmap(jax.grad(loss))`` gives the same; use that unless its time matters or
the model cannot be vmapped. Here every example gets a copy of the trainable
leaves, and the gradient of the summed losses with respect to the copies is the
gradient of each example. A product with copied factors need not read more than
one copy on its way forward.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from prism_optax import _validate
from prism_optax._exact_sum import LazyGradients
from prism_optax._types import ArrayTree


def per_example_gradients(
  losses: Callable[..., jax.Array],
) -> Callable[..., optax.Updates]:
  """A function of parameters and batch that returns per-example gradients.

  ``losses`` is called once, with a copy of ``params`` for each example in
  leaves ``(B, *shape)``, and has to use copy i for example i alone:
  :func:`per_example_product` does for adapters, and so does a plain matmul of
  ``x (B, tokens, in)`` with ``(B, in, r)``. The loss of an example must not
  depend on others (batch normalisation, in-batch negatives), because then a
  clip bounds nothing. :func:`prism_optax.diagnostics.prove_independent` proves
  that the returned function keeps examples apart.

  ===================================  ========================================
  NaN or Inf in an example             in its own gradient only
  examples in a sharded batch          each stays on its device
  a batch of no examples               leaves ``(0, *shape)``
  ===================================  ========================================

  Args:
    losses: ``losses(params, batch, *args)`` takes leaves ``(B, *shape)`` in
      ``params`` and returns an array (B,).

  Returns:
    ``gradients(params, batch, *args)``, which takes params of the usual
    shapes, a tree of arrays (B, ...), and the other arguments of ``losses``
    (frozen weights). It returns leaves ``(B, *shape)`` for
    :func:`prism_optax.prism` or :func:`prism_optax.intrinsic_clip`. They are
    not private: they are neither clipped nor noised.

  Raises:
    ValueError: When the function is called, if ``losses`` returns another shape
      than (B,).

  Example:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> def losses(params, x):
    ...   y = lora.per_example_product(x, params['lora_a'], params['lora_b'])
    ...   return jnp.sum(y**2, axis=(1, 2))
    >>> params = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
    >>> x = jnp.arange(30.0).reshape(2, 5, 3)  # Examples, tokens, features.
    >>> grads = lora.per_example_gradients(losses)(params, x)
    >>> one = lambda params, x: losses(params, x[None])[0]
    >>> same = jax.vmap(jax.grad(one), (None, 0))(params, x)
    >>> grads['lora_a'].shape
    (2, 3, 1)
    >>> bool(jnp.allclose(grads['lora_a'], same['lora_a']))
    True
  """

  def gradients(
    params: optax.Params, batch: ArrayTree, *args: ArrayTree
  ) -> optax.Updates:
    size = jax.tree.leaves(batch)[0].shape[0]

    def total(copies: optax.Params) -> jax.Array:
      found = losses(copies, batch, *args)
      if jnp.shape(found) != (size,):
        raise ValueError(
          f'Expected losses of shape ({size},), one for each example of the'
          f' batch, got {jnp.shape(found)}.'
        )
      return jnp.sum(found)

    copies = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (size, *x.shape)), params
    )
    return jax.grad(total)(copies)

  return gradients


def in_microbatches(
  gradients: Callable[..., optax.Updates],
  microbatch_size: int,
  *,
  skip_padding: bool = False,
) -> Callable[..., LazyGradients]:
  """Lets a clip compute per-example gradients part by part.

  Pass the result of the new function in place of gradients, to ``update`` of
  :func:`prism_optax.prism`, :func:`prism_optax.dp_muon` or a clip. It holds no
  gradients. The clip takes ``microbatch_size`` examples at a time, computes
  their gradients, clips each, and adds. A batch of any size then needs the
  memory of one part, and is still one release. Examples are added as integers,
  so parts change an update only if the compiler rounds the gradient of one
  example differently in a smaller batch.

  **Privacy.** As without parts: the sum, its sensitivity and the noise are the
  same. All parts are computed, so the time does not reveal how many examples
  were drawn; with ``skip_padding`` it does. The gradient of an example must not
  depend on other examples of its part, because then a clip bounds nothing, and
  no shape shows it. :func:`prism_optax.diagnostics.prove_independent` proves
  that ``gradients`` keeps examples apart.

  Args:
    gradients: ``gradients(params, batch, *args)``, from
      :func:`per_example_gradients` or ``jax.vmap(jax.grad(loss), (None, 0))``.
    microbatch_size: Examples in a part. It divides the size of every batch,
      padding included; on a mesh it is a multiple of the devices that share the
      batch. A batch that is no larger goes through at once.
    skip_padding: Skip parts that hold only padding, by ``is_padding_example``
      of ``update``. With P parts, part k has every P-th row from row k on, so
      lay out the padding accordingly. The time of an update then reveals how
      many examples were drawn.

  Returns:
    A function of the same arguments, for use under ``jax.jit`` in the
    same traced function as ``update``, because its result is not a tree of
    arrays.

  Raises:
    ValueError: If ``microbatch_size`` is no positive integer; in ``update``, if
      it does not divide the size of the batch.
    TypeError: In ``update``, if ``gradients`` is in micro-batches already.
      A transformation in front of the clip fails too: it finds no gradients.

  Example:
    >>> import functools
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import prism_optax
    >>> from prism_optax import lora
    >>> def loss(params, x):
    ...   return jnp.sum((x @ params['lora_a'] @ params['lora_b'] - 1) ** 2)
    >>> params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.ones((1, 2))}
    >>> tx = prism_optax.prism(
    ...   0.1, l2_clip_norm=1.0, noise_multiplier=1.0, expected_batch_size=8,
    ...   prng_key=0)
    >>> gradients = jax.vmap(jax.grad(loss), (None, 0))
    >>> @functools.partial(jax.jit, static_argnums=0)
    ... def step(gradients, state, x):
    ...   return tx.update(gradients(params, x), state, params)[0]['lora_b']
    >>> x, state = jnp.arange(24.0).reshape(8, 3), tx.init(params)
    >>> one, other = (
    ...   step(fn, state, x)
    ...   for fn in (gradients, lora.in_microbatches(gradients, 2)))
    >>> bool(jnp.allclose(one, other))
    True
  """
  _validate.integer('microbatch_size', microbatch_size, 1)

  def lazily(
    params: optax.Params, batch: ArrayTree, *args: ArrayTree
  ) -> LazyGradients:
    def of_part(part: ArrayTree) -> optax.Updates:
      found = gradients(params, part, *args)
      if isinstance(found, LazyGradients):
        raise TypeError(
          'gradients: it is in micro-batches already; give one size.'
        )
      return found

    return LazyGradients(batch, of_part, microbatch_size, skip_padding)

  return lazily


def per_example_product(
  x: jax.Array,
  lora_a: jax.Array,
  lora_b: jax.Array,
  *,
  tokens_per_example: int | None = None,
) -> jax.Array:
  """``x A B`` of an adapter, with copies of the factors or without.

  With copies, of :func:`per_example_gradients`, all tokens of all examples
  still go through one product each way; only the gradients of the factors are
  formed by example, ``sum_t x_t^T (g_t B^T)`` and ``sum_t (x_t A)^T g_t`` over
  its tokens, summed in float32 at least.

  Row i of ``x`` must be example i: with tokens in front, ``(tokens, B, in)``,
  the gradient of a copy would hold tokens of several examples, and a clip would
  bound nothing. This raises an error unless the number of tokens equals the
  number of examples, which shapes cannot show;
  :func:`prism_optax.diagnostics.prove_independent` does.

  Args:
    x: ``(B, ..., in)``, any number of axes of tokens.
    lora_a: ``(in, r)``, or copies ``(B, in, r)`` that are all the same: one of
      them is read.
    lora_b: ``(r, out)``, or ``(B, r, out)`` likewise.
    tokens_per_example: T, for ``x`` of shape ``(B * T, in)`` with the tokens of
      an example side by side. Without copies it is ignored.

  Returns:
    ``(..., out)``, not multiplied by alpha / r.

  Raises:
    ValueError: If one factor has copies and the other has not, their numbers
      differ, or ``x`` has not the shape above.

  Example:
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> a, b = jnp.eye(3, 1), 2 * jnp.eye(1, 2)
    >>> lora.per_example_product(jnp.ones((4, 3)), a, b)[0].tolist()
    [2.0, 0.0]
    >>> copies = [jnp.broadcast_to(f, (4, *f.shape)) for f in (a, b)]
    >>> lora.per_example_product(jnp.ones((4, 3)), *copies)[0].tolist()
    [2.0, 0.0]
  """
  x, lora_a, lora_b = map(jnp.asarray, (x, lora_a, lora_b))
  copied = lora_a.ndim == 3
  fits = lora_a.ndim in (2, 3) and lora_b.ndim == lora_a.ndim
  if copied and fits:
    size = lora_a.shape[0]
    fits = lora_b.shape[0] == size and x.ndim > 1
    if tokens_per_example is None:
      fits = fits and x.shape[0] == size
    else:
      fits = fits and x.shape[:-1] == (size * tokens_per_example,)
  if not fits:
    raise ValueError(
      'Expected lora_a (in, r) and lora_b (r, out), or a copy of both for each'
      ' of the B examples of x (B, ..., in) or (B * tokens_per_example, in),'
      f' got {lora_a.shape=}, {lora_b.shape=}, {x.shape=} and'
      f' {tokens_per_example=}.'
    )
  if not copied:
    return x @ lora_a @ lora_b
  if size == 0:
    return jnp.zeros((*x.shape[:-1], lora_b.shape[-1]), x.dtype)
  tokens = x.reshape(size, -1, x.shape[-1])
  return _product(tokens, lora_a, lora_b).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _product(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
  """(B, tokens, out) from (B, tokens, in) and equal copies of the factors."""
  return _forward(x, a, b)[0]


def _forward(
  x: jax.Array, a: jax.Array, b: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
  # Flat: one product over all tokens, which CPUs run twice as fast as another.
  inner = x.reshape(-1, x.shape[-1]) @ a[0]
  out = (inner @ b[0]).reshape(*x.shape[:2], -1)
  return out, (x, inner.reshape(*x.shape[:2], -1), a[0], b[0])


def _backward(
  residuals: tuple[jax.Array, ...], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  x, inner, a, b = residuals

  def by_example(
    left: jax.Array, right: jax.Array, like: jax.Array
  ) -> jax.Array:
    wide = jnp.promote_types(like.dtype, jnp.float32)
    product = jnp.matmul(left.mT, right, preferred_element_type=wide)
    return product.astype(like.dtype)

  flat = cotangent.reshape(-1, cotangent.shape[-1]) @ b.T
  to_inner = flat.reshape(*x.shape[:2], -1)
  return (
    (flat @ a.T).reshape(x.shape).astype(x.dtype),
    by_example(x, to_inner, a),
    by_example(inner, cotangent, b),
  )


_product.defvjp(_forward, _backward)
