"""Steps that let something of a record past the noise are refused."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import io_callback, pallas
from jax.extend import core

import prism_optax
from prism_optax import diagnostics, transforms
from tests.core import seams
from tests.training import mechanism_test as mechanism

LINES = pathlib.Path(__file__).read_text('utf-8').splitlines()

PARAMS = {'w': np.ones((3, 2), np.float32), 'bias': np.zeros(2, np.float32)}
CLIP = prism_optax.per_matrix_clip(1.0, normalize_by=4.0)
NOISE, NO_NOISE = (seams.gaussian(x, 0) for x in (0.5, 0.0))
TWO_STEPS = optax.MultiSteps(NOISE, 2)
X, PADDING = np.ones((6, 3), np.float32), np.arange(6) >= 4


def loss(params, x):
  return jnp.sum((x @ params['w'] + params['bias']) ** 2)


def gradients(params, x):
  return jax.vmap(jax.grad(loss), (None, 0))(params, x)


def mean_of(params, x, padding=None):
  """The clipped mean."""
  grads = gradients(params, x)
  return CLIP.update(
    grads, CLIP.init(params), params, is_padding_example=padding
  )[0]


def descended(params, updates):
  return jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)  # offence


def prove(step, *extra, state=None):
  """The proof of ``step(params, state, x, padding, *extra)``."""
  state = NOISE.init(PARAMS) if state is None else state
  return diagnostics.prove_released(
    step, PARAMS, state, X, PADDING, *extra, private=2, padding=3
  )


def private_step(params, state, x, padding):
  both = mean_of(params, x, padding), params
  mean, params = jax.lax.optimization_barrier(both)  # Of each its own label.
  noisy, state = NOISE.update(mean, state)
  return descended(params, noisy), state


def test_a_step_with_clip_and_noise_is_proved():
  proof = prove(jax.jit(private_step))
  assert proof, proof
  assert re.search(r'release at release_test.*deviation 0.5 on 2', str(proof))
  assert re.match(r'[1-9]\d+ equations: [1-9]', proof.trace[0])
  assert not any('drawn' in x for x in proof.assumptions)


# What is refused: the line of the offence says so.


def returns_its_loss(params, state, x, padding):
  losses = jax.vmap(loss, (None, 0))(params, x)
  return *private_step(params, state, x, padding), jnp.mean(losses)  # offence


def keeps_a_statistic(params, state, x, padding):
  mean = state[1] * 0.9 + x.mean(0)  # offence
  new, noise = private_step(params, state[0], x, padding)
  return new, (noise, mean)


def returns_a_record(params, state, x, padding):
  return *private_step(params, state, x, padding), x


def counts_the_drawn(params, state, x, padding):
  return *private_step(params, state, x, padding), jnp.sum(padding)  # offence


def divides_by_the_batch(params, state, x, padding):
  size = jnp.sum(~padding)
  mean = jax.tree.map(lambda g: g / size, mean_of(params, x))  # offence
  return NOISE.update(mean, state)


def drops_what_is_long(params, state, x, padding):
  mean = mean_of(params, x)
  long = jnp.abs(x).max() > 10
  mean = jax.tree.map(lambda g: jnp.where(long, 0, g), mean)  # offence
  return NOISE.update(mean, state)


def chooses_by_a_sum(params, state, x, padding):
  which = transforms.clipped_elsewhere(x[0].astype(jnp.int32))
  mean = mean_of(params, x)
  chosen = jax.lax.select_n(which[:2], mean['bias'], params['bias'])  # offence
  return NOISE.update({**mean, 'bias': chosen}, state)


def normalises_the_sum(params, state, x, padding):
  mean = mean_of(params, x)
  norm = jnp.sqrt(jnp.sum(mean['w'] ** 2))  # offence
  return NOISE.update(jax.tree.map(lambda g: g / norm, mean), state)


def counts_in_integers(params, state, x, padding):
  mean = jax.tree.map(
    lambda g: g.astype(int).astype(float),  # offence
    mean_of(params, x),
  )
  return NOISE.update(mean, state)


def does_not_clip(params, state, x, padding):
  grads = gradients(params, x)
  mean = jax.tree.map(lambda g: jnp.sum(g, 0) / 4.0, grads)  # offence
  return NOISE.update(mean, state)


def adds_no_noise(params, state, x, padding):
  return descended(params, mean_of(params, x)), state


def adds_noise_of_zero(params, state, x, padding):
  return NO_NOISE.update(mean_of(params, x), state)  # offence


def takes_its_noise_from_a_record(params, state, x, padding):
  key = jax.random.fold_in(state.inner, x[0, 0].astype(int))
  mean = mean_of(params, x)
  return NOISE.update(mean, state._replace(inner=key))  # offence


def accumulates_before_the_clip(params, state, x, padding):
  mean = jax.tree.map(lambda g: jnp.mean(g, 0), gradients(params, x))
  return TWO_STEPS.update(mean, state, params)  # offence


def accumulates_before_the_noise(params, state, x, padding):
  return TWO_STEPS.update(mean_of(params, x), state, params)  # offence


def decides_by_a_record(params, state, x, padding):
  new, state = private_step(params, state, x, padding)
  first = x[0, 0] > 0
  return jax.lax.cond(first, lambda: new, lambda: params), state  # offence


def loops_by_a_record(params, state, x, padding):
  halved = jax.lax.while_loop(  # offence
    lambda v: jnp.sum(v) > 1, lambda v: v / 2, x
  )
  return private_step(params, state, halved, padding)


def skips_what_is_not_finite(params, state, x, padding):
  guarded = optax.apply_if_finite(NOISE, 3)
  return guarded.update(mean_of(params, x), state, params)  # offence


def prints_a_norm(params, state, x, padding):
  jax.debug.print('{}', jnp.sum(x))  # offence
  return private_step(params, state, x, padding)


def writes_a_record(params, state, x, padding):
  io_callback(lambda v: None, None, x, ordered=True)  # offence
  return private_step(params, state, x, padding)


def calls_python(params, state, x, padding):
  x = jax.pure_callback(lambda v: v, jax.eval_shape(lambda: x), x)  # offence
  return private_step(params, state, x, padding)


def prints_in_a_branch_of_the_drawn(params, state, x, padding):
  jax.lax.cond(  # The line of the text alone, and whether it is printed.
    jnp.all(padding),
    lambda: jax.debug.print('nobody'),  # offence
    lambda: None,
  )
  return private_step(params, state, x, padding)


def branches_by_the_drawn(params, state, x, padding):
  nobody = jnp.all(padding)
  said = jax.lax.cond(nobody, lambda: 1, lambda: 0)  # offence
  return *private_step(params, state, x, padding), said


def counts_the_drawn_in_a_loop(params, state, x, padding):
  size = jnp.sum(padding)
  said = jax.lax.while_loop(lambda i: i < size, lambda i: i + 1, 0)  # offence
  return *private_step(params, state, x, padding), said


def divides_in_a_loop(params, state, x, padding):
  def body(total, _):
    size = jnp.sum(x)
    return jax.tree.map(lambda t: t / size, total), None  # offence

  mean, _ = jax.lax.scan(body, mean_of(params, x), length=3)
  return NOISE.update(mean, state)


def hides_a_loop_in_what_is_not_known(params, state, x, padding):
  def solve(matvec, b):
    return jax.lax.while_loop(  # offence
      lambda v: jnp.sum(v) > 1, lambda v: v / 2, b
    )

  y = jax.lax.custom_linear_solve(
    lambda v: v, x[0], solve, transpose_solve=solve
  )
  return private_step(params, state, x + y, padding)


def forgets_the_padding(params, state, x, padding):
  noisy, state = NOISE.update(mean_of(params, x), state)
  # Of no help to the clip.
  told = {'nonprivate_records': jnp.sum(~padding)}
  return descended(params, noisy), state, told


OFFENCES = {
  returns_its_loss: ('div', r'output\[2\] depends on records'),
  keeps_a_statistic: ('add', r'output\[1\]\[1\] depends'),
  returns_a_record: (None, r'an argument as it is: output\[2\]'),
  counts_the_drawn: ('reduce_sum', 'depends on records'),
  divides_by_the_batch: ('div', 'divide by the expected batch size'),
  drops_what_is_long: ('select_n', 'bound each record inside of the clip'),
  chooses_by_a_sum: ('select_n', 'bound each record inside of the clip'),
  normalises_the_sum: (r'\w+', 'noise directly after the clip'),
  counts_in_integers: ('convert_element_type', 'the clip and its noise'),
  does_not_clip: ('div', 'no clip bounds.*clipped_elsewhere'),
  adds_no_noise: ('sub', 'holds a clipped sum without noise'),
  adds_noise_of_zero: (None, 'standard deviation 0'),
  takes_its_noise_from_a_record: (None, 'key of noise depends on records'),
  accumulates_before_the_clip: ('add', 'no clip bounds'),
  accumulates_before_the_noise: (None, r'acc_grads.* clipped sum without'),
  decides_by_a_record: ('cond', 'which branch is run depends on records'),
  loops_by_a_record: ('while', 'how often a loop runs depends on records'),
  skips_what_is_not_finite: ('cond', 'which branch is run depends on records'),
  prints_a_norm: ('debug_', 'leaves the program'),
  writes_a_record: ('io_callback', 'leaves the program'),
  calls_python: ('pure_callback', 'leaves the program'),
  forgets_the_padding: (None, r'the clip at \S+:\d+ does not get `padding`'),
  prints_in_a_branch_of_the_drawn: ('debug_', 'leaves the program'),
  branches_by_the_drawn: ('cond', 'depends on records'),
  counts_the_drawn_in_a_loop: ('lt', 'depends on records'),
  divides_in_a_loop: ('div', 'between the clip and its noise'),
  hides_a_loop_in_what_is_not_known: ('while', 'how often a loop runs'),
}
STATES = {
  keeps_a_statistic: (NOISE.init(PARAMS), jnp.zeros(3)),
  accumulates_before_the_clip: TWO_STEPS.init(PARAMS),
  accumulates_before_the_noise: TWO_STEPS.init(PARAMS),
  skips_what_is_not_finite: optax.apply_if_finite(NOISE, 3).init(PARAMS),
}


@pytest.mark.parametrize('step', OFFENCES, ids=lambda x: x.__name__)
def test_what_passes_the_noise_is_refused(step):
  """The message names the primitive and its line."""
  primitive, words = OFFENCES[step]
  proof = prove(step, state=STATES.get(step))
  assert not proof
  assert re.search(words, proof.offence), proof.offence
  assert 'not proved' in str(proof)
  if primitive is not None:
    assert re.search(f'^`{primitive}', proof.offence), proof.offence
  lines = re.findall(r'release_test\.py:(\d+)', proof.offence)
  marked = [i for i in lines if '# offence' in LINES[int(i) - 1]]
  # A caller is named if it is another line.
  assert not re.search(
    r'(\w+\.py:\d+)[^,:]*, called at (None|\1)', proof.offence
  )
  without_line = (returns_a_record, forgets_the_padding)
  assert marked or step in without_line, proof.offence
  assert 'unknown line' not in proof.offence


# What is accepted.


def decides_by_what_is_drawn(params, state, x, padding):
  x = jax.lax.cond(jnp.all(padding), lambda: x, lambda: 2 * x)
  return private_step(params, state, x, padding)


def guards_what_is_released(params, state, x, padding):
  noisy, noise = NOISE.update(mean_of(params, x, padding), state[0])
  guarded = optax.apply_if_finite(optax.adam(0.1), 3)
  updates, inner = guarded.update(noisy, state[1], params)
  return optax.apply_updates(params, updates), (noise, inner)


def adds_parts_in_a_loop(params, state, x, padding):
  def body(total, part):
    return jax.tree.map(jnp.add, total, mean_of(params, *part)), None

  parts = x.reshape(2, 3, 3), padding.reshape(2, 3)
  zeros = optax.tree.zeros_like(PARAMS)
  return NOISE.update(jax.lax.scan(body, zeros, parts)[0], state)


def adds_noise_in_a_loop(params, state, x, padding):
  """One release, though it is looked at twice; zeros need no noise."""
  mean = mean_of(params, x, padding)
  zeros, _ = NO_NOISE.update(optax.tree.zeros_like(PARAMS), state)

  def body(carry, _):
    total = optax.tree.add(carry[0], mean)
    noisy, state = NOISE.update(total, carry[1])
    return (total, state), noisy

  (_, state), noisy = jax.lax.scan(body, (zeros, state), length=3)
  return noisy, state


def shapes_and_scales(params, state, x, padding):
  """All of it is linear, by public numbers."""
  mean = mean_of(params, x, padding)
  scaled = jnp.where(params['bias'] > 0, mean['w'] * 2, -mean['w'])
  scaled = scaled.at[0].add(scaled[1]).at[1].set(scaled[0])
  scaled = jax.lax.fori_loop(
    0, params['bias'][0].astype(int), lambda _, x: x + x, scaled
  )
  narrow = mean['bias'].astype('bfloat16').astype('float32')
  joined = jnp.concatenate([scaled.T.ravel()[1:], narrow])
  joined = jax.lax.dynamic_slice(jnp.pad(joined, 1), (1,), (7,))
  return NOISE.update((params['w'] @ mean['w'].T, joined[::-1].sum()), state)


def chooses_under_vmap(params, state, x, padding):
  """A choice, not control flow: both are computed."""

  def of_one(v):
    return jax.lax.cond(v[0] > 0, lambda: v, lambda: -v)

  return private_step(params, state, jax.vmap(of_one)(x), padding)


def runs_a_kernel(params, state, x, padding):
  """What it writes to is a part of its results."""

  def double(x, out):
    out[...] = 2 * x[...]

  x = pallas.pallas_call(double, jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
  return private_step(params, state, x, padding)


@pytest.mark.parametrize(
  'step',
  [
    runs_a_kernel,
    decides_by_what_is_drawn,
    guards_what_is_released,
    adds_parts_in_a_loop,
    adds_noise_in_a_loop,
    shapes_and_scales,
    chooses_under_vmap,
  ],
  ids=lambda x: x.__name__,
)
def test_what_does_not_pass_the_noise_is_accepted(step):
  state = None
  if step is guards_what_is_released:
    inner = optax.apply_if_finite(optax.adam(0.1), 3).init(PARAMS)
    state = NOISE.init(PARAMS), inner
  proof, drawn = prove(step, state=state), step is decides_by_what_is_drawn
  assert proof, proof
  assert len(proof.assumptions) == 2 + drawn, proof
  (release,) = (x for x in proof.trace if 'a release at' in x)
  assert ('in a loop' in release) is (step is adds_noise_in_a_loop)
  assert ('depends on who was drawn' in proof.assumptions[-1]) is drawn


def test_names_for_local_eyes_are_listed():
  def step(params, state, x, padding):
    out = private_step(params, state, x, padding)
    return {'new': out, 'nonprivate_loss': jnp.mean(x), 'public': params}

  def under_another_name(*args):
    return {'not_nonprivate_loss': step(*args)['nonprivate_loss']}

  proof = prove(step)
  assert proof, proof
  assert "output['nonprivate_loss'] stays with" in proof.assumptions[-1]
  assert not prove(under_another_name)


def test_what_other_libraries_do_is_declared():
  """Their clip and their noise, each named among the assumptions."""
  jax_privacy = pytest.importorskip('jax_privacy')
  theirs = jax_privacy.clipped_grad(
    loss, l2_clip_norm=1.0, normalize_by=4.0, batch_argnums=1,
    keep_batch_dim=False,
  )  # fmt: skip
  noise = jax_privacy.noise_addition.gaussian_privatizer(
    stddev=0.5, prng_key=jax.random.key(0)
  )

  def step(params, state, x, padding, *, declared=True, told=True):
    padding = {'is_padding_example': padding} if told else {}
    grads = theirs(params, x, **padding)
    if declared:
      grads = transforms.clipped_elsewhere(grads)
      return transforms.noised_elsewhere(noise).update(grads, state)
    return noise.update(grads, state)

  state = noise.init(PARAMS)
  proof = prove(step, state=state)
  assert proof, proof
  assert 'clipped elsewhere is clipped' in proof.assumptions[-2]
  assert 'noise that is not of this package' in proof.assumptions[-1]
  assert 'unknown size' in proof.trace[-1]
  assert not prove(lambda *args: step(*args, declared=False), state=state)
  proof = prove(lambda *args: step(*args, told=False), state=state)
  assert 'does not use `padding`, so rows of padding' in proof.offence


PAIR = {'lora_a': jnp.eye(3, 2), 'lora_b': jnp.ones((2, 2))}
FOREIGN = {
  'privatizer': prism_optax.tangent_privatizer(
    privatizer=mechanism.with_ones(None), steps=3
  ),
  'correlated': prism_optax.correlated_tangent_privatizer(
    mechanism.with_ones, steps=3
  ),
  'own': transforms.tangent_transformation(
    'own', lambda stacks, state, step: (stacks, state), adds_noise=True
  ),
}


@pytest.mark.parametrize('name', FOREIGN)
def test_noise_that_is_not_ours_is_an_assumption(name):
  clip = prism_optax.intrinsic_clip(1.0)
  tx = prism_optax.chain(clip, FOREIGN[name], *mechanism.REST)

  def loss(params, x):
    return jnp.sum((x @ params['lora_a'] @ params['lora_b']) ** 2)

  def step(params, state, x):
    grads = jax.vmap(jax.grad(loss), (None, 0))(params, x)
    return tx.update(grads, state, params)

  args = PAIR, jax.eval_shape(tx.init, PAIR), jax.ShapeDtypeStruct((6, 3), 'f')
  proof = diagnostics.prove_released(step, *args, private=2)
  assert proof, proof
  assert 'noise that is not of this package' in proof.assumptions[-1]


@pytest.mark.parametrize('positions', [(), 4, -1, True, (2, 2)])
def test_positions_that_do_not_fit(positions):
  with pytest.raises(ValueError, match='private'):
    diagnostics.prove_released(
      private_step, PARAMS, NOISE.init(PARAMS), X, PADDING, private=positions
    )
  with pytest.raises(ValueError, match='padding=2'):
    diagnostics.prove_released(
      private_step, PARAMS, None, X, PADDING, private=2, padding=2
    )


def test_a_primitive_that_is_not_known_makes_private():
  unknown = core.Primitive('unknown')
  unknown.def_abstract_eval(lambda x: x)

  def step(params, state, x, padding):
    mean = jax.tree.map(unknown.bind, mean_of(params, x, padding))
    return NOISE.update(mean, state)

  assert prove(step).offence.startswith('`unknown`')
