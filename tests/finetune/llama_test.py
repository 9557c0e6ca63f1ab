"""The decoder of the Llama family: its cache, its stacks, what it refuses."""

import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from prism_optax.finetune.models import (
  generation,
  layers,
  llama,
  llama_config,
  llama_files,
  minilm,
  pretrained,
)
from tests.finetune import conftest, decoder_oracle, language_models

LORA = minilm.LoraConfig(2, ('attention', 'mlp'), top_layers=2)
IDS = np.array([[1, 5, 9, 33, 7, 2], [3, 14, 15, 9, 26, 5]])


@pytest.fixture(scope='module')
def adapted(source):
  """Adapters that change something, in the upper two of three layers."""
  model = llama_files.load(source, LORA)
  nnx.update(model, conftest.randomise(nnx.state(model, nnx.LoRAParam)))
  return model


def test_slow_rotations_are_slowed_down_and_fast_ones_left():
  """And one between the two bounds is a mixture, as its turns lie there."""
  scaling = llama_config.RopeScaling(4.0, 1.0, 4.0, 40)
  used = types.SimpleNamespace(head_dim=6, rope_theta=50, rope_scaling=scaling)
  plain = 50.0 ** -np.array([0, 1 / 3, 2 / 3])  # 6.4, 1.7 and 0.5 turns of 40.
  share = (40 * plain[1] / (2 * np.pi) - 1) / 3
  want = plain * [1, share + (1 - share) / 4, 1 / 4]
  np.testing.assert_allclose(llama.frequencies(used), want, rtol=1e-6)


def test_logits_are_those_of_the_oracle(source, adapted):
  modules = llama_files.adapters(
    nnx.state(adapted, nnx.LoRAParam), adapted.config
  )
  want = decoder_oracle.logits(adapted.config, source.read, IDS, modules)
  plain = decoder_oracle.logits(adapted.config, source.read, IDS, {})
  assert np.abs(plain - want).max() > 1
  # Float32 against float64: sums of some ten products in three layers.
  np.testing.assert_allclose(
    conftest.run(adapted, IDS), want, atol=3e-6 * np.abs(want).max()
  )


def test_frozen_weights_can_be_kept_in_bfloat16(source):
  lora = minilm.LoraConfig(2)
  model = llama_files.load(source, lora, dtype=jnp.bfloat16)
  _, adapters, frozen = nnx.split(model, nnx.LoRAParam, ...)
  assert {x.dtype for x in jax.tree.leaves(adapters)} == {np.dtype('float32')}
  assert {x.dtype for x in jax.tree.leaves(frozen)} == {jnp.dtype('bfloat16')}
  exact = conftest.run(llama_files.load(source), IDS)
  rounded = conftest.run(model, IDS)
  assert rounded.dtype == np.float32
  # Eight bits a weight, three layers.
  assert 1e-4 < np.abs(exact - rounded).max() < 0.1 * np.abs(exact).max()


def test_dense_layers_can_be_kept_in_int8(source):
  """Half a step off, of 127 up to the largest weight of an output."""
  model = llama_files.load(source, LORA, dtype=jnp.int8)
  nnx.update(model, conftest.randomise(nnx.state(model, nnx.LoRAParam)))
  rounded = {}
  for stack, at in ((0, 0), (1, 1), (1, 2)):  # One layer without adapters.
    layer = model.stacks[stack]
    for (part, name), stored in llama_config.LINEAR.items():
      dense = getattr(getattr(layer, part), name)
      row = at - stack
      assert (type(dense.kernel), dense.kernel.dtype) == (nnx.Param, np.int8)
      scale = np.asarray(dense.kernel_scale[...])[row]
      name = f'model.layers.{at}.{stored}.weight'
      found = np.asarray(dense.kernel[...], np.float32)[row] * scale
      off = np.abs(found - source.read(name).T)
      assert (off <= scale / 2 * 1.0001).all()
      # As fine as it can be: the largest of each output is the last step.
      np.testing.assert_allclose(
        scale * 127, np.abs(source.read(name)).max(axis=1), rtol=1e-6
      )
      rounded[name] = found.T

  def read(name):
    value = rounded.get(name)
    if value is None:  # Kept in eight bits, where int8 is not of use.
      value = source.read(name).astype(jnp.bfloat16)
    return value

  modules = llama_files.adapters(nnx.state(model, nnx.LoRAParam), model.config)
  want = decoder_oracle.logits(model.config, read, IDS, modules)
  exact = decoder_oracle.logits(model.config, source.read, IDS, modules)
  found = conftest.run(model, IDS)
  # The model of the rounded weights, to float32; near that of the others: 0.4%
  # of the largest weight of each sum, of which there are eight to a layer.
  np.testing.assert_allclose(found, want, atol=3e-6 * np.abs(want).max())
  assert 1e-3 < np.abs(found - exact).max() / np.abs(exact).max() < 0.1
  options = {'param_dtype': jnp.int8, 'bias_init': nnx.initializers.ones}
  dense = layers.Dense(3, 2, rank=0, rngs=nnx.Rngs(0), **options)
  assert dense.kernel_scale.shape == (2,)
  np.testing.assert_array_equal(dense(np.eye(3, dtype='f4')), np.ones((3, 2)))
  assert layers.to_int8(np.zeros((3, 1)))[1] > 0  # By which is divided.


