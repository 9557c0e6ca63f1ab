"""What is proved, what is refused, and that nothing that is proved mixes."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.extend import core

from prism_optax import diagnostics, lora
from tests.proofs import losses as cases
from tests.proofs import oracle
from tests.proofs.losses import B, D, T, copies, normal, problem

prove = diagnostics.prove_independent
PER_ROW = (None, 0, 0)


def of_each(losses):
  return pytest.mark.parametrize('loss', losses, ids=lambda f: f.__name__)


def by_one_pass(losses):
  of_batch = lora.per_example_gradients(lambda p, rows: losses(p, *rows))
  return lambda p, *rows: of_batch(p, rows)


def of_one(loss):
  """The ways in which a loss of one example becomes a function of a batch."""
  mapped = jax.vmap(loss)
  return {
    'losses': jax.vmap(loss, PER_ROW),
    'losses of copies': lambda p, *rows: mapped(copies_of(p), *rows),
    'gradients by vmap': jax.vmap(jax.grad(loss), PER_ROW),
    'gradients by one backward pass': by_one_pass(mapped),
    'one after the other': lambda p, *rows: lax.map(
      lambda row: loss(p, *row), rows
    ),
    'two at a time': lambda p, *rows: lax.map(
      lambda row: loss(p, *row), rows, batch_size=2
    ),
  }


def copies_of(p):
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), p)


@of_each(cases.ONE)
def test_losses_of_one_example_are_proved(loss):
  for way, function in of_one(loss).items():
    proof = prove(function, *problem(loss), in_axes=PER_ROW)
    assert proof, f'{way}: {proof}'


@pytest.mark.slow
@of_each(cases.ONE)
def test_what_is_proved_of_one_example_does_not_mix(loss):
  if loss in (cases.solved, cases.decomposed):
    # LAPACK's products differ in the last bit by what lies beside them.
    return
  for way in ('gradients by vmap', 'gradients by one backward pass'):
    function = of_one(loss)[way]
    assert not oracle.mixes(function, *problem(loss), in_axes=PER_ROW), way


@of_each(cases.HAND)
def test_losses_of_a_batch_are_proved(loss):
  p, *rows = problem(loss)
  for proof in (
    prove(loss, copies(p), *rows),
    prove(by_one_pass(loss), p, *rows, in_axes=PER_ROW),
  ):
    assert proof, proof


@pytest.mark.slow
@of_each([*cases.HAND, *cases.MIXED])
def test_what_is_refused_mixes_and_what_is_proved_does_not(loss):
  """The oracle that agrees with the proofs is able to see it."""
  p, *rows = problem(loss)
  assert oracle.mixes(loss, copies(p), *rows) is (loss in cases.MIXED)
  if loss in cases.HAND:
    assert not oracle.mixes(by_one_pass(loss), p, *rows, in_axes=PER_ROW)


@of_each(cases.MIXED)
def test_mixing_is_refused_by_primitive_and_line(loss):
  p, *rows = problem(loss)
  proof = prove(loss, copies(p), *rows)
  assert not proof
  assert 'Instead: ' in proof.offence
  of_rounds = 'combines the example of one round of a loop' in proof.offence
  assert of_rounds is (loss is cases.all_against_all)
  assert 'unexpected' not in proof.offence  # Then a rule would be wrong.
  assert f'offence: {proof.offence}' in str(proof)
  if (primitive := cases.MIXED[loss]) is not None:
    file = 'normalization.py' if loss is cases.batch_norm else 'losses.py'
    assert proof.offence.startswith(f'{primitive} at {file}:'), proof.offence


@pytest.mark.parametrize(
  'layer',
  [
    partial(nnx.Linear, D, 5), partial(nnx.LayerNorm, D),
    partial(nnx.Conv, D, 6, (3,)), partial(nnx.GroupNorm, D, num_groups=2),
    partial(nnx.BatchNorm, D, use_running_average=True),
    partial(nnx.MultiHeadAttention, 2, D, decode=False),
    partial(nnx.RMSNorm, D),
  ],
)  # fmt: skip
def test_layers_of_flax(layer):
  """The encoder of tests/finetune has embeddings too."""
  graph, weights, others = nnx.split(layer(rngs=nnx.Rngs(0)), nnx.Param, ...)
  x = jax.ShapeDtypeStruct((B, T, D), jnp.float32)

  def outputs(weights, x):
    return nnx.merge(graph, weights, others)(x)

  def loss(weights, x):
    return jnp.sum(outputs(weights, x[None]) ** 2)

  axes = None, 0
  for function in (outputs, jax.vmap(jax.grad(loss), axes)):
    proof = prove(function, weights, x, in_axes=axes)
    assert proof, proof


def test_a_custom_derivative_is_seen_in_the_gradients_only():
  @jax.custom_vjp
  def odd(x):
    return x

  odd.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))

  def losses(p, x):
    return jnp.sin(odd(jnp.einsum('btd,bdh->b', x, p)))

  p, x = normal(D, 3), normal(B, T, D)
  of_losses = prove(losses, copies(p), x)
  assert of_losses
  assert 'custom derivative' in '\n'.join(of_losses.trace)
  of_gradients = prove(by_one_pass(losses), p, x, in_axes=(None, 0))
  assert 'reduce_sum at independence_test.py:' in of_gradients.offence


@pytest.mark.parametrize('swapped', [False, True])
def test_tokens_in_front_of_a_product_of_copies(swapped):
  """As many tokens as examples, so that no shape shows it."""

  def losses(p, x):
    x = x.swapaxes(0, 1) if swapped else x
    y = lora.per_example_product(x, p['lora_a'], p['lora_b'])
    return jnp.sum(y**2, (0, 2) if swapped else (1, 2))

  p = {'lora_a': normal(D, 2), 'lora_b': normal(2, 3)}
  proof = prove(by_one_pass(losses), p, normal(B, B, D), in_axes=(None, 0))
  assert bool(proof) is not swapped, proof


@pytest.mark.parametrize(
  ('impl', 'words'), [('threefry2x32', 2), ('rbg', 4), ('unsafe_rbg', 4)]
)
def test_generators_that_draw_for_all_keys_at_once(impl, words):
  def drawn(words):
    key = jax.random.wrap_key_data(words, impl=impl)
    return jax.random.normal(key, (3,))

  keys = jax.ShapeDtypeStruct((2, words), jnp.uint32)
  proof = prove(jax.vmap(drawn), keys)
  assert bool(proof) is (impl == 'threefry2x32'), proof


def test_a_loop_for_as_long_as_the_slowest_example():
  """Values are apart, time is not, and the proof says so."""

  def halved(x):
    return lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: x / 2, x).sum()

  proof = prove(jax.vmap(halved), normal(B, T))
  assert proof
  assert any('time' in x and 'while at' in x for x in proof.assumptions)
  fixed = prove(jax.vmap(lambda x: lax.fori_loop(0, 3, jnp.add, x)), normal(B))
  assert fixed
  assert not any('time' in x for x in fixed.assumptions)


CLOSED = normal(B, D, seed=3)


@pytest.mark.parametrize(
  ('function', 'fits'),
  [
    (lambda x: x.sum(1) * jnp.tanh(CLOSED), False),
    (lambda x: jax.vmap(lambda x, c: x @ c)(x, CLOSED), False),
    (lambda x: jax.jit(lambda x: x.sum(1) + CLOSED)(x), False),
    (lambda x: lax.map(lambda r: r[0] @ r[1], (x, CLOSED)), False),
    (lambda x: (x.sum(1).ravel() * jnp.ravel(CLOSED)).reshape(B, D), False),
    (lambda x: (x + CLOSED.mean(0)).sum((1, 2)), True),
    (lambda x: x @ CLOSED.T, True),  # A weight that happens to have B rows.
    (lambda x: (x.swapaxes(1, 2) @ CLOSED[:T]).sum((1, 2)), True),
    (lambda x: x.sum(1) + jnp.zeros((B, D)), True),
    (lambda x: (x.sum((1, 2))[:, None] * CLOSED[:, 0]).sum(1), True),
  ],
)
def test_rows_that_are_closed_over(function, fits):
  proof = prove(function, normal(B, T, D))
  assert bool(proof) is fits, proof
  if not fits:
    assert f'closed-over array float32[{B},{D}]' in proof.offence


def test_an_argument_that_is_closed_over():
  x = jnp.asarray(normal(B, D))
  proof = prove(lambda y: y.sum(1) + x.mean(), x)
  assert 'also an argument' in proof.offence
  assert proof.claim.endswith(f'in a batch of {B}')
  # What is the same for all may be both.
  assert prove(lambda w, y: y @ (w - x).sum(0), x, x + 1, in_axes=(None, 0))
  # Another array is an assumption.
  proof = prove(jax.jit(lambda y: y @ x.T), normal(B, T, D))
  assert any(f'float32[{B},{D}]' in x for x in proof.assumptions)


def remembered(x):
  ref = jax.new_ref(jnp.zeros(()))

  def add(i, _):
    ref[...] = ref[...] + x[i]

  lax.fori_loop(0, B, add, None)
  return x + ref[...]


FAKE = core.Primitive('add')  # It has the name of another one.
FAKE.def_abstract_eval(lambda x, y: x)
SHAPE = jax.ShapeDtypeStruct((B,), jnp.float32)
of_rows = partial(jnp.broadcast_to, shape=(B, B))


@pytest.mark.parametrize(
  ('function', 'messages'),
  [
    (
      lambda x: FAKE.bind(x, x),
      ['add at independence_test.py', 'unknown primitive'],
    ),
    # They could remember what an earlier call was given.
    (lambda x: x + jax.pure_callback(lambda: 0, SHAPE), ['pure_callback']),
    (lambda x: jax.pure_callback(lambda x: x, SHAPE, x), ['pure_callback']),
    pytest.param(
      remembered,
      ['memory'],
      marks=pytest.mark.skipif(
        not hasattr(jax, 'new_ref'), reason='Needs jax.new_ref.'
      ),
    ),
    # Outputs that have the batch elsewhere.
    (lambda x: x.sum(), ['reduce_sum']),
    (lambda x: x[2:], ['from example 2']),
    (lambda x: jnp.broadcast_to(x[1], x.shape), ['from example 1']),
    (
      lambda x: lax.cond(
        x.size > 3, lambda: of_rows(x), lambda: of_rows(x[:, None])
      ),
      ['branches', 'leave the batch along different axes'],
    ),
    # Places that are those of the rows, and are not known as such.
    (
      lambda x: x[lax.broadcasted_iota(int, (B, 2), 0).reshape(4, 3)],
      ['gather at independence_test.py', 'by a computed index'],
    ),
    # A rule that does not understand what it is given.
    (
      lambda x: lax.sort_p.bind(x, dimension=9, is_stable=True, num_keys=1)[0],
      ['sort at independence_test.py', 'is not understood (IndexError'],
    ),
  ],
)
def test_what_cannot_be_proved_is_named(function, messages):
  proof = prove(function, normal(B))
  assert not proof
  for message in messages:
    assert message in proof.offence, proof.offence


def test_an_output_that_has_the_batch_along_another_axis():
  assert 'along the axes [1]' in prove(lambda x: x.T, normal(B, B)).offence


def test_outputs_that_depend_on_no_example():
  assert prove(lambda x: {'a': x, 'b': jnp.ones(3), 'c': 1.0}, normal(B))


def test_a_program_that_is_called_twice_is_counted_once():
  sin = jax.jit(jnp.sin)
  proof = prove(lambda x: sin(x) + sin(jnp.ones(B)), normal(B))
  assert '1 sin' in proof.trace[2]


def test_what_is_mixed_and_not_returned():
  """Statistics that are thrown away harm nobody; only shapes are looked at."""

  def function(x):
    x.mean(0)
    return jax.grad(lambda x: (x**2).sum())(x), {'a': x.sum(1)}

  proof = prove(function, jax.ShapeDtypeStruct((B, T), jnp.float32))
  assert proof
  assert 'proved' in str(proof)
  assert 'reduce_sum' in str(proof)
