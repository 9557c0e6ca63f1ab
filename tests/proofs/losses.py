"""Losses that keep examples apart, and losses that do not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

B, T, D, H, C = 6, 4, 8, 12, 5


def normal(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return rng.normal(size=shape).astype(np.float32)


def ids(*shape, top=3):
  return np.random.default_rng(1).integers(1, top, shape).astype(np.int32)


def copies(params, size=B):
  return jax.tree.map(lambda x: np.broadcast_to(x, (size, *x.shape)), params)


def problem(loss, size=B):
  """Parameters, inputs and labels that all losses here take."""
  p = {
    'a': normal(D, H), 'b': normal(H, C), 'b2': normal(D, C),
    'hh': normal(H, H),
    'table': normal(11, D), 'head': normal(D, C), 'kernel': normal(3, 3, 2, 6),
    'depthwise': normal(3, 3, 1, 6), **{n: normal(D, D) for n in 'qkv'},
  }  # fmt: skip
  x = {'lookup': ids(size, T, top=11), 'convolutions': normal(size, 8, 8, 2)}
  return p, x.get(loss.__name__, normal(size, T, D, seed=2)), ids(size)


# ---- Losses of one example.


def mlp(p, x, y):
  h = jax.nn.gelu(jnp.tanh(x @ p['a']) @ p['b'])
  return optax.softmax_cross_entropy_with_integer_labels(h.mean(0), y)


def norm(x):
  centred = x - x.mean(-1, keepdims=True)
  return centred * lax.rsqrt(x.var(-1, keepdims=True) + 1)


def attention(p, x, y):
  q, k, v = (x @ p[n] for n in 'qkv')
  z = norm(jax.nn.softmax(q @ k.T / 3) @ v)
  return optax.softmax_cross_entropy_with_integer_labels(z[0, :C], y)


def lookup(p, words, y):
  return -jax.nn.log_softmax(p['table'][words].mean(0) @ p['head'])[y]


def convolutions(p, x, y):
  numbers = {'dimension_numbers': ('NHWC', 'HWIO', 'NHWC')}
  z = lax.conv_general_dilated(x[None], p['kernel'], (1, 1), 'SAME', **numbers)
  z = lax.conv_general_dilated(
    jax.nn.relu(z), p['depthwise'], (1, 1), 'SAME', feature_group_count=6,
    **numbers,
  )  # fmt: skip
  z = nnx.max_pool(z, (2, 2), strides=(2, 2))
  return jnp.sum(nnx.avg_pool(z, (2, 2))) * y


def along(p, x, y):
  order = jnp.argsort(x @ p['a'], 0)
  return jnp.take_along_axis(x @ p['a'], order, 0)[0, y].sum()


def one_hot(p, x, y):
  return jnp.sum(jax.nn.one_hot(y, C) * jax.nn.log_softmax(x @ p['b2']))


def cumulated(p, x, y):
  z = lax.cumlogsumexp(x @ p['b2']) + lax.cumsum(x @ p['b2'])
  return jax.nn.logsumexp(z) - lax.top_k(z, 2)[0].sum() + y


def recurrent(p, x, y):
  def step(h, x):
    h = jnp.tanh(x @ p['a'] + h @ p['hh'])
    return h, h[0]

  h, outs = lax.scan(step, jnp.zeros(H), x)
  return h.sum() + outs.sum() + y


def rematerialized(p, x, y):
  return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ p['a'])).sum())(x) + y


def branches(p, x, y):
  z = lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x @ p['a'])
  return lax.switch(y, [jnp.sum, jnp.max, jnp.min], z)


def sliced(p, x, y):
  z = lax.dynamic_update_slice(x, x[:2] @ p['hh'][:D, :D], (y, 0))
  z = z.at[y].add(1.0).at[:, 0].set(0)
  return jnp.flip(jnp.pad(lax.dynamic_slice(z, (y, 0), (2, D)), 1)).sum()


def dropout(p, x, y):
  key = jax.random.fold_in(jax.random.key(0), y)
  return jnp.sum(x * jax.random.bernoulli(key, 0.5, x.shape) @ p['a'])


def solved(p, x, y):
  a = x.T @ x + jnp.eye(D)
  order = lax.linalg.lu_pivots_to_permutation(lax.linalg.lu(a)[1], D)
  y = y + order[0]
  return jnp.linalg.solve(a, p['a'][:, 0]).sum() + jnp.linalg.slogdet(a)[1] + y


def decomposed(p, x, y):
  a = (x @ p['q']).T @ x + jnp.diag(jnp.arange(1.0, D + 1))
  largest = jnp.linalg.eigvalsh(a + a.T)[-1]
  values = jnp.linalg.svd(a, compute_uv=False)
  q, r = jnp.linalg.qr(a)
  lower = jnp.linalg.cholesky(a.T @ a + jnp.eye(D))
  return largest + values[0] + (q[0] + r[0]).sum() + lower[-1].sum() * y


def fourier(p, x, y):
  return jnp.abs(jnp.fft.rfft(x @ p['a'])).sum() + y


ONE = [
  mlp, attention, lookup, convolutions, along, one_hot, cumulated, recurrent,
  rematerialized, branches, sliced, dropout, solved, decomposed, fourier,
]  # fmt: skip


# ---- Losses of a batch that keep its examples apart.


def hand_mlp(p, x, y):
  h = jax.nn.gelu(jnp.einsum('btd,bdh->bth', x, p['a']))
  z = jnp.einsum('bth,bhc->bc', h, p['b'])
  return optax.softmax_cross_entropy_with_integer_labels(z, y)


def hand_indexed(p, x, y):
  z = jax.nn.log_softmax(jnp.einsum('btd,bdc->bc', x, p['b2']))
  rows = jnp.arange(len(y))
  return -z[rows, y] - z[rows.astype('uint32'), 0]


def hand_written(p, x, y):
  z = jnp.einsum('btd,bdh->bth', x, p['a'])
  z = z.at[:, 1].set(z[:, 0])
  place = jnp.arange(len(y)).reshape(-1, 1), y[:, None] + jnp.arange(2)
  rows = jnp.arange(len(y))[:, None]
  joined = jnp.concatenate([y[:, None], rows], 1)  # And joined once more.
  joined = jnp.concatenate([joined, jnp.zeros_like(rows)], 1)
  one = lax.GatherDimensionNumbers((), (0, 1, 2), (0, 1, 2))
  ones = lax.gather(z.swapaxes(0, 1), joined, one, (1, 1, 1))
  return z.at[place].set(0).sum((1, 2)) + z[place].sum((1, 2)) + ones


def hand_attention(p, x, y):
  """Tokens of all examples in one axis and back, batch in the middle."""
  flat = jnp.pad(x.reshape(-1, D), ((0, 0), (0, 1)))[:, :-1]
  heads = len(x), T, 2, D // 2
  q, k, v = (
    jnp.einsum('btd,bde->bte', flat.reshape(x.shape), p[n]).reshape(heads)
    for n in 'qkv'
  )
  weights = jax.nn.softmax(jnp.einsum('bqhd,bkhd->bhqk', q, k))
  z = norm(jnp.einsum('bhqk,bkhd->bqhd', weights, v).reshape(-1, D))
  z = z.reshape(x.shape).swapaxes(0, 1)
  whole = z.reshape(T * len(x), D).reshape(z.shape)
  return z.mean((0, 2)) + jnp.max(whole, (0, 2)) * y


def hand_scan(p, x, y):
  """Over tokens, with the batch behind."""
  h, _ = lax.scan(
    lambda h, x: (jnp.tanh(jnp.einsum('bd,bdh->bh', x, p['a']) + h), None),
    jnp.zeros((len(y), H)),
    x.swapaxes(0, 1),
  )
  return h.sum(1)


def cut_and_joined(p, x, y):
  x = jnp.tile(x[None], (2, 1, 2, 1))[0, :, :T]
  pairs = x.reshape(B // 2, 2, T, D)
  x = jnp.concatenate([pairs[:1], pairs[1:]]).reshape(x.shape)
  x = lax.dynamic_update_slice(x, x[:, 1:], (0, 0, 0))
  parts = jnp.split(x, 2)
  x = jnp.concatenate([parts[0], jnp.stack([x[3], x[4]]), x[5:]])
  apart = (
    lax.pad(x[i::2], 0.0, [(i, 1 - i, 1), *[(0,) * 3] * 2]) for i in (0, 1)
  )
  return hand_mlp(p, sum(apart), y)


def in_groups(p, x, y):
  """(B,) as (3, 2), one group after the other."""

  def group(rows):
    p, x, y = rows
    return hand_mlp(p, x, y)

  rows = jax.tree.map(lambda x: x.reshape(3, 2, *x.shape[1:]), (p, x, y))
  return lax.map(group, rows).reshape(-1)


def token_by_token(p, x, y):
  def added(t, total):
    token = lax.dynamic_index_in_dim(x, t, 1, keepdims=False)
    return total + jnp.einsum('bd,bdh->b', token, p['a'])

  return lax.fori_loop(0, T, added, jnp.zeros(B))


def one_by_one(p, x, y):
  rows = [(jax.tree.map(lambda x, i=i: x[i], p), x[i], y[i]) for i in range(B)]
  return jnp.stack([mlp(*row) for row in rows])


def taken_apart(p, x, y):
  """Numbers around constants, and the batch as channels of a kernel."""
  x, y = lax.optimization_barrier((x, y))
  numbers = jnp.unstack(x.sum((1, 2)))
  rows = [lax.pad(jnp.zeros(2), one, [(1, 1, 0)]).sum() for one in numbers]
  z = lax.conv(jnp.ones((1, T, D)), x, (1,), 'VALID')[0, :, 0]
  bytes_ = lax.bitcast_convert_type(x, jnp.uint8).sum((1, 2, 3))
  taus = x[:, :T, 0]
  turns = lax.linalg.householder_product(x.swapaxes(1, 2), taus).sum((1, 2))
  return (
    z * jnp.einsum('btd,bdh->b', x, p['a']) + jnp.stack(rows) + (turns + bytes_)
  )


HAND = [
  hand_mlp, hand_indexed, hand_written, hand_attention, hand_scan,
  cut_and_joined, in_groups, token_by_token, one_by_one, taken_apart,
]  # fmt: skip


# ---- Losses of a batch that mix them, and the primitive that does it.


def centred(p, x, y):
  return hand_mlp(p, x - x.mean(0), y)


def batch_norm(p, x, y):
  return hand_mlp(p, nnx.BatchNorm(D, rngs=nnx.Rngs(0))(x), y)


def divided_by_tokens(p, x, y):
  return hand_mlp(p, x, y) / jnp.sum(y == 1)


def capacity(p, x, y):
  """Experts that take three tokens of the batch each, in its order."""
  scores = jnp.einsum('btd,bdc->btc', x, p['b2'])
  choice = jax.nn.one_hot(jnp.argmax(scores, -1).reshape(-1), C)
  place = (jnp.cumsum(choice, 0) * choice).sum(-1).reshape(len(y), -1)
  return jnp.sum(jnp.where(place <= 3, scores.max(-1), 0), 1)


def dispatched(p, x, y):
  """One expert per example, by products with one-hot rows: 0 times NaN."""
  choice = jax.nn.one_hot(y, C)
  slots = jnp.einsum('be,btd->etd', choice, x)
  return jnp.einsum('be,etd,bdh->b', choice, jnp.tanh(slots), p['a'])


def rolled(p, x, y):
  return hand_mlp(p, jnp.roll(x, 1, 0), y)


def contrastive(p, x, y):
  z = jnp.einsum('btd,bdh->bh', x, p['a'])
  return optax.softmax_cross_entropy_with_integer_labels(
    z @ z.T, jnp.arange(len(y))
  )


@jax.custom_batching.custom_vmap
def secretly_centred(x):
  return x


@secretly_centred.def_vmap
def _(size, batched, x):
  return x - x.mean(0), True


def secret_of_one(p, x, y):
  """A loss of ONE record, whose rule for batches is another function."""
  return jnp.sum((secretly_centred(x) @ p['a']) ** 2)


def custom_vmap(p, x, y):
  return jax.vmap(lambda x: secretly_centred(x).sum())(x)


def sorted_batch(p, x, y):
  return jnp.sort(x, 0).sum((1, 2))


def index_of_another(p, x, y):
  return x[y].sum((1, 2))


def neighbour_by_index(p, x, y):
  return x[(jnp.arange(len(y)) + 1) % len(y), y].sum(1)


def turned_by_index(p, x, y):
  return x[jnp.flip(jnp.arange(len(y))), y].sum(1)


def first_rows_by_index(p, x, y):
  return jnp.tile(x[jnp.arange(3)].sum((1, 2)), 2)


def next_of_some(p, x, y):
  rows = jnp.arange(len(y))
  return x[jnp.where(rows < 3, rows + 1, rows)].sum((1, 2))


def computed_place(p, x, y):
  return jnp.zeros(len(y)).at[y].add(x.sum((1, 2)))


def counted_by_label(p, x, y):
  return jnp.zeros(C).at[y].add(1.0)[y]


def added_in_one_place(p, x, y):
  place = jnp.zeros(len(y), jnp.int32)
  return y + jnp.zeros(1).at[place].add(x.sum((1, 2)))


def argmax_over_batch(p, x, y):
  return x.sum((1, 2)) + jnp.argmax(x.sum((1, 2)))


def batch_as_kernel(p, x, y):
  """Its examples are channels over which a convolution adds up."""
  z = lax.conv(jnp.ones((1, len(y), D)), x.swapaxes(0, 1), (1,), 'VALID')
  return jnp.broadcast_to(z.sum(), y.shape)


def time_major(p, x, y):
  x = x.reshape(T, -1, D).swapaxes(0, 1)
  return jnp.einsum('btd,bdh->b', x, p['a'])


def shared_carry(p, x, y):
  return lax.scan(lambda c, x: (c + x.sum(), c + x.sum()), 0.0, x)[1]


def all_against_all(p, x, y):
  """A loop in a loop: the example of one round with that of another."""
  return lax.map(lambda a: lax.map(lambda b: (a * b).sum(), x).sum(), x)


def chosen_together(p, x, y):
  return lax.cond(jnp.any(x > 3), lambda: x.sum((1, 2)), lambda: x.mean((1, 2)))


def stopped_together(p, x, y):
  stop = lax.while_loop(lambda x: jnp.any(x > 1), lambda x: x / 2, x)
  return stop.sum((1, 2))


def first_copy(p, x, y):
  return jnp.einsum('btd,dh->b', x, p['a'][0])


def first_row(p, x, y):
  return jnp.einsum('btd,bdh->b', x + x[:1], p['a'])


def reversed_batch(p, x, y):
  return jnp.flip(x, 0).sum((1, 2))


def smoothed_batch(p, x, y):
  return lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), 'SAME').sum(
    (1, 2)
  )


def convolved_batch(p, x, y):
  z = lax.conv(x.sum(2).T[:, None], jnp.ones((1, 1, 3)), (1,), 'SAME')
  return z.sum((0, 1))


def padded_out(p, x, y):
  return jnp.pad(x, ((1, 0), (0, 0), (0, 0)))[:-1].sum((1, 2))


def padded_in_parts(p, x, y):
  z = jnp.pad(x.reshape(2 * B, -1), ((1, 0), (0, 0)))[:-1]
  return z.reshape(B, -1).sum(1)


def padded_between(p, x, y):
  z = lax.pad(x[:2], 0.0, [(0, 0, 1), *[(0,) * 3] * 2])
  return jnp.concatenate([z + x[::2], x[1::2]]).sum((1, 2))


def first_tokens(p, x, y):
  return x.reshape(-1, D)[:B].sum(1)


def gram_matrix(p, x, y):
  z = x.sum(1)
  return y + (z.T @ z).sum()


def permutation_of_the_batch(p, x, y):
  return lax.linalg.lu_pivots_to_permutation(y.astype('int32'), B) * 1.0


def spectrum_of_the_batch(p, x, y):
  return jnp.abs(jnp.fft.fft(x.sum((1, 2))))


def moved_by_a_window(p, x, y):
  there = (1, -1), (0, 0), (0, 0)
  z = lax.reduce_window(x, 0.0, lax.add, (1, 1, 1), (1, 1, 1), there)
  return z.sum((1, 2))


def summed_in_a_loop(p, x, y):
  def added(i, total):
    return total + lax.dynamic_index_in_dim(x, i, keepdims=False).sum()

  return y + lax.fori_loop(0, B, added, 0.0)


def place_of_one(p, x, y):
  return lax.dynamic_slice(x, (0, y[1], 0), (B, 1, D)).sum((1, 2))


def every_other(p, x, y):
  return jnp.concatenate([x[::2], x[1::2]]).sum((1, 2))


def centred_after_a_loop(p, x, y):
  rows, _ = lax.scan(lambda rows, t: (rows + t, None), jnp.zeros(B), x.sum(2).T)
  return rows - rows.mean()


def centred_after_a_branch(p, x, y):
  rows = lax.cond(
    jnp.ones(1)[0] > 0, lambda: x.sum((1, 2)), lambda: jnp.zeros(B)
  )
  return rows - rows.mean()


def centred_after_a_spectrum(p, x, y):
  rows = jnp.abs(jnp.fft.rfft(x)).sum((1, 2))
  return rows - rows.mean()


def centred_after_a_look_up(p, x, y):
  rows = jnp.arange(1.0, 1 + C)[y]
  return rows - rows.mean()


def centred_after_a_convolution(p, x, y):
  z = lax.conv(x.sum(2)[:, None], jnp.ones((1, 1, 3)), (1,), 'SAME')
  rows = z.sum((1, 2))
  return rows - rows.mean()


def centred_after_kernels(p, x, y):
  rows = lax.conv(jnp.ones((1, 1, T)), x.sum(2)[:, None], (1,), 'VALID')[
    0, :, 0
  ]
  return rows - rows.mean()


def centred_after_an_empty_part(p, x, y):
  rows = lax.split(x, (0, T), 1)[1].sum((1, 2))
  return rows - rows.mean()


def batch_as_channels(p, x, y):
  kernel = jnp.ones((1, len(y), 3))
  return y + lax.conv(x.sum(2)[None], kernel, (1,), 'SAME').sum()


MIXED = {
  centred_after_a_convolution: 'reduce_sum',
  centred_after_kernels: 'reduce_sum',
  batch_as_channels: 'conv_general_dilated',
  centred_after_an_empty_part: 'reduce_sum',
  centred_after_a_loop: 'reduce_sum', centred_after_a_branch: 'reduce_sum',
  centred_after_a_spectrum: 'reduce_sum', centred_after_a_look_up: 'reduce_sum',
  centred: 'reduce_sum', batch_norm: 'reduce_sum',
  divided_by_tokens: 'reduce_sum', capacity: 'cumsum',
  dispatched: 'dot_general', rolled: 'concatenate', contrastive: 'dot_general',
  custom_vmap: 'reduce_sum', sorted_batch: 'sort', index_of_another: 'gather',
  turned_by_index: 'gather',
  neighbour_by_index: 'gather', next_of_some: 'gather',
  first_rows_by_index: 'gather',
  counted_by_label: 'scatter-add', added_in_one_place: 'scatter-add',
  computed_place: 'scatter-add', argmax_over_batch: 'argmax',
  batch_as_kernel: 'conv_general_dilated', time_major: 'reshape',
  shared_carry: 'scan', all_against_all: 'mul', chosen_together: 'reduce_or',
  stopped_together: 'reduce_or', first_copy: 'dot_general', first_row: 'add',
  reversed_batch: 'rev', smoothed_batch: 'reduce_window_sum',
  convolved_batch: 'conv_general_dilated', padded_out: None, every_other: None,
  padded_in_parts: 'pad', padded_between: 'pad', first_tokens: 'slice',
  moved_by_a_window: 'reduce_window_sum', place_of_one: 'dynamic_slice',
  gram_matrix: 'dot_general', spectrum_of_the_batch: 'fft',
  permutation_of_the_batch: 'lu_pivots_to_permutation',
  summed_in_a_loop: 'dynamic_slice',
}  # fmt: skip
