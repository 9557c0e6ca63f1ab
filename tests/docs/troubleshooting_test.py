"""The page on troubleshooting quotes real messages: each is provoked here."""

import pathlib
import re
import sqlite3

import dp_accounting
import jax
import jax.numpy as jnp
import optax
import pytest
from jax_privacy import noise_addition

import prism_optax
from prism_optax import accounting, inference, lora

PAGE = (
  pathlib.Path(__file__).parents[2] / 'docs' / 'troubleshooting.md'
).read_text('utf-8')
QUOTED = dict(
  re.findall(r'^<!-- id: ([\w-]+) -->\n```text\n(.*?)^```$', PAGE, re.M | re.S)
)

CLIP = prism_optax.intrinsic_clip(1.0, normalize_by=4.0)
NOISE = prism_optax.tangent_privatizer(0.25, prng_key=0)


def pair(inputs=4, outputs=3, rank=2, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(0))
  return {
    'lora_a': jax.random.normal(keys[0], (inputs, rank), dtype),
    'lora_b': jax.random.normal(keys[1], (rank, outputs), dtype),
  }


def per_example(params, size=2):
  return jax.tree.map(lambda x: jnp.ones((size, *x.shape), x.dtype), params)


def zeros_of(params):
  return optax.tree.zeros_like(params)


def dense_privatizer(key, steps=2):
  return noise_addition.matrix_factorization_privatizer(
    jnp.eye(steps), stddev=1.0, prng_key=key
  )


def traced(function, *args):
  """Messages about shapes and names need no values, and no compilation."""
  return jax.eval_shape(function, *args)


def with_ones(steps):
  """A privatizer that adds ones, for so many updates."""
  ones = optax.stateless(lambda tree, _: jax.tree.map(lambda x: x + 1, tree))
  return prism_optax.tangent_privatizer(privatizer=ones, steps=steps)


def update_beyond_the_steps():
  params, tx = pair(), with_ones(1)
  state = traced(tx.init, params)._replace(count=1, inner=optax.EmptyState())
  tx.update(zeros_of(params), state, params)


def spend_too_much():
  budget = accounting.PrivacyBudget(1.0, 1e-5)
  for _ in range(3):
    budget.spend(dp_accounting.GaussianDpEvent(4.8448), 'alice')


def open_ledger(folder, epsilon=1.0, create=False):
  return accounting.PrivacyBudget(
    epsilon, 1e-5, path=folder / 'ledger.sqlite', create=create
  )


def reopen(folder, **options):
  open_ledger(folder, create=True)
  open_ledger(folder, **options)


def reopen_edited(folder, statement):
  budget = open_ledger(folder, create=True)
  budget.spend(dp_accounting.GaussianDpEvent(4.8448), 'alice')
  with sqlite3.connect(folder / 'ledger.sqlite') as connection:
    connection.execute(statement)
  open_ledger(folder)


def load_another_rank(folder):
  lora.save_peft(folder, {'q': pair()})
  loaded = lora.load_peft(folder)
  lora.from_peft(loaded, {'q': pair(rank=1)})


PROVOKED = {
  'no-pair': lambda _: traced(CLIP.init, {'kernel': jnp.ones((4, 3))}),
  'stray-factor': lambda _: traced(CLIP.init, {'lora_a': jnp.ones((4, 2))}),
  'several-readings': lambda _: lora.describe_pairs(
    {'w_lora_a': jnp.ones((4, 2, 2)), 'w_lora_b': jnp.ones((2, 2, 3))}
  ),
  'no-fit': lambda _: traced(CLIP.init, 
    {'lora_a': jnp.ones((2, 4)), 'lora_b': jnp.ones((2, 3))}
  ),
  'no-retraction': lambda _: prism_optax.chain(
    CLIP, prism_optax.tangent_privatizer(0.1), optax.adamw(1e-3)
  ),
  'rank-too-large': lambda _: traced(CLIP.init, pair(outputs=2, rank=3)),
  'not-floating': lambda _: traced(
    CLIP.init, pair() | {'count': jnp.int32(0)}
  ),
  'both-zero': lambda _: CLIP.init(zeros_of(pair())),
  'no-params': lambda _: NOISE.update(pair(), None),
  'no-batch-axis': lambda _: CLIP.update(pair(), None, pair()),
  'masked-clip': lambda _: traced(
    optax.masked(CLIP, {'lora_a': True, 'lora_b': True, 'head': False}).init,
    pair() | {'head': jnp.ones(3)},
  ),
  'padding-length': lambda _: traced(
    lambda: CLIP.update(
      per_example(pair()), None, pair(), is_padding_example=jnp.zeros(3, bool)
    )
  ),
  'seed-under-jit': lambda _: jax.jit(
    prism_optax.tangent_privatizer(1.0).init
  )(pair()),
  'old-key': lambda _: prism_optax.tangent_privatizer(
    1.0, prng_key=jax.random.PRNGKey(0)
  ),
  'full-rank-start': lambda _: prism_optax.correlated_tangent_privatizer(
    dense_privatizer, steps=2, prng_key=0
  ).init(pair() | {'lora_b': jnp.zeros((2, 3))}),
  'no-steps': lambda _: prism_optax.tangent_privatizer(
    privatizer=dense_privatizer(jax.random.key(0))
  ),
  'beyond-steps': lambda _: update_beyond_the_steps(),
  'unreachable': lambda _: accounting.calibrate_noise_multiplier(
    1e-6, 1e-9, 0.01, 100
  ),
  'no-analysis': lambda _: accounting.epsilon(
    accounting.dpsgd_event(1.0, 0.01, 10), 1e-5, accountant='rdp',
    neighboring_relation=accounting.NeighboringRelation.REPLACE_ONE,
  ),
  'truncated-alone': lambda _: accounting.dpsgd_event(
    1.0, 0.01, 10, truncated_batch_size=64
  ),
  'budget': lambda _: spend_too_much(),
  'large-delta': lambda _: accounting.epsilon(
    accounting.dpsgd_event(1.0, 0.01, 10), 1e-3, dataset_size=1000
  ),
  'no-ledger': open_ledger,
  'ledger-exists': lambda folder: reopen(folder, create=True),
  'changed-ledger': lambda folder: reopen_edited(
    folder, 'UPDATE ledger SET count = 0'
  ),
  'old-ledger': lambda folder: reopen_edited(
    folder, """UPDATE settings SET value = '{"version": 0}'"""
  ),
  'other-ledger': lambda folder: reopen(folder, epsilon=2.0),
  'classic': lambda _: inference.gaussian_stddev(
    20.0, 1e-5, 1.0, method='classic'
  ),
  'canonicalize-jit': lambda _: jax.eval_shape(lora.canonicalize, pair()),
  'peft-others': lambda folder: lora.save_peft(
    folder, {'q': pair(), 'head': jnp.ones(3)}
  ),
  'peft-rank': load_another_rank,
}  # fmt: skip


def test_the_page_and_the_provocations_are_the_same():
  assert set(QUOTED) == set(PROVOKED)
  assert PAGE.count('<!-- id: ') == len(QUOTED)


@pytest.mark.parametrize('name', PROVOKED)
def test_the_message_is_as_quoted(name, tmp_path):
  with pytest.raises((ValueError, RuntimeError, OSError)) as caught:
    PROVOKED[name](tmp_path)
  message, start = ' '.join(str(caught.value).split()), 0
  for piece in QUOTED[name].split('...'):
    piece = ' '.join(piece.split())
    found = message.find(piece, start)
    assert found >= 0, f'{piece!r} is not in {message!r}'
    start = found + len(piece)
