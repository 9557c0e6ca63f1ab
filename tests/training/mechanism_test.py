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
from tests import cases
from tests.cases import DATA, B
from tests.core import seams

prism = functools.partial(prism_optax.prism, 0.1)
dp_muon = functools.partial(prism_optax.dp_muon, 0.1)
REST = prism_optax.scale_by_learning_rate(0.1), prism_optax.retract()
PRIVATIZER = prism_optax.tangent_privatizer


def clip(k, factor=1.0, b=None):
  return prism_optax.intrinsic_clip(
    factor * k['l2_clip_norm'], normalize_by=b or k['expected_batch_size']
  )


def noise(k, factor=1.0):
  stddev = k['noise_multiplier'] * k['l2_clip_norm'] / k['expected_batch_size']
  return PRIVATIZER(factor * stddev, prng_key=k['prng_key'], steps=k['steps'])


def with_ones(key):
  return optax.stateless(lambda tree, _: jax.tree.map(lambda x: x + 1, tree))


def halved(stacks, state, step):
  return stacks._replace(others=tuple(x / 2 for x in stacks.others)), state


def chain(*parts, **options):
  """What `make_private` may be given: each part made of its constants."""

  def make(**k):
    made = [part(k) if part in (clip, noise) else part for part in parts]
    return prism_optax.chain(*made, *REST, **options)

  return make


def only_declared(grads, _):
  return transforms.clipped_elsewhere(
    jax.tree.map(lambda x: jnp.sum(x, 0), grads)
  )


def in_two_parts(grads, _):
  return {name: only_declared(x, _) for name, x in grads.items()}


def of_one_of_two_clips(grads, params):
  clips = (prism_optax.per_matrix_clip(x, normalize_by=B) for x in (1.0, 2.0))
  one, other = (x.update(grads, None, params)[0] for x in clips)
  return jax.lax.cond(params['head'][0] > 0, lambda: one, lambda: other)


def dense(sums):
  """The noise of dp_muon on sums that something else makes."""

  def make(l2_clip_norm, **k):
    noise = dp_muon(per_example_gradients=False, **k)
    return optax.chain(optax.stateless(sums), noise)

  return make


def twice(**k):
  """Both noises on one sum, the mean of which has less of it."""
  first, one, other = clip(k), noise(k), noise(k)

  def init(params):
    return first.init(params), one.init(params), other.init(params)

  def update(grads, state, params, **extra):
    total, after = first.update(grads, state[0], params, **extra)
    a, second = one.update(total, state[1], params)
    b, third = other.update(total, state[2], params)
    return optax.tree.add(a, b), (after, second, third)

  return optax.GradientTransformationExtraArgs(init, update)


def in_a_loop(**k):
  first, second = clip(k), noise(k)

  def init(params):
    return first.init(params), second.init(params)

  def update(grads, state, params, **extra):
    total, after = first.update(grads, state[0], params, **extra)

    def again(_, carry):
      return second.update(total, carry[1], params)

    zeros = optax.tree.zeros_like(params)
    updates, noisy = jax.lax.fori_loop(0, 2, again, (zeros, state[1]))
    return updates, (after, noisy)

  return optax.GradientTransformationExtraArgs(init, update)


def traced(part):
  """The chain, in which a number of this part is no constant."""

  def make(**k):
    return optax.inject_hyperparams(
      lambda x: optax.chain(
        clip(k, x if part is clip else 1.0),
        noise(k, x if part is noise else 1.0),
        *REST,
      )
    )(x=1.0)

  return make


