"""The step: per-example clipping, padding, what moves and what does not."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from finetuning import data, methods, sampling, training
from finetuning.models import classifier
from flax import nnx

import prism_optax
from prism_optax import diagnostics

WIDTH, CLASSES, RANK, CLIP, BATCH = 5, 3, 2, 0.7, 4


class _Encoder(nnx.Module):
  """Two dense layers of one shape: what is compiled works on both."""

  def __init__(self):
    rngs = nnx.Rngs(3)
    self.first = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)
    self.second = nnx.LoRALinear(WIDTH, WIDTH, lora_rank=RANK, rngs=rngs)

  def __call__(self, inputs):
    return self.second(jnp.tanh(self.first(inputs)))


@pytest.fixture(scope='module')
def model():
  network = classifier.Classifier(
    _Encoder(), WIDTH, CLASSES, temperature=2.0, rngs=nnx.Rngs(4)
  )
  return classifier.split(network)


def _method(name, noise=0.0, learning_rate=0.1, params=None):
  return methods.make(
    name,
    learning_rate=learning_rate,
    l2_clip_norm=CLIP,
    noise_multiplier=noise,
    expected_batch_size=BATCH,
    prng_key=jax.random.key(5),
    params={'w': jnp.ones((2, 3))} if params is None else params,
  )


def _batch(rows=9, blank=()):
  rng = np.random.default_rng(0)
  labels = rng.integers(CLASSES, size=rows).astype(np.int32)
  labels[list(blank)] = data.BLANK
  inputs = rng.normal(size=(rows, WIDTH)).astype(np.float32)
  return data.Examples(inputs, labels)


def _step(
  model,
  method,
  batch,
  is_padding,
  microbatch_size=3,
  params=None,
  **options,
):
  graphdef, start, frozen = model
  step = training.make_step(
    graphdef, method, microbatch_size=microbatch_size, **options
  )
  method = _compiled_init(method)
  state = training.init_state(start if params is None else params, method)
  return jax.jit(step)(state, frozen, batch, is_padding)[0]


def _compiled_init(method):
  """The method; one by one the operations of `init` are compiled for long."""
  init, update = method.transform
  transform = optax.GradientTransformationExtraArgs(jax.jit(init), update)
  return dataclasses.replace(method, transform=transform)


# What the methods have in front of their noise.
CLIPS = {
  'prism': prism_optax.intrinsic_clip(CLIP, normalize_by=BATCH),
  'dp-adamw': prism_optax.per_matrix_clip(
    CLIP,
    normalize_by=BATCH,
    weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: None, tree),
  ),
}


def _recorder(name):
  """A method whose update takes the parameters to the clipped mean."""
  clip = CLIPS[name]

  def update(updates, state, params=None, **extra_args):
    mean, state = clip.update(updates, state, params, **extra_args)
    return jax.tree.map(lambda m, p: m - p, mean, params), state

  transform = optax.GradientTransformationExtraArgs(clip.init, update)
  return dataclasses.replace(_method(name), transform=transform, prepare=_same)


def _same(params):
  return params


def _away_from_zero(params):
  """Both factors, so that all coordinates are seen."""
  return jax.tree.map(
    lambda p: np.float32(p + 0.3 * np.cos(np.arange(p.size)).reshape(p.shape)),
    jax.device_get(params),
  )


PLACES = np.array([4, -1, 2, 0, 8, 20, -1, 5, -1])  # 2 is blank, 20 is empty.
REAL = (4, 0, 8, 5)


@pytest.mark.parametrize('name', ['prism', 'dp-adamw'])
def test_the_mean_is_clipped_example_by_example(model, name):
  graphdef, start, frozen = model
  params = _away_from_zero(start)
  method = _recorder(name)
  examples = _batch(9, blank=[2])
  batch, is_padding = sampling.gather(examples, PLACES)
  found = _step(model, method, batch, is_padding, params=params).params

  loss = training.make_loss(graphdef)

  @jax.jit
  def coordinates(params, one):
    gradient, _ = jax.grad(loss, has_aux=True)(params, frozen, one)
    return method.coordinates(params)(gradient)

  total = jax.tree.map(np.zeros_like, params)
  norms = []
  for row in REAL:
    one = sampling.Batch(examples.inputs[row][None], examples.labels[row][None])
    gradient = jax.device_get(coordinates(params, one))
    norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
    norms.append(norm)
    scale = min(1, CLIP / norm) / BATCH
    total = jax.tree.map(lambda t, g, s=scale: t + s * g, total, gradient)
  assert max(norms) > CLIP  # The clip has something to do.
  for one, other in zip(
    jax.tree.leaves(found), jax.tree.leaves(total), strict=True
  ):
    # float32, and the clip is 1e-6 tighter than asked for.
    np.testing.assert_allclose(one, other, atol=3e-6)


def test_padding_contents_and_microbatches_do_not_matter(model):
  method = _recorder('prism')
  batch, is_padding = sampling.gather(_batch(9, blank=[2]), PLACES)
  one = _step(model, method, batch, is_padding).params
  dirty = sampling.Batch(
    np.where(is_padding[:, None], np.inf, batch.inputs),
    np.where(is_padding, 2, batch.labels),
  )
  other = _step(model, method, dirty, is_padding, microbatch_size=9).params
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize(
  'name',
  [
    'prism',
    'dp-adamw',
    pytest.param('dp-muon', marks=pytest.mark.slow),
    pytest.param('prism-rows', marks=pytest.mark.slow),
  ],
)
def test_neither_order_nor_skipped_padding_changes_a_bit(model, noisy, name):
  compiled, state = noisy(name)
  # Compiled by itself, and the same for all methods.
  skipping, _ = noisy(name, skip_padding=name == 'dp-adamw')
  examples, found = _batch(), []
  orders = (4, 0, 8, 5), (5, 4, 0, 8), (8, 5, 4, 0)
  for step, order in zip((compiled, compiled, skipping), orders, strict=True):
    places = np.full(9, -1)
    # Micro-batches take every third place: here the last one has nobody.
    places[[0, 1, 3, 4]] = order
    start = jax.tree.map(jnp.copy, state)
    start = start._replace(params=_away_from_zero(start.params))
    batch = sampling.gather(examples, places)
    found.append(step(start, (np.float32(0.1), model[2]), *batch)[0].params)
  for one, *others in zip(*map(jax.tree.leaves, found), strict=True):
    for other in others:
      np.testing.assert_array_equal(one, other)


def test_contributions_are_whole_steps_of_the_noise(model):
  """What two records add is, to the bit, what each of them adds alone.

  A sum of floats that is brought to whole steps afterwards is off by one in
  about half of all entries.
  """
  graphdef, start, frozen = model
  # A step of the noise is a power of two: no float on the way is rounded.
  transform = methods.dp_adamw(
    0.1,
    l2_clip_norm=1.0,
    noise_multiplier=917504 * 2.0**-22 * BATCH,
    expected_batch_size=BATCH,
    prng_key=jax.random.key(5),
    b1=0.0,  # The first moment is what is released.
  )
  method = _compiled_init(methods.Method('dp-adamw', transform))
  step = jax.jit(training.make_step(graphdef, method, microbatch_size=3))
  state = training.init_state(_away_from_zero(start), method)

  def released(*rows):
    places = np.array([*rows, *[-1] * (3 - len(rows))])
    new, _ = step(state, frozen, *sampling.gather(_batch(), places))
    leaves = jax.device_get(jax.tree.leaves(optax.tree.get(new, 'mu')))
    return np.concatenate([np.float64(x).ravel() for x in leaves])

  noise = released()
  one, two, both = (released(*x) - noise for x in ((4,), (0,), (0, 4)))
  np.testing.assert_array_equal(one + two, both)
  assert np.abs(one).max() > 1e-3
  assert np.abs(noise).max() > 1e-3


@pytest.mark.parametrize('name', methods.METHODS)
def test_no_method_takes_a_mean_that_somebody_else_has_clipped(model, name):
  """Their clip is their own: the sum between it and the noise is exact."""
  params = model[1]
  transform = _method(name, noise=0.5, params=params).transform

  def update(params):
    return transform.update(params, transform.init(params), params)

  with pytest.raises(ValueError, match='expected per-example gradients'):
    jax.eval_shape(update, params)


@pytest.fixture(scope='module')
def noisy(model):
  """noisy(name): a compiled step with noise, and a fresh state for it.

  One for each method, as to compile takes nearly all of the time; the learning
  rate is an argument: ``step(state, (rate, frozen), batch, is_padding)``.
  """
  graphdef, start, frozen = model

  @functools.cache
  def compiled(name, skip_padding):
    def step(state, rate_and_frozen, *batch):
      rate, frozen = rate_and_frozen
      method = _method(name, noise=0.5, learning_rate=rate, params=start)
      one = training.make_step(
        graphdef, method, microbatch_size=3, skip_padding=skip_padding
      )
      return one(state, frozen, *batch)

    state = training.init_state(
      start, _compiled_init(_method(name, noise=0.5, params=start))
    )
    gathered = sampling.gather(_batch(), np.arange(9))
    arguments = (np.float32(0.1), frozen), *gathered
    return training.compile_step(step, state, *arguments), state

  def step_and_state(name, skip_padding=False):
    step, state = compiled(name, skip_padding)
    return step, jax.tree.map(jnp.copy, state)  # Which the step donates.

  return step_and_state


@pytest.mark.parametrize(
  'name',
  [
    pytest.param(
      name, marks=() if 'adam' in name or name == 'prism' else pytest.mark.slow
    )
    for name in methods.METHODS
  ],
)
def test_adapters_and_head_move_and_nothing_else(model, noisy, name):
  _, start, frozen = model
  before = jax.tree.map(np.array, (start, frozen))
  gathered = sampling.gather(_batch(), np.arange(9))
  compiled, state = noisy(name)
  # Twice: in the first step one factor of each pair is zero.
  for _ in range(2):
    old = jax.tree.map(np.array, state.params)
    state, _ = compiled(state, (np.float32(0.1), frozen), *gathered)
  for one, other in zip(
    jax.tree.leaves(old), jax.tree.leaves(state.params), strict=True
  ):
    assert np.isfinite(other).all()
    assert not np.array_equal(one, other)
  for one, other in zip(
    jax.tree.leaves(before), jax.tree.leaves((start, frozen)), strict=True
  ):
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('name', ['prism', 'dp-adamw'])
def test_an_empty_batch_still_releases_noise(model, noisy, name):
  compiled, state = noisy(name)
  before = jax.tree.map(np.array, state.params)
  empty = sampling.gather(_batch(), np.full(9, -1))
  state, _ = compiled(state, (np.float32(0.1), model[2]), *empty)
  # The factor that multiplies zero need not move.
  moved = jax.tree.leaves(
    jax.tree.map(
      lambda a, b: np.abs(a - np.asarray(b)).max() > 1e-4, before, state.params
    )
  )
  assert sum(moved) >= len(moved) // 2


def test_compiled_step_refuses_another_shape(model, noisy):
  """Instead of compiling again."""
  compiled, state = noisy('prism')
  with pytest.raises(TypeError, match=r'called with float32\[6,5\]'):
    compiled(
      state,
      (np.float32(0.1), model[2]),
      *sampling.gather(_batch(), np.arange(6)),
    )


def test_noise_has_the_scale_of_the_divisor(model):
  """Standard deviation noise_multiplier * C / expected batch size."""
  _, start, _ = model
  noise = 1.5

  @jax.jit
  @jax.vmap
  def first_moments(seed):
    method = methods.make(
      'dp-adamw',
      learning_rate=0.1,
      l2_clip_norm=CLIP,
      noise_multiplier=noise,
      expected_batch_size=BATCH,
      prng_key=jax.random.key(seed),
      params=start,
    )
    nobody = jax.tree.map(lambda x: jnp.zeros((0, *x.shape), x.dtype), start)
    state = method.transform.init(start)
    _, new = method.transform.update(nobody, state, start)
    return optax.tree.get(new, 'mu')

  # Adam's first moment after one step is a tenth of the noised mean.
  found = jax.device_get(first_moments(np.arange(100)))
  flat = np.concatenate(
    [np.ravel(10 * leaf) for leaf in jax.tree.leaves(found)]
  )
  expected = noise * CLIP / BATCH
  # Four standard errors of a standard deviation.
  assert abs(flat.std() / expected - 1) < 4 / math.sqrt(2 * flat.size)


def test_diagnostics_are_means_over_the_real_examples(model):
  graphdef, start, frozen = model

  def doubled(params):
    del params
    return functools.partial(jax.tree.map, lambda x: 2 * x)

  method = dataclasses.replace(_method('adamw'), coordinates=doubled)
  step = training.make_step(
    graphdef,
    method,
    microbatch_size=3,
    nonprivate_diagnostics=True,
  )
  examples = _batch()
  batch, is_padding = sampling.gather(examples, np.array([3, -1, 7, -1, 1, -1]))
  state = training.init_state(start, _compiled_init(method))
  _, found = jax.jit(step)(state, frozen, batch, is_padding)
  real = sampling.Batch(examples.inputs[[3, 7, 1]], examples.labels[[3, 7, 1]])
  loss = training.make_loss(graphdef)
  mean, hits = jax.jit(loss)(start, frozen, real)
  assert float(found.nonprivate_loss) == pytest.approx(float(mean), rel=1e-5)
  assert float(found.nonprivate_accuracy) == pytest.approx(float(hits))

  @jax.jit
  def norm_of(one):
    gradient, _ = jax.grad(loss, has_aux=True)(start, frozen, one)
    return optax.tree.norm(gradient)

  norms = [
    float(norm_of(jax.tree.map(lambda x, i=i: x[i : i + 1], real)))
    for i in range(3)
  ]
  # The norm of what is clipped, here of twice the gradient.
  norm = float(found.nonprivate_gradient_norm)
  assert norm == pytest.approx(2 * np.mean(norms), rel=1e-5)


@pytest.mark.parametrize('rows', [1, 7, 8])
def test_evaluation_counts_every_row_once(model, rows):
  graphdef, params, frozen = model
  examples = _batch(rows)
  evaluate = training.make_evaluate(graphdef, examples, chunk=4)
  loss, hits = jax.jit(training.make_loss(graphdef))(params, frozen, examples)
  found = evaluate(params, frozen)
  assert found['eval_loss'] == pytest.approx(float(loss), rel=1e-5)
  assert found['eval_accuracy'] == pytest.approx(float(hits))


def test_unknown_method_is_named():
  with pytest.raises(ValueError, match="got 'sgd'"):
    _method('sgd')


@pytest.mark.parametrize('name', ['prism', 'dp-adamw', 'dp-muon'])
def test_nothing_passes_the_noise_of_a_step(model, name):
  """Also with what is computed for the eyes of those who see the data."""
  graphdef, start, frozen = model
  method = _method(name, noise=1.0, params=start)
  step = training.make_step(
    graphdef, method, microbatch_size=3, nonprivate_diagnostics=True
  )

  def named(*args):
    state, shown = step(*args)
    return state, shown._asdict()

  state = jax.eval_shape(lambda: training.init_state(start, method))
  proof = diagnostics.prove_released(
    named, state, frozen, _batch(), np.zeros(9, bool), private=2, padding=3
  )
  assert proof, proof
  assert sum(x.startswith('a release') for x in proof.trace) == 1