@pytest.mark.slow
def test_answers_are_the_likeliest_tokens(adapted, monkeypatch):
  """Two prompts at once, of two lengths, against one token at a time."""
  monkeypatch.setattr(generation, 'BLOCK', 4)  # They fill several.
  model = adapted
  prompts = [[1, 5, 9], [3, 14, 15, 9, 26]]
  endless = generation.Generator(model, [99])
  answers = endless.answers(prompts, 8)
  for prompt, answer in zip(prompts, answers, strict=True):
    row = np.zeros((1, 13), int)
    row[0, : len(prompt)] = prompt
    for i, token in enumerate(answer):
      at = len(prompt) + i
      assert token == np.argmax(conftest.run(model, row)[0, at - 1])
      row[0, at] = token
  # No other token ends an answer, not even token 0.
  options = {'temperature': 9.0, 'seed': 2}
  drawn = endless.answers(prompts, 8, **options)
  assert 0 in drawn[0]
  assert len(drawn[0]) == 8
  unseeded, zero = (
    endless.answers(prompts, 8, temperature=9.0, **x) for x in ({}, {'seed': 0})
  )
  assert unseeded == zero != drawn
  # It ends before a token that says so, and no more comes when all have ended.
  stops = [drawn[1][5], drawn[0][3]]
  ending = generation.Generator(model, stops)
  cut = [[*itertools.takewhile(lambda x: x not in stops, x)] for x in drawn]
  assert ending.answers(prompts, 8, **options) == cut
  assert len([*ending.stream(prompts, 8, **options)]) == max(map(len, cut)) == 5
  # No more than the model has room for, whatever the other rows.
  assert len([*endless.stream([[7], prompts[1]], 99)]) == 64 - 5
  for wrong, message in (([], '63 tokens, got 0 to 5'), ([1] * 64, '5 to 64')):
    with pytest.raises(ValueError, match=message):
      next(endless.stream([wrong, prompts[1]], 8))
  # Of equals the first, every time.
  graphdef, state = nnx.split(model)
  even = nnx.merge(graphdef, jax.tree.map(jnp.zeros_like, state))
  assert generation.Generator(even, [99]).answers(prompts, 8) == [[0] * 8] * 2


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'model_type': 'gemma'}, "model_type of .* got 'gemma'"),
    ({'hidden_act': 'gelu'}, "hidden_act 'silu', got 'gelu'"),
    ({'hidden_size': 16.0}, 'got 16.0'),
    ({'rope_theta': 0}, 'rope_theta to be a positive number, got 0'),
    ({'rope_scaling': 'yarn'}, 'rope_scaling to be an object'),
    ({'num_key_value_heads': 3}, 'got 4 and 3'),
    ({'rope_scaling': {'type': 'yarn'}}, "got 'yarn'"),
    ({'rope_scaling': {'rope_type': 'llama3'}}, "lacks .'factor'"),
  ],
)
def test_other_models_are_refused(change, message):
  with pytest.raises(ValueError, match=message):
    llama_config.Config.from_dict(language_models.CONFIG | change, 'here')


def test_what_a_configuration_leaves_out_is_as_in_transformers():
  defaults = {
    'num_key_value_heads': 4, 'head_dim': 4, 'rms_norm_eps': 1e-6,
    'rope_theta': 1e4, 'hidden_act': 'silu', 'tie_word_embeddings': False,
    'attention_bias': False, 'mlp_bias': False, 'sliding_window': None,
  }  # fmt: skip
  entries = language_models.CONFIG | defaults
  least = {k: x for k, x in entries.items() if k not in defaults}
  read = llama_config.Config.from_dict
  assert read(least, 'here') == read(entries, 'here')
  llama.frequencies(read(entries | {'rope_theta': 10**12}, 'here'))


def test_mistral_sees_no_further_than_its_window():
  entries = language_models.CONFIG | {'sliding_window': 20}
  read = llama_config.Config.from_dict
  assert read(entries | {'model_type': 'mistral'}, 'here').max_length == 20
  # Qwen names a window and does not use it.
  off = {'model_type': 'qwen2', 'use_sliding_window': False}
  qwen = read(entries | off, 'here')
  assert (qwen.max_length, qwen.qkv_bias, qwen.output_bias) == (64, True, False)
  assert read(entries | {'attention_bias': True}, 'here').output_bias


def test_missing_and_misshapen_weights_are_named(tmp_path):
  ends = {'eos_token_id': [7, 3, 7]}  # And the token named as the end.
  folder = language_models.write(tmp_path, language_models.CONFIG | ends)
  assert pretrained.find(str(folder)).stops == (7, 3, 2)
  stored = safetensors.numpy.load_file(folder / 'model.safetensors')
  path = folder / 'model.safetensors'
  safetensors.numpy.save_file(stored | {'lm_head.weight': np.ones(3)}, path)
  with pytest.raises(ValueError, match=r"'lm_head.weight' has shape \(3,\)"):
    llama_files.load(pretrained.find(str(folder)))
  del stored['lm_head.weight']
  safetensors.numpy.save_file(stored, path)
  with pytest.raises(ValueError, match="no weight 'lm_head.weight'"):
    llama_files.load(pretrained.find(str(folder)))
