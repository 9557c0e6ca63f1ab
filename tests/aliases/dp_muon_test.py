"""DP-Muon against the formulas of its source, and its joint accounting."""

import functools
import math

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import stats

from prism_optax import accounting, dp_muon, transforms
from prism_optax.transforms import _matrix_clip
from tests.oracles import muon_oracle

Dims = optax.contrib.MuonDimensionNumbers


def _fixed_noise(noises):
  """A privatizer that adds ``noises[t]``, in the units it is shown."""

  def update(updates, state, params=None):
    del params
    noise = jax.tree.map(lambda z: jnp.asarray(z)[state], noises)
    return jax.tree.map(jnp.add, updates, noise), state + 1

  return optax.GradientTransformation(lambda _: jnp.zeros((), int), update)


def _optimizer_of_the_source(clips, noises, batch, beta, degree, steps, eta):
  # In units of sqrt(K) C_W, K = 6, each matrix gets the noise sigma C_W / B.
  return dp_muon(
    eta,
    l2_clip_norms=clips,
    expected_batch_size=batch,
    momentum=beta,
    degree=degree,
    ns_steps=steps,
    weight_dimension_numbers={
      **dict.fromkeys(noises, Dims()), 'stack': Dims(1, 2)
    },
    privatizer=_fixed_noise(noises),
    steps='unlimited',
  )  # fmt: skip


@functools.partial(jax.jit, static_argnums=range(5, 10))
def _step_of_the_source(grads, state, params, clips, noises, *options):
  """Thresholds and noise are data, as the gradients are: all sizes, once."""
  tx = _optimizer_of_the_source(clips, noises, *options)
  updates, state = tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


@pytest.mark.parametrize('size', [0.01, 1.0, 50.0])
@pytest.mark.parametrize(
  ('beta', 'degree', 'steps'),
  [
    (0.95, 2, 5),
    # Each is a program of its own.
    *(
      pytest.param(*options, marks=pytest.mark.slow)
      for options in [(0.0, 1, 1), (0.5, 2, 5), (0.95, 3, 3), (0.9, 1, 8)]
    ),
  ],
)
def test_ten_steps_are_those_of_the_source(x64, beta, degree, steps, size):
  """Tall, wide, square and stacked matrices, with fixed noise.

  ``size`` scales thresholds and noise together: momenta of norm below one
  (max(1, .) leaves them) and far above.
  """
  shapes = {'tall': (7, 3), 'wide': (2, 5), 'square': (4, 4)}
  layers, batch, sigma, eta = 3, 6, 0.8, 0.1
  rng = np.random.default_rng(0)
  params = {k: rng.standard_normal(s) for k, s in shapes.items()}
  params['stack'] = rng.standard_normal((layers, 5, 6))
  clips = {'tall': 0.5, 'wide': 2.0, 'square': 1.0, 'stack': 0.7}
  clips = {k: size * c for k, c in clips.items()}
  names = [*shapes, *(('stack', i) for i in range(layers))]

  def at(tree, name, axis):
    if isinstance(name, str):
      return tree[name]
    return np.take(np.asarray(tree[name[0]]), name[1], axis)

  def clip_of(name):
    return clips[name if isinstance(name, str) else name[0]]

  noises = {k: rng.standard_normal((10, *p.shape)) for k, p in params.items()}
  gradients = {
    k: size * rng.standard_normal((10, batch, *p.shape)) / 2
    for k, p in params.items()
  }
  oracle = muon_oracle.DPMuon(
    [at(params, name, 0) for name in names],
    clips=[clip_of(name) for name in names],
    batch=batch,
    beta=beta,
    degree=degree,
    steps=steps,
    eta=eta,
  )
  given = {k: sigma / math.sqrt(6) / batch * z for k, z in noises.items()}
  options = batch, beta, degree, steps, eta
  state = _optimizer_of_the_source(clips, given, *options).init(params)
  norms = []
  for t in range(10):
    grads = {k: g[t] for k, g in gradients.items()}
    params, state = _step_of_the_source(
      grads, state, params, clips, given, *options
    )
    oracle.step(
      [at(gradients, name, 2)[t] for name in names],
      [
        sigma / batch * clip_of(name) * at(noises, name, 1)[t] for name in names
      ],
    )
    norms += [np.linalg.norm(m) for m in oracle.momenta]
  # All on one side of the max(1, .), or on both.
  assert {0.01: max(norms) < 1, 1.0: min(norms) < 1 < max(norms)}.get(
    size, min(norms) > 1
  )
  for name, expected in zip(names, oracle.thetas, strict=True):
    # The clip stops 8 eps below the threshold; ten steps in float64.
    np.testing.assert_allclose(at(params, name, 0), expected, atol=1e-12)


