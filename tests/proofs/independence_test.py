"""What is proved, what is refused, and that nothing that is proved mixes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from prism_optax import diagnostics, lora
from tests.proofs import losses as cases
from tests.proofs import oracle
from tests.proofs.losses import B, D, T, copies, normal, problem

prove = diagnostics.prove_independent
PER_ROW = (None, 0, 0)


def of_one(loss):
  """The ways in which a loss of one example becomes a function of a batch."""
  mapped = jax.vmap(loss)
  return {
    'losses': (jax.vmap(loss, PER_ROW), PER_ROW),
    'losses of copies': (lambda p, *rows: mapped(copies_of(p), *rows), PER_ROW),
    'gradients by vmap': (jax.vmap(jax.grad(loss), PER_ROW), PER_ROW),
    'gradients by one backward pass': (by_one_pass(mapped), PER_ROW),
    'one after the other': (
      lambda p, *rows: lax.map(lambda row: loss(p, *row), rows),
      PER_ROW,
    ),
    'two at a time': (
      lambda p, *rows: lax.map(lambda row: loss(p, *row), rows, batch_size=2),
      PER_ROW,
    ),
  }


def copies_of(p):
  return jax.tree.map(lambda x: jnp.broadcast_to(x, (B, *x.shape)), p)


def by_one_pass(losses):
  of_batch = lora.per_example_gradients(lambda p, rows: losses(p, *rows))
  return lambda p, *rows: of_batch(p, rows)


@pytest.mark.parametrize('loss', cases.ONE, ids=lambda f: f.__name__)
def test_losses_of_one_example_are_proved(loss):
  for way, (function, axes) in of_one(loss).items():
    proof = prove(function, *problem(loss), in_axes=axes)
    assert proof, f'{way}: {proof}'


@pytest.mark.slow
@pytest.mark.parametrize('loss', cases.ONE, ids=lambda f: f.__name__)
def test_what_is_proved_of_one_example_does_not_mix(loss):
  ways = ['gradients by vmap', 'gradients by one backward pass']
  if loss in (cases.solved, cases.decomposed):
    # LAPACK's products differ in the last bit by what lies beside them.
    ways = []
  for way in ways:
    function, axes = of_one(loss)[way]
    assert not oracle.mixes(function, *problem(loss), in_axes=axes), way


@pytest.mark.parametrize('losses', cases.HAND, ids=lambda f: f.__name__)
def test_losses_of_a_batch_are_proved(losses):
  p, *rows = problem(losses)
  for proof in (
    prove(losses, copies(p), *rows),
    prove(by_one_pass(losses), p, *rows, in_axes=PER_ROW),
  ):
    assert proof, proof


@pytest.mark.slow
@pytest.mark.parametrize('losses', cases.HAND, ids=lambda f: f.__name__)
def test_what_is_proved_of_a_batch_does_not_mix(losses):
  p, *rows = problem(losses)
  assert not oracle.mixes(losses, copies(p), *rows)
  assert not oracle.mixes(by_one_pass(losses), p, *rows, in_axes=PER_ROW)


@pytest.mark.parametrize('losses', cases.MIXED, ids=lambda f: f.__name__)
def test_mixing_is_refused_by_primitive_and_line(losses):
  p, *rows = problem(losses)
  proof = prove(losses, copies(p), *rows)
  assert not proof
  assert 'Instead: ' in proof.offence
  primitive = cases.MIXED[losses]
  if primitive is None:
    return
  file = 'normalization.py' if losses is cases.batch_norm else 'losses.py'
  assert proof.offence.startswith(f'{primitive} at {file}:'), proof.offence


@pytest.mark.slow
@pytest.mark.parametrize('losses', cases.MIXED, ids=lambda f: f.__name__)
def test_what_is_refused_here_does_mix(losses):
  """So the oracle that agrees with the proofs is able to see it."""
  p, *rows = problem(losses)
  assert oracle.mixes(losses, copies(p), *rows)


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


def test_tokens_in_front_of_a_product_of_copies():
  """As many tokens as examples, so that no shape shows it."""

  def losses(p, x, swapped):
    x = x.swapaxes(0, 1) if swapped else x
    y = lora.per_example_product(x, p['lora_a'], p['lora_b'])
    return jnp.sum(y**2, (0, 2) if swapped else (1, 2))

  p = {'lora_a': normal(D, 2), 'lora_b': normal(2, 3)}
  for swapped in (False, True):
    function = by_one_pass(functools.partial(losses, swapped=swapped))
    proof = prove(function, p, normal(B, B, D), in_axes=(None, 0))
    assert bool(proof) is not swapped, proof


def test_generators_that_draw_for_all_keys_at_once():
  def drawn(words, impl):
    return jax.vmap(
      lambda w: jax.random.normal(jax.random.wrap_key_data(w, impl=impl), (3,))
    )(words)

  for impl, words in (('threefry2x32', 2), ('rbg', 4), ('unsafe_rbg', 4)):
    keys = jax.ShapeDtypeStruct((B, words), jnp.uint32)
    proof = prove(functools.partial(drawn, impl=impl), keys)
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
    (lambda x: x.sum(1) * CLOSED, False),
    (lambda x: jax.vmap(lambda x, c: x @ c)(x, CLOSED), False),
    (lambda x: jax.jit(lambda x: x.sum(1) + CLOSED)(x), False),
    (lambda x: lax.map(lambda r: r[0] @ r[1], (x, CLOSED)), False),
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


def test_a_closed_over_array_is_an_assumption():
  proof = prove(jax.jit(lambda x: x @ jnp.asarray(CLOSED).T), normal(B, T, D))
  assert any(f'float32[{B},{D}]' in x for x in proof.assumptions)


def test_an_argument_that_is_closed_over():
  x = jnp.asarray(normal(B, D))
  assert 'also an argument' in prove(lambda y: y.sum(1) + x.mean(), x).offence
  # What is the same for all may be both.
  assert prove(lambda w, y: y @ (w - x).sum(0), x, x + 1, in_axes=(None, 0))


def test_a_primitive_that_has_the_name_of_another():
  fake = core.Primitive('add')
  fake.def_abstract_eval(lambda x, y: x)
  proof = prove(lambda x: fake.bind(x, x), normal(B))
  assert 'add at independence_test.py' in proof.offence
  assert 'unknown primitive' in proof.offence


def test_callbacks_are_refused_with_and_without_a_batch():
  """They could remember what an earlier call was given."""
  shape = jax.ShapeDtypeStruct((B,), jnp.float32)
  proof = prove(lambda x: x + jax.pure_callback(lambda: 0, shape), normal(B))
  assert 'pure_callback' in proof.offence
  proof = prove(lambda x: jax.pure_callback(lambda x: x, shape, x), normal(B))
  assert 'pure_callback' in proof.offence


@pytest.mark.skipif(not hasattr(jax, 'new_ref'), reason='of newer versions')
def test_memory_is_refused():
  def remembered(x):
    ref = jax.new_ref(jnp.zeros(()))

    def add(i, _):
      ref[...] = ref[...] + x[i]

    lax.fori_loop(0, B, add, None)
    return x + ref[...]

  assert 'memory' in prove(remembered, normal(B)).offence


@pytest.mark.parametrize(
  ('function', 'message'),
  [
    (lambda x: x.T, r'along the axes \[1\]'),
    (lambda x: x.sum(), 'reduce_sum'),
    (lambda x: x[2:], 'from example 2'),
    (lambda x: jnp.broadcast_to(x[1], x.shape), 'from example 1'),
  ],
)
def test_outputs_that_have_the_batch_elsewhere(function, message):
  proof = prove(function, normal(B, B))
  assert not proof
  with pytest.raises(AssertionError, match=message):
    raise AssertionError(proof.offence)


def test_outputs_that_depend_on_no_example():
  assert prove(lambda x: {'a': x, 'b': jnp.ones(3), 'c': 1.0}, normal(B))


def test_what_is_mixed_and_not_returned():
  """Statistics that are thrown away harm nobody."""

  def function(x):
    x.mean(0)
    return jax.grad(lambda x: (x**2).sum())(x)

  assert prove(function, normal(B, D))


def test_only_shapes_are_looked_at():
  shape = jax.ShapeDtypeStruct((B, T), jnp.float32)
  proof = prove(lambda x: {'a': x.sum(1)}, shape)
  assert proof
  assert 'proved' in str(proof)
  assert 'reduce_sum' in str(proof)


@pytest.mark.parametrize(
  ('args', 'in_axes', 'message'),
  [
    (
      (np.ones((1, 2)),),
      0,
      r'at least 2 examples, got the first axes \[\(1,\)',
    ),
    ((np.ones(3), np.ones(4)), 0, r'\[\(3,\), \(4,\)\]'),
    ((1.0,), 0, r'\[\(\)\]'),
    ((np.ones(3),), None, r'got the first axes \[\]'),
    ((np.ones(3),), (0, 0), r'in_axes=\(0, 0\)'),
    ((np.ones(3),), 1, r'in_axes=1'),
  ],
)
def test_arguments_that_do_not_fit(args, in_axes, message):
  with pytest.raises(ValueError, match=message):
    prove(lambda *args: args, *args, in_axes=in_axes)
