"""Words of other libraries, and misspelt ones: which word is meant here."""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

_P = ParamSpec('_P')
_R = TypeVar('_R')

_STEPS = (
  'steps',
  'each step draws a batch by chance, so no epoch ends; E epochs are about'
  ' E * dataset_size / expected_batch_size steps',
)
_BATCH = (
  'expected_batch_size',
  'records are drawn by chance, and this is how many on average',
)
_SIGMA = (
  'noise_multiplier',
  'the standard deviation of the noise over l2_clip_norm',
)
_CLIP = ('l2_clip_norm', 'the largest norm of one contribution')
_EPSILON = ('target_epsilon', 'of all steps')
_SIZE = ('dataset_size', 'a public number, at least the number of records')
_KEY = ('prng_key', 'best left out, for secrets of the system')
_MICRO = ('execution', 'training.Execution(microbatch_size=...)')
_DEVICES = ('execution', 'training.Execution(batch_sharding=...)')

# From a word to the argument that is meant, and what there is to know.
FOREIGN: Mapping[str, tuple[str, str]] = {
  # TensorFlow Privacy, Opacus, jax-privacy, Hugging Face, Keras.
  **dict.fromkeys(
    (
      *('epochs', 'num_epochs', 'num_train_epochs', 'iterations'),
      *('num_steps', 'num_updates', 'max_steps', 'n_steps'),
    ),
    _STEPS,
  ),
  **dict.fromkeys(
    ('batch_size', 'logical_batch_size', 'train_batch_size', 'lot_size'),
    _BATCH,
  ),
  **dict.fromkeys(
    ('sample_rate', 'sampling_probability', 'sampling_prob', 'q'),
    (
      'expected_batch_size',
      'the probability is expected_batch_size / dataset_size',
    ),
  ),
  **dict.fromkeys(
    (
      *('max_grad_norm', 'clip_norm', 'clipping_norm', 'clip', 'max_norm'),
      *('l2_norm_clip', 'l2_clip', 'clip_threshold', 'clipping_threshold'),
    ),
    _CLIP,
  ),
  **dict.fromkeys(
    ('sigma', 'noise', 'noise_scale', 'noise_std', 'noise_stddev', 'stddev'),
    _SIGMA,
  ),
  **dict.fromkeys(('epsilon', 'eps', 'max_epsilon', 'budget'), _EPSILON),
  'target_delta': ('delta', 'below 1 / dataset_size'),
  **dict.fromkeys(
    (
      *('sample_size', 'num_examples', 'num_samples', 'num_records'),
      *('num_users', 'train_size', 'n'),
    ),
    _SIZE,
  ),
  **dict.fromkeys(('key', 'rng', 'seed', 'rng_key', 'random_seed'), _KEY),
  **dict.fromkeys(
    (
      *('microbatch_size', 'physical_batch_size', 'num_microbatches'),
      *('max_physical_batch_size', 'gradient_accumulation_steps'),
    ),
    _MICRO,
  ),
  'padded_batch_size': (
    'execution',
    'training.Execution(padded_batch_size=...)',
  ),
  'skip_padding': ('execution', 'training.Execution(skip_padding=...)'),
  **dict.fromkeys(('batch_sharding', 'sharding', 'mesh'), _DEVICES),
  'learning_rate': ('optimizer', 'the rate is part of it'),
  'model': ('loss', 'a function of the parameters and one example'),
  'loss_fn': ('loss', 'a function of the parameters and one example'),
  'data': ('dataset_size', 'the records go to PrivateTraining.batches'),
  'data_loader': ('dataset_size', 'the records go to PrivateTraining.batches'),
  'accountant': ('delta', 'epsilon is always that of the PLD accountant'),
  'input_metric': (
    'change_of_variables',
    'such as contrib.input_metric, released of the same records',
  ),
  'also': ('prior_releases', 'what was released of the same records before'),
  'before': ('prior_releases', 'what was released of the same records before'),
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