PARAMS = {
  'b': np.zeros(30, np.float32),
  'layers': np.zeros((2, 20, 30), np.float32),
  'w': np.zeros((40, 25), np.float32),
  'norm': np.zeros(10, np.float32),
}
SPECS = {'b': None, 'layers': Dims(1, 2), 'w': Dims(), 'norm': None}
CLIPS = {'b': 0.5, 'layers': 2.0, 'w': 1.0, 'norm': 0.5}


def _first_release(tx, batch=0):
  """What leaves the mechanism at the first step, read from the states."""
  grads = {k: np.zeros((batch, *p.shape), p.dtype) for k, p in PARAMS.items()}
  _, state = jax.device_get(
    jax.jit(lambda grads: tx.update(grads, tx.init(PARAMS), PARAMS))(grads)
  )
  moments = optax.tree.get_all_with_path(state, 'mu')
  (_, mu), *_ = [m for m in moments if jax.tree.leaves(m[1])]
  trace = optax.tree.get(state, 'trace')
  return {
    'layers': trace['layers'],
    'w': trace['w'],
    'b': mu['b'] / 0.1,
    'norm': mu['norm'] / 0.1,
  }


@pytest.mark.parametrize('noise_split', _matrix_clip.NOISE_SPLITS)
def test_noise_of_every_leaf_and_its_joint_multiplier(noise_split):
  """An empty batch too releases noise, of sigma_W C_W / B in every entry."""
  sigma, expected_batch = 1.3, 16.0
  tx = dp_muon(
    0.1,
    l2_clip_norms=CLIPS,
    noise_multiplier=sigma,
    expected_batch_size=expected_batch,
    prng_key=0,
    noise_split=noise_split,
    weight_dimension_numbers=SPECS,
  )
  release = _first_release(tx)
  budgets = {'layers': 2.0 * math.sqrt(600), 'w': 1.0 * math.sqrt(1000)}
  budgets['b'] = budgets['norm'] = 0.5 * math.sqrt(40)
  total = 2 * budgets['layers'] + budgets['w'] + budgets['b']
  measured = {}
  for k, z in release.items():
    ratio = 2.0 if noise_split == 'equal' else math.sqrt(total / budgets[k])
    expected = ratio * sigma * CLIPS[k] / expected_batch
    # Five relative standard errors of a standard deviation.
    tolerance = 5 / math.sqrt(2 * z.size)
    np.testing.assert_allclose(np.std(z), expected, rtol=tolerance)
    assert abs(np.mean(z)) < 5 * expected / math.sqrt(z.size)
    measured[k] = ratio * sigma
  groups = [measured['layers']] * 2 + [measured['w'], measured['b']]
  assert accounting.joint_noise_multiplier(groups) == pytest.approx(sigma)


def _canary_release(params, multiplier, clips):
  """Of keys and one record: the first releases, shape (runs, K, entries)."""

  def one(key, canary):
    tx = dp_muon(
      0.1,
      l2_clip_norms=clips,
      noise_multiplier=multiplier,
      expected_batch_size=1.0,
      prng_key=key,
      ns_steps=1,
    )
    _, state = tx.update(canary, tx.init(params), params)
    trace = optax.tree.get(state, 'trace')
    return jnp.stack([trace[k].ravel() for k in sorted(trace)])

  return jax.jit(jax.vmap(one, (0, None)))


