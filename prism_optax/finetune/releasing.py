"""The head that a classifier starts from: one private release of its rows.

A head at random has to be learnt first, which takes many steps where classes
are many. A released one is a classifier before the first step. What it costs is
part of the epsilon of the run.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from flax import nnx

from prism_optax import accounting
from prism_optax.contrib import heads

from . import data, files, tasks, training
from .options import Options

SHARE = 0.8  # Of the budget, measured as one over the squared noise.
CHUNK = 64  # Rows at once.
# What a run has only after the release was saved.
_BEGUN = 'metrics.jsonl', f'{training.FOLDER}/state.npz'


def with_head(
  task: tasks.Task, options: Options, output: pathlib.Path
) -> tasks.Task:
  """The task, its head at what the run released, or releases now.

  Args:
    task: A classifier with its head at random.
    options: Of the run.
    output: Its folder. What it released before is read, because another release
      would have to be paid for.

  Raises:
    ValueError: If that is lost, or no release at this delta means anything.
  """
  path = _path(output)
  if path.exists():
    head = _read(path)
  elif any((output / x).exists() for x in _BEGUN):
    raise ValueError(
      f'--resume: {path} is gone, the release from which the run in {output} '
      'began. Another one would be a second release, with a budget of its own: '
      'choose another --output.'
    )
  else:
    head = release(task, options)
  params = jax.tree.map(lambda x: x, task.params)  # The task keeps its own.
  params['kernel'].set_value(head.kernel)
  return dataclasses.replace(task, params=params, head=head)


def release(task: tasks.Task, options: Options) -> heads.LinearHead:
  """Releases the head of ridge regression on the features of the frozen model.

  A bar moves where it takes more than two seconds. It counts the places of the
  declared size, as the work does: how many of them have a row is private.

  Raises:
    ValueError: If delta is too large for the number of rows.
  """
  size = options.dataset_size
  alone = accounting.calibrate_noise_multiplier(
    options.target_epsilon, options.delta, 1.0, 1, dataset_size=size
  )
  print(
    'The head starts from a private release, with four fifths of the budget ...'
  )

  model = nnx.merge(task.graphdef, task.params, task.frozen)

  @jax.jit
  def features(params, frozen, inputs):
    return nnx.merge(task.graphdef, params, frozen).encoder(inputs)

  def batches() -> Iterator[tuple[jax.Array, np.ndarray]]:
    (inputs, labels), count = task.train, len(task.train.labels)
    for start in tqdm.trange(
      0, size, CHUNK, desc='head', unit='chunk', leave=False, delay=2
    ):
      places = np.arange(start, start + CHUNK)  # All chunks of one shape.
      found = features(task.params, task.frozen, inputs[places % count])
      here = places[places < size]
      own = np.where(here < count, labels[here % count], data.BLANK)
      yield found[: len(here)], own

  return heads.ridge(
    batches(),
    num_classes=len(task.labels),
    noise_multiplier=alone / SHARE**0.5,
    dataset_size=size,
    logit_scale=model.temperature,
    prng_key=options.seed,
  )


def save(task: tasks.Task, output: pathlib.Path) -> None:
  """Writes what was released, which is public, before a step depends on it."""
  if task.head is None or _path(output).exists():
    return
  facts = dataclasses.asdict(task.head)
  kernel = np.asarray(facts.pop('kernel'))
  with (
    files.replacing(_path(output)) as temporary,
    temporary.open('wb') as file,
  ):
    np.savez(file, kernel=kernel, facts=json.dumps(facts))


def _path(output: pathlib.Path) -> pathlib.Path:
  return output / 'head.npz'


def _read(path: pathlib.Path) -> heads.LinearHead:
  try:
    with np.load(path, allow_pickle=False) as stored:
      facts = json.loads(str(stored['facts']))
      return heads.LinearHead(jnp.asarray(stored['kernel']), **facts)
  except Exception as error:  # There is no end to how a file can be broken.
    raise ValueError(f'{path}: expected the release of a head.') from error
