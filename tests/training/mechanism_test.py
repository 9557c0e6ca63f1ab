"""The clip and the noise of a training are read from its program."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import contrib, training, transforms
from prism_optax.training import _seen
from tests import cases
from tests.cases import DATA, FROZEN, PARAMS, B

prism = functools.partial(prism_optax.prism, 0.1)
dp_muon = functools.partial(prism_optax.dp_muon, 0.1)
REST = prism_optax.scale_by_learning_rate(0.1), prism_optax.retract()


def clip(k, factor=1.0):
  return prism_optax.intrinsic_clip(
    factor * k['l2_clip_norm'], normalize_by=k['expected_batch_size']
  )


def noise(k, factor=1.0, **options):
  stddev = k['noise_multiplier'] * k['l2_clip_norm'] / k['expected_batch_size']
  return prism_optax.tangent_privatizer(
    factor * stddev, prng_key=k['prng_key'], steps=k['steps'], **options
  )


def with_ones(key):
  return optax.stateless(lambda tree, _: jax.tree.map(lambda x: x + 1, tree))


def halved(stacks, state, step):
  return stacks._replace(others=tuple(x / 2 for x in stacks.others)), state


REFUSED = {
  'noise elsewhere': (
    lambda **k: prism_optax.chain(clip(k), *REST, noise_elsewhere=True),
    r'without the noise of this training: `\w+` at .* clipped sum without',
  ),
  'a bare clip': (
    lambda **k: prism_optax.per_matrix_clip(1.0, normalize_by=B),
    r'a clipped sum without noise',
  ),
  'noise of another size': (
    lambda **k: prism_optax.chain(clip(k), noise(k, 0.5), *REST),
    r'noise multiplier of this training, 1, got one of 0\.5:',
  ),
  'noise of no size': (
    lambda **k: prism_optax.chain(clip(k), noise(k, 0.0), *REST),
    r'noise of standard deviation 0 at \w+\.py:\d+',
  ),
  'a larger clip': (
    lambda **k: prism_optax.chain(clip(k, 2.0), noise(k), *REST),
    r'noise multiplier of this training, 1, got one of 0\.5:',
  ),
  'another divisor': (
    lambda **k: prism_optax.chain(
      prism_optax.intrinsic_clip(k['l2_clip_norm'], normalize_by=B / 4),
      noise(k),
      *REST,
    ),
    r'got one of 0\.25:',
  ),
  'noise of another library': (
    lambda **k: prism_optax.chain(
      clip(k),
      prism_optax.tangent_privatizer(privatizer=with_ones(None), steps=3),
      *REST,
    ),
    r'noise at \w+\.py:\d+ is not of this package',
  ),
  'correlated noise': (
    lambda **k: prism_optax.chain(
      clip(k),
      prism_optax.correlated_tangent_privatizer(with_ones, steps=3),
      *REST,
    ),
    r'is not of this package',
  ),
  'noise of its own': (
    lambda **k: prism_optax.chain(
      clip(k),
      transforms.tangent_transformation('own', halved, adds_noise=True),
      *REST,
    ),
    r'is not of this package',
  ),
  'a clip that is only declared': (
    lambda **k: optax.chain(
      optax.stateless(
        lambda g, _: transforms.clipped_elsewhere(
          jax.tree.map(lambda x: jnp.sum(x, 0), g)
        )
      ),
      noise(k),
    ),
    r'stands|not known to be clipped',
  ),
  'noise that is not directly behind': (
    lambda **k: optax.chain(clip(k), optax.scale(0.5), noise(k), *REST),
    r'Between a clip and the noise at \w+\.py:\d+ stands `\w+` at',
  ),
  'one sum for two noises': (
    lambda **k: twice(clip(k), noise(k), noise(k)),
    r'to be added 1 times in a step, got 2',
  ),
  'a traced size': (
    lambda **k: optax.inject_hyperparams(
      lambda stddev: optax.chain(
        clip(k),
        prism_optax.tangent_privatizer(stddev, prng_key=0),
      )
    )(stddev=1.0),
    r'None is one that is traced',
  ),
}


def twice(clip, one, other):
  """Both noises on one sum, the mean of which has less of it."""

  def init(params):
    return clip.init(params), one.init(params), other.init(params)

  def update(grads, state, params, **extra):
    total, first = clip.update(grads, state[0], params, **extra)
    a, second = one.update(total, state[1], params)
    b, third = other.update(total, state[2], params)
    return optax.tree.add(a, b), (first, second, third)

  return optax.GradientTransformationExtraArgs(init, update)


@pytest.mark.parametrize('name', REFUSED)
def test_another_mechanism_is_refused(name):
  """Whatever it says of itself: by what its program does."""
  optimizer, message = REFUSED[name]
  with pytest.raises(ValueError, match=message) as error:
    cases.make(lambda **k: optimizer(**k))
  assert 'tangent_privatizer(noise_multiplier * l2_clip' in str(error.value)


def test_too_little_noise_behind_another_rule_is_refused():
  def optimizer(per_example_gradients, **k):
    return prism_optax.chain(noise(k, 0.5), *REST)

  with pytest.raises(ValueError, match=r'training, 1, got one of 0\.5:'):
    cases.make(optimizer, clipping=training.AutomaticClipping())


ACCEPTED = {
  'prism': (prism, {}),
  'published': (functools.partial(prism_optax.published_prism, 0.1), {}),
  'muon on the manifold': (functools.partial(contrib.prism_muon, 0.1), {}),
  'dp_muon': (dp_muon, {}),
  'least energy': (
    functools.partial(
      dp_muon,
      noise_split='least_energy',
      l2_clip_norms={'head': 0.3, 'layer': {'lora_a': 2.0, 'lora_b': 0.7}},
    ),
    {},
  ),
  'dense': (optax.adam(0.1), {}),
  'automatic': (prism, {'clipping': training.AutomaticClipping()}),
  'quantile': (prism, {'clipping': training.QuantileClipping()}),
  'dense quantile': (optax.sgd(0.1), {'clipping': training.QuantileClipping()}),
  'groups': (
    optax.sgd(0.1),
    {
      'clipping': training.GroupClipping(
        {'head': 'a', 'layer': 'b'}, {'a': 1.0, 'b': 2.0}
      )
    },
  ),
  'a chain of optax': (
    lambda **k: optax.chain(clip(k), noise(k), *REST),
    {},
  ),
}


@pytest.mark.parametrize('name', ACCEPTED)
def test_what_is_seen_is_what_is_accounted_for(name):
  """The joint multiplier, from the program, to rounding of a few products."""
  optimizer, options = ACCEPTED[name]
  made = cases.make(optimizer, noise_multiplier=0.8, **options)
  seen = _seen.look(
    made.parts.transformation, made.parts.shapes, made.padded_batch_size
  )
  releases = made.parts.releases_per_step
  assert releases == 1 + ('quantile' in name)
  joint = _seen.joint_noise_multiplier(seen, releases)
  assert math.isclose(joint, 0.8, rel_tol=1e-12)


def test_stacked_matrices_are_groups_of_their_own():
  """The K matrices of a stack together: sigma, not sigma sqrt(K)."""
  params = {'w': jnp.zeros((3, 5, 4))}
  stacks = {
    'w': optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
  }
  tx = prism_optax.dp_muon(
    0.1, l2_clip_norms=2.0, noise_multiplier=0.7, expected_batch_size=8,
    weight_dimension_numbers=stacks,
  )  # fmt: skip
  shapes = jax.eval_shape(lambda: params)
  joint = _seen.joint_noise_multiplier(_seen.look(tx, shapes, 6), 1)
  assert math.isclose(joint, 0.7, rel_tol=1e-12)


@pytest.mark.parametrize('name', ['noise of another size', 'noise elsewhere'])
def test_more_noise_passes_and_without_any_all_does(name):
  def more(**k):
    return prism_optax.chain(clip(k), noise(k, 1.5), *REST)

  made = cases.make(more)
  seen = _seen.look(
    made.parts.transformation, made.parts.shapes, made.padded_batch_size
  )
  assert math.isclose(_seen.joint_noise_multiplier(seen, 1), 1.5)
  cases.make(lambda **k: REFUSED[name][0](**k), noise_multiplier=0.0)


# The whole step, when the first one is done.


def first_step(made, data=DATA, **options):
  state = made.init(PARAMS)
  batch = next(iter(made.batches(state, data, **options)))
  return made.step(state, batch, FROZEN)


def prints(params, frozen, x, y):
  jax.debug.print('{}', x[0])
  return cases.loss(params, frozen, x, y)


def loops(params, frozen, x, y):
  x = jax.lax.while_loop(
    lambda x: jnp.sum(x * x) > 9, lambda x: x / 2, jax.lax.stop_gradient(x)
  )
  return cases.loss(params, frozen, x, y)


@pytest.mark.parametrize(
  ('loss', 'message'),
  [
    (prints, r'`debug_\w+` at mechanism_test'),
    (loops, 'how often a loop runs'),
  ],
)
def test_a_loss_that_lets_something_out_is_refused(loss, message):
  made = cases.make(optax.sgd(0.1), loss=loss)
  with pytest.raises(ValueError, match=f'leaves the step.*{message}'):
    first_step(made)
  assert made.proofs == ()


def test_the_step_that_runs_is_proved_once():
  """With users and parts of padding passed over, which is an assumption."""
  made = cases.make(
    optax.sgd(0.1),
    dataset_size=100,
    # Nothing is sampled, so that the statement is quick.
    expected_batch_size=100,
    execution=training.Execution(4, skip_padding=True),
    examples_per_user=2,
    delta=1e-3,
  )
  assert 'proved' not in made.statement()
  users = np.arange(len(DATA[0])) // 2
  state = first_step(made, users=users)
  independence, release = made.proofs
  assert independence, independence
  assert release, release
  assert 'depends on who was drawn' in release.assumptions[-1]
  assert made.statement(state).endswith(
    '; proved: records do not meet, and nothing passes the noise'
  )


def test_without_noise_nothing_is_proved_of_it():
  made = cases.make(optax.sgd(0.1), noise_multiplier=0.0)
  assert 'passes' not in made.statement(first_step(made))
