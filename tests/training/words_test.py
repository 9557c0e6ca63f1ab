"""A word of another library is answered by the one that is meant."""

import inspect

import optax
import pytest

from prism_optax import training
from prism_optax.training import _words
from tests import cases

OWN = tuple(inspect.signature(training.make_private).parameters)


@pytest.mark.parametrize(
  ('word', 'right'),
  [
    ('epochs', 'steps'),
    ('max_grad_norm', 'l2_clip_norm'),
    ('target_delta', 'delta'),
    ('batch_size', 'expected_batch_size'),
    ('epsilon', 'target_epsilon'),
    ('sample_size', 'dataset_size'),
    ('sigma', 'noise_multiplier'),
    ('microbatch_size', r'execution=, training\.Execution\(microbatch_size'),
    ('noise_multipler', 'noise_multiplier'),  # Misspelt.
    ('max_gradnorm', 'l2_clip_norm'),  # Another library's, misspelt.
  ],
)
def test_the_right_word_is_named(word, right):
  with pytest.raises(TypeError, match=rf'no {word}=.* {right}'):
    cases.make(optax.sgd(0.1), **{word: 1})


def test_a_word_like_no_other_gets_the_list():
  with pytest.raises(TypeError, match=r'no zzz=. It has loss, params, optimi'):
    cases.make(optax.sgd(0.1), zzz=1)


def test_the_table_names_arguments_and_no_argument_is_foreign():
  assert {right for right, _ in _words.FOREIGN.values()} <= set(OWN)
  assert not set(_words.FOREIGN) & set(OWN)


def test_tags_are_short_and_name_themselves():
  with pytest.raises(ValueError, match=r"got tags\['base'\]=.* of list"):
    cases.make(optax.sgd(0.1), tags={'base': [1]})
  with pytest.raises(ValueError, match='at most 200'):
    cases.make(optax.sgd(0.1), tags={'base': 'x' * 201})
  made = cases.make(optax.sgd(0.1), tags={'base': 'a'}, prng_key=None)
  other = cases.make(optax.sgd(0.1), tags={'base': 'b'}, prng_key=None)
  with pytest.raises(ValueError, match=r"tags; here \{'base': 'b'\}"):
    other.batches(made.init(cases.PARAMS), cases.DATA)
