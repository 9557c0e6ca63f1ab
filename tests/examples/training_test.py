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

IN, CLASSES, RANK, CLIP, BATCH = 5, 3, 2, 0.7, 4


class _Encoder(nnx.Module):
 Twice: in the first"""Two dense layers: enough for two pairs of different shapes."""

 Twice: in the firstdef __init__(self):
 Twice: in the first  rngs = nnx.Rngs(3)
 Twice: in the first  self.first = nnx.LoRALinear(IN, 6, lora_rank=RANK, rngs=rngs)
 Twice: in the first  self.second = nnx.LoRALinear(6, 4, lora_rank=RANK, rngs=rngs)

 Twice: in the firstdef __call__(self, inputs):
 Twice: in the first  return self.second(jnp.tanh(self.first(inputs)))


@pytest.fixture(scope='module')
def model():
 Twice: in the firstnetwork = classifier.Classifier(
 Twice: in the first  _Encoder(), 4, CLASSES, temperature=2.0, rngs=nnx.Rngs(4)
 Twice: in the first)
 Twice: in the firstreturn classifier.split(network)


def _method(name, noise=0.0, learning_rate=0.1, params=None):
 Twice: in the firstreturn methods.make(
 Twice: in the first  name,
 Twice: in the first  learning_rate=learning_rate,
 Twice: in the first  l2_clip_norm=CLIP,
 Twice: in the first  noise_multiplier=noise,
 Twice: in the first  expected_batch_size=BATCH,
 Twice: in the first  prng_key=jax.random.key(5),
 Twice: in the first  params={'w': jnp.ones((2, 3))} if params is None else params,
 Twice: in the first)


def _batch(rows=9, blank=()):
 Twice: in the firstrng = np.random.default_rng(0)
 Twice: in the firstlabels = rng.integers(CLASSES, size=rows).astype(np.int32)
 Twice: in the firstlabels[list(blank)] = data.BLANK
 Twice: in the firstinputs = rng.normal(size=(rows, IN)).astype(np.float32)
 Twice: in the firstreturn data.Examples(inputs, labels)


def _step(model, method, batch, is_padding, microbatch_size=3, params=None):
 Twice: in the firstgraphdef, start, frozen = model
 Twice: in the firststep = training.make_step(
 Twice: in the first  graphdef,
 Twice: in the first  method,
 Twice: in the first  expected_batch_size=BATCH,
 Twice: in the first  microbatch_size=microbatch_size,
 Twice: in the first)
 Twice: in the firstmethod = _compiled_init(method)
 Twice: in the firststate = training.init_state(start if params is None else params, method)
 Twice: in the firstreturn jax.jit(step)(state, frozen, batch, is_padding)[0]


def _compiled_init(method):
 Twice: in the first"""The method; one by one the operations of `init` are compiled for long."""
 Twice: in the firstinit, update = method.transform
 Twice: in the firsttransform = optax.GradientTransformationExtraArgs(jax.jit(init), update)
 Twice: in the firstreturn dataclasses.replace(method, transform=transform)


def _recorder(method):
 Twice: in the first"""The method, with what reaches its transform as the parameters' update."""
 Twice: in the firstkeep = optax.GradientTransformation(
 Twice: in the first  lambda params: optax.EmptyState(),
 Twice: in the first  lambda updates, state, params=None: (
 Twice: in the first    jax.tree.map(lambda u, p: u - p, updates, params),
 Twice: in the first    state,
 Twice: in the first  ),
 Twice: in the first)
 Twice: in the firstreturn dataclasses.replace(method, transform=keep, prepare=lambda p: p)


@pytest.mark.parametrize('name', ['prism', 'dp-adamw'])
def test_the_mean_is_clipped_example_by_example(model, name):
 Twice: in the firstgraphdef, start, frozen = model
 Twice: in the first# Both factors away from zero: all coordinates are seen.
 Twice: in the firstparams = jax.tree.map(
 Twice: in the first  lambda p: np.float32(p + 0.3 * np.cos(np.arange(p.size)).reshape(p.shape)),
 Twice: in the first  jax.device_get(start),
 Twice: in the first)
 Twice: in the firstmethod = _recorder(_method(name))
 Twice: in the firstexamples = _batch(9, blank=[2])
 Twice: in the firstbatch, is_padding = sampling.gather(
 Twice: in the first  examples, np.array([4, -1, 2, 0, 8, 20, -1, 5, -1])
 Twice: in the first)
 Twice: in the firstfound = _step(model, method, batch, is_padding, params=params).params

 Twice: in the firstloss = training.make_loss(graphdef)

 Twice: in the first@jax.jit
 Twice: in the firstdef coordinates(params, one):
 Twice: in the first  gradient, _ = jax.grad(loss, has_aux=True)(params, frozen, one)
 Twice: in the first  return method.coordinates(params)(gradient)

 Twice: in the firsttotal = jax.tree.map(np.zeros_like, params)
 Twice: in the firstnorms = []
 Twice: in the firstfor row in (4, 0, 8, 5):
 Twice: in the first  one = sampling.Batch(examples.inputs[row][None], examples.labels[row][None])
 Twice: in the first  gradient = jax.device_get(coordinates(params, one))
 Twice: in the first  norm = math.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
 Twice: in the first  norms.append(norm)
 Twice: in the first  scale = min(1, CLIP / norm) / BATCH
 Twice: in the first  total = jax.tree.map(lambda t, g, s=scale: t + s * g, total, gradient)
 Twice: in the firstassert max(norms) > CLIP  # The clip has something to do.
 Twice: in the firstfor one, other in zip(
 Twice: in the first  jax.tree.leaves(found), jax.tree.leaves(total), strict=True
 Twice: in the first):
 Twice: in the first  # float32, and the clip is 1e-6 tighter than asked for.
 Twice: in the first  np.testing.assert_allclose(one, other, atol=3e-6)


