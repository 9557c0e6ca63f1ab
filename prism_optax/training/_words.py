"""Words of other libraries, and misspelt ones: which word is meant here."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

_P = ParamSpec('_P')
_R = TypeVar('_R')

# Words of TensorFlow Privacy, Opacus, jax-privacy, Hugging Face and Keras; the
# argument that is meant; and what there is to know.
_ANSWERS = (
  ('epochs num_epochs num_train_epochs iterations num_steps num_updates'
   ' max_steps n_steps', 'steps',
   'each step draws a batch by chance, so no epoch ends; E epochs are about'
   ' E * dataset_size / expected_batch_size steps'),
  ('batch_size logical_batch_size train_batch_size lot_size',
   'expected_batch_size',
   'records are drawn by chance, and this is how many on average'),
  ('sample_rate sampling_probability sampling_prob q', 'expected_batch_size',
   'the probability is expected_batch_size / dataset_size'),
  ('max_grad_norm clip_norm clipping_norm clip max_norm l2_norm_clip l2_clip'
   ' clip_threshold clipping_threshold', 'l2_clip_norm',
   'the largest norm of one contribution'),
  ('sigma noise noise_scale noise_std noise_stddev stddev', 'noise_multiplier',
   'the standard deviation of the noise over l2_clip_norm'),
  ('epsilon eps max_epsilon budget', 'target_epsilon', 'of all steps'),
  ('target_delta', 'delta', 'below 1 / dataset_size'),
  ('sample_size num_examples num_samples num_records num_users train_size n',
   'dataset_size', 'a public number, at least the number of records'),
  ('key rng seed rng_key random_seed', 'prng_key',
   'best left out, for secrets of the system'),
  ('microbatch_size physical_batch_size num_microbatches'
   ' max_physical_batch_size gradient_accumulation_steps', 'execution',
   'training.Execution(microbatch_size=...)'),
  ('padded_batch_size', 'execution',
   'training.Execution(padded_batch_size=...)'),
  ('skip_padding', 'execution', 'training.Execution(skip_padding=...)'),
  ('batch_sharding sharding mesh', 'execution',
   'training.Execution(batch_sharding=...)'),
  ('learning_rate', 'optimizer', 'the rate is part of it'),
  ('model loss_fn', 'loss', 'a function of the parameters and one example'),
  ('data data_loader', 'dataset_size',
   'the records go to PrivateTraining.batches'),
  ('accountant', 'delta', 'epsilon is always that of the PLD accountant'),
  ('input_metric', 'change_of_variables',
   'such as contrib.input_metric, released of the same records'),
  ('also before', 'prior_releases',
   'what was released of the same records before'),
)  # fmt: skip
FOREIGN: Mapping[str, tuple[str, str]] = {
  word: (right, why) for words, right, why in _ANSWERS for word in words.split()
}


def answered(function: Callable[_P, _R]) -> Callable[_P, _R]:
  """Answers words that a function does not have by the one that is meant.

  Args:
    function: With named arguments.

  Returns:
    The function; it raises a TypeError for a word that it does not have, which
    names the right one.
  """
  own = tuple(inspect.signature(function).parameters)

  @functools.wraps(function)
  def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
    for word in kwargs:
      if word not in own:
        raise TypeError(answer(function.__name__, word, own))
    return function(*args, **kwargs)

  return call


def answer(name: str, word: str, own: tuple[str, ...]) -> str:
  """The message for a word that a function does not have."""
  if word in FOREIGN:
    right, why = FOREIGN[word]
    return f'{name} has no {word}=: give {right}=, {why}.'
  near = difflib.get_close_matches(word, (*own, *FOREIGN), 1)
  if near and near[0] in own:
    return f'{name} has no {word}=: did you mean {near[0]}=?'
  if near:
    return answer(name, near[0], own).replace(f'{near[0]}=', f'{word}=', 1)
  return f'{name} has no {word}=. It has {", ".join(own)}.'