def _epsilon_lower_bound(absent, present, delta, confidence=0.999):
  """Clopper and Pearson at a threshold chosen on one half of the runs."""
  half = len(absent) // 2

  def bound(a, p, threshold):
    false = stats.beta.ppf(confidence, (a > threshold).sum() + 1,
                           (a <= threshold).sum())  # fmt: skip
    true = stats.beta.ppf(1 - confidence, (p > threshold).sum(),
                          (p <= threshold).sum() + 1)  # fmt: skip
    return math.log(max(true - delta, 1e-12) / false)

  thresholds = np.quantile(absent[:half], [0.9, 0.99, 0.995, 0.999])
  best = max(thresholds, key=lambda t: bound(absent[:half], present[:half], t))
  return bound(absent[half:], present[half:], best)


@pytest.mark.slow  # 80,000 runs, and as many keys.
def test_a_canary_spread_over_all_matrices_respects_the_joint_epsilon():
  """And contradicts accounting that looks at one matrix alone.

  16 matrices at joint multiplier 1, so 4 for each: a single matrix would be
  (0.97, 1e-5)-private, all together are (4.4, 1e-5)-private.
  """
  groups, runs, delta = 16, 40_000, 1e-5
  params = {f'w{i:02}': jnp.zeros((2, 3)) for i in range(groups)}
  rng = np.random.default_rng(1)
  gradient = {k: rng.standard_normal((1, 2, 3)) * 1e3 for k in params}
  gradient = jax.tree.map(np.float32, gradient)
  zeros = jax.tree.map(np.zeros_like, gradient)
  keys = jax.random.split(jax.random.key(2), 2 * runs)
  clips = {k: 0.5 + i / groups for i, k in enumerate(sorted(params))}
  release = _canary_release(params, 1.0, clips)
  absent, present = release(keys[:runs], zeros), release(keys[runs:], gradient)
  # The likelihood ratio: the clipped canary over each matrix's noise variance.
  direction = np.stack(
    [
      np.ravel(gradient[k][0]) / np.linalg.norm(gradient[k]) / clips[k]
      for k in sorted(params)
    ]
  )
  absent, present = (
    np.einsum('tkd,kd->t', np.asarray(x), direction) for x in (absent, present)
  )
  found = _epsilon_lower_bound(absent, present, delta)

  def claimed(multiplier):
    event = dp_accounting.GaussianDpEvent(multiplier)
    return accounting.epsilon(
      event,
      delta,
      neighboring_relation=(
        dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
      ),
    )

  joint = accounting.joint_noise_multiplier([4.0] * groups)
  assert joint == pytest.approx(1.0)
  assert found <= claimed(joint)
  assert found > 1.5 * claimed(4.0)  # Naive accounting is refuted.


@pytest.mark.slow
def test_noise_halved_on_purpose_is_found():
  """The audit above can fail: with a quarter of the noise it does."""
  params = {f'w{i}': jnp.zeros((2, 3)) for i in range(4)}
  gradient = jax.tree.map(lambda x: x[None] + 1e3, params)
  zeros = jax.tree.map(jnp.zeros_like, gradient)
  keys = jax.random.split(jax.random.key(3), 20_000)
  release = _canary_release(params, 0.25, 1.0)
  runs = [
    np.asarray(release(k, g)).sum((1, 2))
    for k, g in [(keys[:10_000], zeros), (keys[10_000:], gradient)]
  ]
  event = dp_accounting.GaussianDpEvent(1.0)
  claimed = accounting.epsilon(
    event,
    1e-5,
    neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
  )
  assert _epsilon_lower_bound(*runs, 1e-5) > claimed