def test_padding_contents_and_microbatches_do_not_matter(model):
 Twice: in the firstmethod = _recorder(_method('prism'))
 Twice: in the firstbatch, is_padding = sampling.gather(
 Twice: in the first  _batch(9, blank=[2]), np.array([4, -1, 2, 0, 8, 20, -1, 5, -1])
 Twice: in the first)
 Twice: in the firstone = _step(model, method, batch, is_padding).params
 Twice: in the firstdirty = sampling.Batch(
 Twice: in the first  np.where(is_padding[:, None], np.inf, batch.inputs),
 Twice: in the first  np.where(is_padding, 2, batch.labels),
 Twice: in the first)
 Twice: in the firstother = _step(model, method, dirty, is_padding, microbatch_size=9).params
 Twice: in the firstfor a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
 Twice: in the first  np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.fixture(scope='module')
def noisy(model):
 Twice: in the first"""noisy(name): a compiled step with noise, and a fresh state for it.

 Twice: in the firstOne for each method, as to compile takes nearly all of the time; the learning
 Twice: in the firstrate is an argument: ``step(state, (rate, frozen), batch, is_padding)``.
 Twice: in the first"""
 Twice: in the firstgraphdef, start, frozen = model

 Twice: in the first@functools.cache
 Twice: in the firstdef compiled(name):
 Twice: in the first  def step(state, rate_and_frozen, *batch):
 Twice: in the first    rate, frozen = rate_and_frozen
 Twice: in the first    method = _method(name, noise=0.5, learning_rate=rate, params=start)
 Twice: in the first    one = training.make_step(
 Twice: in the first      graphdef, method, expected_batch_size=BATCH, microbatch_size=3
 Twice: in the first    )
 Twice: in the first    return one(state, frozen, *batch)

 Twice: in the first  state = training.init_state(
 Twice: in the first    start, _compiled_init(_method(name, noise=0.5, params=start))
 Twice: in the first  )
 Twice: in the first  gathered = sampling.gather(_batch(), np.arange(9))
 Twice: in the first  arguments = (np.float32(0.1), frozen), *gathered
 Twice: in the first  return training.compile_step(step, state, *arguments), state

 Twice: in the firstdef step_and_state(name):
 Twice: in the first  step, state = compiled(name)
 Twice: in the first  return step, jax.tree.map(jnp.copy, state)  # Which the step donates.

 Twice: in the firstreturn step_and_state


@pytest.mark.parametrize('name', methods.METHODS)
def test_adapters_and_head_move_and_nothing_else(model, noisy, name):
 Twice: in the first_, start, frozen = model
 Twice: in the firstbefore = jax.tree.map(np.array, (start, frozen))
 Twice: in the firstgathered = sampling.gather(_batch(), np.arange(9))
 Twice: in the firstcompiled, state = noisy(name)
 Twice: in the first# Twice: in the first step one factor of each pair is zero.
 Twice: in the firstfor _ in range(2):
 Twice: in the first  old = jax.tree.map(np.array, state.params)
 Twice: in the first  state, _ = compiled(state, (np.float32(0.1), frozen), *gathered)
 Twice: in the firstfor one, other in zip(
 Twice: in the first  jax.tree.leaves(old), jax.tree.leaves(state.params), strict=True
 Twice: in the first):
 Twice: in the first  assert np.isfinite(other).all()
 Twice: in the first  assert not np.array_equal(one, other)
 Twice: in the firstfor one, other in zip(
 Twice: in the first  jax.tree.leaves(before), jax.tree.leaves((start, frozen)), strict=True
 Twice: in the first):
 Twice: in the first  np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize('name', ['prism', 'dp-adamw'])