NOT_OURS = 'noise at .* is not of this package'
REFUSED = {
  'noise elsewhere': (
    chain(clip, noise_elsewhere=True),
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
  'coordinates in place of updates': (
    lambda **k: optax.chain(clip(k), noise(k), REST[0]),
    r'got tangent coordinates: end its chain with prism_optax\.retract',
  ),
  'another divisor': (
    lambda **k: prism_optax.chain(clip(k, b=B / 4), noise(k), *REST),
    r'got one of 0\.25:',
  ),
  # Of each kind that proofs/release_test.py finds not to be ours.
  'noise of its own': (
    chain(
      clip, transforms.tangent_transformation('own', halved, adds_noise=True)
    ),
    NOT_OURS,
  ),
  'a clip that is only declared': (
    lambda **k: optax.chain(optax.stateless(only_declared), noise(k), *REST),
    r'stands|not known to be clipped',
  ),
  'noise that is not directly after the clip': (
    lambda **k: optax.chain(clip(k), optax.scale(0.5), noise(k), *REST),
    r'Between a clip and the noise at \w+\.py:\d+ stands `\w+` at',
  ),
  'noise on the sum of one of two clips': (
    dense(of_one_of_two_clips), r'Between a clip and the noise at \w+\.py:',
  ),
  'one sum for two noises': (twice, r'to be added 1 times in a step, got 2'),
  'noise in a loop': (
    in_a_loop, r'added in a loop, at \w+\.py:\d+.*: each time is a release',
  ),
  'noise on a declared sum': (
    dense(only_declared), r'declared at \w+\.py:.* is not known to be clipped',
  ),
  'noise on the sums of two clips': (
    dense(in_two_parts), r'Expected one clip before the noise at \w+\.py:',
  ),
  'a traced size': (traced(noise), r'None is one that is traced'),
  'a traced clip norm': (traced(clip), r'clip norm at .* is traced, so that'),
}  # fmt: skip


@pytest.mark.parametrize('name', REFUSED)
def test_another_mechanism_is_refused(name):
  """Whatever it says of itself: by what its program does."""
  optimizer, message = REFUSED[name]
  with pytest.raises(ValueError, match=message) as error:
    cases.make(lambda **k: optimizer(**k))
  assert 'tangent_privatizer(noise_multiplier * l2_clip' in str(error.value)


def test_the_program_that_runs_is_compared_too():
  """An optimizer may write another program than when it was looked at."""
  factor = [1.0]

  def optimizer(**k):
    def chain_of():
      return prism_optax.chain(clip(k), noise(k, factor[0]), *REST)

    def update(*args, **extra):
      return chain_of().update(*args, **extra)

    return optax.GradientTransformationExtraArgs(chain_of().init, update)

  made = cases.make(optimizer)
  factor[0] = 0.5
  with pytest.raises(ValueError, match=r'training, 1, got one of 0\.5:'):
    cases.trained(made)


def test_one_sum_twice_in_the_tree_of_a_noise_is_refused():
  """The mean of both has less noise than is accounted for."""

  def optimizer(l2_clip_norm, **k):
    first = prism_optax.per_matrix_clip(
      l2_clip_norm, normalize_by=k['expected_batch_size']
    )
    doubled = optax.stateless(lambda sums, _: dict.fromkeys('ab', sums['a']))
    second = dp_muon(per_example_gradients=False, **k)
    return optax.chain(first, doubled, second)

  with pytest.raises(ValueError, match='directly after the clip'):
    cases.make(
      optimizer,
      loss=lambda params, x: jnp.sum(params['a'] + params['b'] * x),
      params=dict.fromkeys('ab', jnp.zeros(3)),
    )


@pytest.mark.parametrize(
  ('factor', 'rest', 'options', 'message'),
  [
    (0.5, REST, {}, r'training, 1, got one of 0\.5:'),
    (1.0, (), {'retract_elsewhere': True}, r'end its chain with .*retract\(\)'),
  ],
)
def test_other_mechanisms_after_another_rule(factor, rest, options, message):
  def optimizer(per_example_gradients, **k):
    return prism_optax.chain(noise(k, factor), *rest, **options)

  with pytest.raises(ValueError, match=message):
    cases.make(optimizer, clipping=training.AutomaticClipping())


NORMS = {'head': 0.3, 'layer': {'lora_a': 2.0, 'lora_b': 0.7}}
LEAST = {'noise_split': 'least_energy', 'l2_clip_norms': NORMS}
LABELS = {'head': 'a', 'layer': 'b'}
ACCEPTED = {
  'prism': (prism, None),
  'published': (functools.partial(prism_optax.published_prism, 0.1), None),
  'muon on the manifold': (functools.partial(contrib.prism_muon, 0.1), None),
  'dp_muon': (dp_muon, None),
  'least energy': (functools.partial(dp_muon, **LEAST), None),
  'dense': (optax.adam(0.1), None),
  'automatic': (prism, training.AutomaticClipping()),
  'quantile': (prism, training.QuantileClipping()),
  'dense quantile': (optax.sgd(0.1), training.QuantileClipping()),
  'groups': (
    optax.sgd(0.1), training.GroupClipping(LABELS, {'a': 1.0, 'b': 2.0}),
  ),
  'a chain of optax': (
    lambda **k: optax.chain(clip(k), noise(k), *REST), None,
  ),
}  # fmt: skip


@pytest.mark.parametrize('name', ACCEPTED)
def test_what_is_seen_is_what_is_accounted_for(name):
  """The joint multiplier, from the program, to rounding of a few products."""
  optimizer, rule = ACCEPTED[name]
  made = cases.make(optimizer, noise_multiplier=0.8, clipping=rule)
  assert made.parts.releases_per_step == 1 + ('quantile' in name)
  assert math.isclose(seams.noise_multiplier_seen(made), 0.8, rel_tol=1e-12)


def test_stacked_matrices_are_groups_of_their_own():
  """The K matrices of a stack together: sigma, not sigma sqrt(K)."""
  stacks = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
  made = cases.make(
    functools.partial(dp_muon, weight_dimension_numbers={'w': stacks}),
    loss=lambda params, x: jnp.sum(params['w'] * x),
    params={'w': jnp.zeros((3, 5, 4))},
    noise_multiplier=0.7,
  )
  assert math.isclose(seams.noise_multiplier_seen(made), 0.7, rel_tol=1e-12)


@pytest.mark.parametrize('name', ['noise of another size', 'noise elsewhere'])
def test_more_noise_passes_and_without_any_all_does(name):
  made = cases.make(
    lambda **k: prism_optax.chain(clip(k), noise(k, 1.5), *REST)
  )
  assert math.isclose(seams.noise_multiplier_seen(made), 1.5)
  cases.make(lambda **k: REFUSED[name][0](**k), noise_multiplier=0.0)


# The whole step, when the first one is done.


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
    cases.first_step(made)
  assert made.proofs == ()


def test_the_step_that_runs_is_proved_once():
  """With users and parts of padding passed over, which is an assumption."""
  made = cases.make(
    optax.sgd(0.1), dataset_size=100, examples_per_user=2, delta=1e-3,
    # Nothing is sampled, so that the statement is quick.
    expected_batch_size=100,
    execution=training.Execution(4, skip_padding=True),
  )  # fmt: skip
  before = made.statement()
  assert 'unit: one user with all records, at most 2' in before
  assert 'proved' not in before
  state = cases.first_step(made, users=np.arange(len(DATA[0])) // 2)
  independence, release = made.proofs
  assert independence, independence
  assert release, release
  assert 'depends on who was drawn' in release.assumptions[-1]
  assert made.statement(state).endswith(
    '; proved: no record acts on another, and nothing bypasses the noise'
  )


def centred(tree):
  return jax.tree.map(lambda x: x - jnp.mean(x, 0), tree)


HANDED_ON = {
  'a mean of the gradients': lambda given, extra: (
    centred(given.gradients(given.examples)), extra,
  ),
  'a mean in the function': lambda given, extra: (
    given._replace(gradients=lambda rows: centred(given.gradients(rows))),
    extra,
  ),
  'a mean of the records': lambda given, extra: (
    given._replace(examples=centred(given.examples)), extra,
  ),
  # A record that leaves would leave a clipped gradient of padding behind.
  'no padding': lambda given, extra: (
    given, extra | {'is_padding_example': None},
  ),
  # The same key for other records gives their difference away.
  'no digest': lambda given, extra: (given, extra | {'release_digest': None}),
}  # fmt: skip


@pytest.mark.parametrize('name', HANDED_ON)
def test_clip_and_noise_get_what_the_step_hands_on(name):
  """What was proved of the gradients holds for what the clip gets."""
  message = r'before the clip at mechanism_test\.py:\d+, which gets other'
  if name == 'no digest':
    message = r'The noise at mechanism_test\.py:\d+ would be the same for other'

  def make(*, l2_clip_norm, l2_clip_norms, **k):
    whole = dp_muon(l2_clip_norms=l2_clip_norms, **k)

    def update(given, state, params, **extra):
      if hasattr(given, 'gradients'):  # In the step that runs.
        given, extra = HANDED_ON[name](given, extra)
      return whole.update(given, state, params, **extra)

    return optax.GradientTransformationExtraArgs(whole.init, update)

  with pytest.raises(ValueError, match=message):
    cases.first_step(cases.make(make))