def test_neighbours_differ_by_at_most_the_sensitivity():
  tx = dp_muon(
    0.1, l2_clip_norms=CLIPS, noise_multiplier=0.0, expected_batch_size=4.0,
    momentum=0.0, weight_dimension_numbers=SPECS, adam_b1=0.0, prng_key=0,
  )  # fmt: skip
  bound = tx.sensitivity(params=PARAMS)
  assert bound == pytest.approx(math.sqrt(2 * 2.0**2 + 1.0 + 0.5**2) / 4)
  init, update = tx  # It unpacks like any transformation.
  update = jax.jit(update)
  rng = np.random.default_rng(4)
  grads = {
    k: jnp.asarray(50 * rng.standard_normal((3, *p.shape)), jnp.float32)
    for k, p in PARAMS.items()
  }
  sums = []
  for padding in ([False] * 3, [False, True, False]):
    _, state = update(
      grads, init(PARAMS), PARAMS, is_padding_example=np.array(padding)
    )
    trace, mu = optax.tree.get(state, 'trace'), None
    for _, value in optax.tree.get_all_with_path(state, 'mu'):
      mu = value
    sums.append([trace['layers'], trace['w'], mu['b'], mu['norm']])
  moved = math.sqrt(
    sum(np.sum((np.float64(x) - y) ** 2) for x, y in zip(*sums, strict=True))
  )
  assert 0.999 * bound < moved <= bound * (1 + 1e-5)


def test_leaves_that_are_no_matrices_go_to_adam():
  rng = np.random.default_rng(5)
  tx = dp_muon(
    0.1, l2_clip_norms=1e3, noise_multiplier=0.0, expected_batch_size=2.0,
    weight_dimension_numbers=SPECS, adam_learning_rate=0.02, prng_key=0,
  )  # fmt: skip
  adam = optax.adam(0.02)
  state, adam_state = tx.init(PARAMS), adam.init(PARAMS)
  update, adam_update = jax.jit(tx.update), jax.jit(adam.update)
  for _ in range(3):
    grads = {
      k: jnp.asarray(rng.standard_normal((2, *p.shape)), jnp.float32)
      for k, p in PARAMS.items()
    }
    out, state = update(grads, state, PARAMS)
    mean = jax.tree.map(lambda g: np.asarray(g).mean(0), grads)
    expected, adam_state = adam_update(mean, adam_state)
    for k in ('b', 'norm'):
      np.testing.assert_allclose(out[k], expected[k], rtol=1e-4)
    assert not np.allclose(out['w'], expected['w'], rtol=0.1)


def test_matrices_and_their_stack_take_the_same_steps():
  """Scanned or not is no matter of the algorithm: K counts matrices."""
  rng = np.random.default_rng(6)
  stack = jnp.asarray(rng.standard_normal((3, 4, 6)), jnp.float32)
  grads = jnp.asarray(rng.standard_normal((5, 3, 4, 6)), jnp.float32)
  units = {}
  results = []
  for scanned in (True, False):
    params = stack if scanned else list(stack)
    given = grads if scanned else [grads[:, i] for i in range(3)]
    tx = dp_muon(
      0.1, l2_clip_norms=0.5, noise_multiplier=0.0, expected_batch_size=5.0,
      weight_dimension_numbers=Dims(1, 2) if scanned else None, prng_key=0,
    )  # fmt: skip
    units[scanned] = tx.sensitivity(params=params)
    updates, _ = jax.jit(tx.update)(given, tx.init(params), params)
    results.append(jnp.stack(list(updates)))
  np.testing.assert_allclose(*results, atol=1e-6)
  assert units[True] == pytest.approx(units[False])