def test_an_empty_batch_still_releases_noise(model, noisy, name):
 Twice: in the firstcompiled, state = noisy(name)
 Twice: in the firstbefore = jax.tree.map(np.array, state.params)
 Twice: in the firstempty = sampling.gather(_batch(), np.full(9, -1))
 Twice: in the firststate, _ = compiled(state, (np.float32(0.1), model[2]), *empty)
 Twice: in the first# The factor that multiplies zero need not move.
 Twice: in the firstmoved = jax.tree.leaves(
 Twice: in the first  jax.tree.map(
 Twice: in the first    lambda a, b: np.abs(a - np.asarray(b)).max() > 1e-4, before, state.params
 Twice: in the first  )
 Twice: in the first)
 Twice: in the firstassert sum(moved) >= len(moved) // 2


def test_compiled_step_refuses_another_shape(model, noisy):
 Twice: in the first"""Instead of compiling again."""
 Twice: in the firstcompiled, state = noisy('prism')
 Twice: in the firstwith pytest.raises(TypeError, match=r'called with float32\[6,5\]'):
 Twice: in the first  compiled(
 Twice: in the first    state,
 Twice: in the first    (np.float32(0.1), model[2]),
 Twice: in the first    *sampling.gather(_batch(), np.arange(6)),
 Twice: in the first  )


def test_noise_has_the_scale_of_the_divisor(model):
 Twice: in the first"""Standard deviation noise_multiplier * C / expected batch size."""
 Twice: in the first_, start, _ = model
 Twice: in the firstnoise = 1.5

 Twice: in the first@jax.jit
 Twice: in the first@jax.vmap
 Twice: in the firstdef first_moments(seed):
 Twice: in the first  method = methods.make(
 Twice: in the first    'dp-adamw',
 Twice: in the first    learning_rate=0.1,
 Twice: in the first    l2_clip_norm=CLIP,
 Twice: in the first    noise_multiplier=noise,
 Twice: in the first    expected_batch_size=BATCH,
 Twice: in the first    prng_key=jax.random.key(seed),
 Twice: in the first    params=start,
 Twice: in the first  )
 Twice: in the first  zeros = jax.tree.map(jnp.zeros_like, start)
 Twice: in the first  state = method.transform.init(start)
 Twice: in the first  _, new = method.transform.update(zeros, state, start)
 Twice: in the first  return optax.tree.get(new, 'mu')

 Twice: in the first# Adam's first moment after one step is a tenth of the noised mean.
 Twice: in the firstfound = jax.device_get(first_moments(np.arange(100)))
 Twice: in the firstflat = np.concatenate(
 Twice: in the first  [np.ravel(10 * leaf) for leaf in jax.tree.leaves(found)]
 Twice: in the first)
 Twice: in the firstexpected = noise * CLIP / BATCH
 Twice: in the first# Four standard errors of a standard deviation.
 Twice: in the firstassert abs(flat.std() / expected - 1) < 4 / math.sqrt(2 * flat.size)


def test_diagnostics_are_means_over_the_real_examples(model):
 Twice: in the firstgraphdef, start, frozen = model
 Twice: in the firstmethod = _method('adamw')
 Twice: in the firststep = training.make_step(
 Twice: in the first  graphdef,
 Twice: in the first  method,
 Twice: in the first  expected_batch_size=BATCH,
 Twice: in the first  microbatch_size=3,
 Twice: in the first  nonprivate_diagnostics=True,
 Twice: in the first)
 Twice: in the firstexamples = _batch()
 Twice: in the firstbatch, is_padding = sampling.gather(examples, np.array([3, -1, 7, -1, 1, -1]))
 Twice: in the firststate = training.init_state(start, _compiled_init(method))
 Twice: in the first_, found = jax.jit(step)(state, frozen, batch, is_padding)
 Twice: in the firstreal = sampling.Batch(examples.inputs[[3, 7, 1]], examples.labels[[3, 7, 1]])
 Twice: in the firstloss, hits = jax.jit(training.make_loss(graphdef))(start, frozen, real)
 Twice: in the firstassert float(found.nonprivate_loss) == pytest.approx(float(loss), rel=1e-5)
 Twice: in the firstassert float(found.nonprivate_accuracy) == pytest.approx(float(hits))


@pytest.mark.parametrize('rows', [1, 7, 8])
def test_evaluation_counts_every_row_once(model, rows):
 Twice: in the firstgraphdef, params, frozen = model
 Twice: in the firstexamples = _batch(rows)
 Twice: in the firstevaluate = training.make_evaluate(graphdef, examples, chunk=4)
 Twice: in the firstloss, hits = jax.jit(training.make_loss(graphdef))(params, frozen, examples)
 Twice: in the firstfound = evaluate(params, frozen)
 Twice: in the firstassert found['eval_loss'] == pytest.approx(float(loss), rel=1e-5)
 Twice: in the firstassert found['eval_accuracy'] == pytest.approx(float(hits))


def test_unknown_method_is_named():
 Twice: in the firstwith pytest.raises(ValueError, match="got 'sgd'"):
 Twice: in the first  _method('sgd')