@pytest.mark.slow
def test_clipped_means_of_jax_privacy_give_the_same_steps():
  clipping = pytest.importorskip('jax_privacy.clipping')
  noise_addition = pytest.importorskip('jax_privacy.noise_addition')
  rng = np.random.default_rng(7)
  xs = jnp.asarray(3 * rng.standard_normal((8, 5)), jnp.float32)
  params = {
    'bias': jnp.ones(3),
    'w': jnp.asarray(rng.standard_normal((5, 3)), jnp.float32),
  }

  def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params['w'] + params['bias']) ** 2)

  options = {
    'l2_clip_norms': 0.4,
    'expected_batch_size': 8.0,
    'noise_multiplier': 1.1,
    'prng_key': 11,
  }
  direct = dp_muon(0.1, **options)
  means = dp_muon(0.1, per_example_gradients=False, **options)
  clipped = jax.jit(
    clipping.clipped_grad(
      loss,
      l2_clip_norm=means.sensitivity(params=params),
      batch_argnums=1,
      keep_batch_dim=False,
      microbatch_size=4,
      pre_clipping_transform=means.pre_clipping_transform,
    )
  )
  summed = transforms.per_matrix_clip(0.4, normalize_by=8.0)
  mean_of = jax.jit(functools.partial(summed.update, state=()))
  per_example_of = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))
  states = direct.init(params), means.init(params)
  direct_update, means_update = jax.jit(direct.update), jax.jit(means.update)
  for _ in range(3):
    per_example = per_example_of(params, xs)
    mean, _ = mean_of(per_example, params=params)
    clipped_mean = clipped(params, xs)
    for name, x in clipped_mean.items():
      # Sums of eight terms of at most 0.4 / 8, in another order.
      np.testing.assert_allclose(x, mean[name], rtol=0, atol=1e-7)
    expected, state = direct_update(per_example, states[0], params)
    out, other = means_update(clipped_mean, states[1], params)
    states = state, other
    for k in params:
      np.testing.assert_allclose(out[k], expected[k], rtol=1e-4, atol=1e-6)
    params = optax.apply_updates(params, expected)

  # And its privatizer in place of ours has the same noise.
  privatizer = noise_addition.gaussian_privatizer(
    stddev=1.3 / 16.0, prng_key=jax.random.key(0)
  )
  tx = dp_muon(
    0.1, l2_clip_norms=CLIPS, expected_batch_size=16.0, privatizer=privatizer,
    weight_dimension_numbers=SPECS, steps='unlimited',
  )  # fmt: skip
  for k, z in _first_release(tx).items():
    np.testing.assert_allclose(
      np.std(z), 2 * 1.3 * CLIPS[k] / 16, rtol=5 / math.sqrt(2 * z.size)
    )


def test_consistent_rms_and_weight_decay():
  params = {'w': np.full((6, 4), 2.0, np.float32)}
  grads = {'w': np.float32(np.random.default_rng(9).normal(size=(1, 6, 4)))}
  options = {
    'l2_clip_norms': 1e3,
    'noise_multiplier': 0.0,
    'expected_batch_size': 1.0,
    'prng_key': 0,
    'ns_steps': 12,
  }
  out = {}
  for name, extra in [
    ('plain', {}),
    ('rms', {'consistent_rms': 0.2}),
    ('decay', {'weight_decay': 0.5}),
  ]:
    tx = dp_muon(0.1, **options, **extra)
    init, update = jax.jit(tx.init), jax.jit(tx.update)
    out[name] = jax.device_get(update(grads, init(params), params)[0])
  np.testing.assert_allclose(
    out['rms']['w'], 0.2 * math.sqrt(6) * out['plain']['w'], rtol=1e-6
  )
  # Orthonormal columns: four of six rows, entries of rms 1 / sqrt(6).
  rms = np.sqrt(np.mean(out['rms']['w'] ** 2))
  np.testing.assert_allclose(rms, 0.1 * 0.2, rtol=1e-3)
  np.testing.assert_allclose(
    out['decay']['w'], out['plain']['w'] - 0.1 * 0.5 * 2.0, rtol=1e-5
  )


def test_learning_rate_schedules_and_injection():
  params = {'w': jnp.zeros((3, 4))}
  grads = {'w': jnp.ones((2, 3, 4))}
  tx = optax.inject_hyperparams(dp_muon, static_args=('degree', 'ns_steps'))(
    learning_rate=optax.linear_schedule(1.0, 0.0, 2),
    l2_clip_norms=1.0,
    noise_multiplier=0.0,
    expected_batch_size=2.0,
    prng_key=jax.random.key(0),
  )
  state = tx.init(params)
  sizes = []
  for _ in range(3):
    updates, state = jax.jit(tx.update)(grads, state, params)
    sizes.append(float(jnp.linalg.norm(updates['w'])))
  assert sizes[0] > 0.9
  assert sizes[2] == 0.0
