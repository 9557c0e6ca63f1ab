"""The command ``train``: what is trained, and what is said of it."""

import pathlib

from . import digits, files, methods, releasing, run, summaries, tasks, training
from .options import Options, absolute


def train(options: Options) -> None:
  """The command ``train``.

  Raises:
    run.Interrupted: With how to go on.
    OSError: With what is left of the run.
    ValueError: If an option does not fit the devices, the data or the model.
  """
  training.sharding(options)  # Too few devices: before anything is written.
  output = pathlib.Path(options.output)
  resume = f'\n  prism-optax train --output {output} --resume'
  try:
    if options.task == 'digits':
      compare_on_digits(options, output)
    else:
      train_one(options, output)
  except run.Interrupted as stop:
    raise run.Interrupted(f'{stop} Go on with:{resume}') from stop
  except FileNotFoundError:
    raise
  except OSError as error:
    if not list(output.glob(f'**/{training.FOLDER}/state.npz')):
      raise OSError(f'{error}. No run has begun in {output}.') from error
    message = f'{error}. What was saved before is still there: go on with'
    raise OSError(f'{message} --resume.{resume}') from error


def declared_size(options: Options, rows: int) -> int:
  """The public size of a data set of ``rows`` private rows.

  Raises:
    ValueError: If it is below the number of rows, or the expected batch
      exceeds it.
  """
  if options.dataset_size is None:
    print(
      f'{rows} private rows were counted: this number is DECLARED PUBLIC. '
      f'Declare another one, at least as large, by --dataset-size.'
    )
  size = options.dataset_size or rows
  if rows > size:
    raise ValueError(
      f'--dataset-size {size} is below the number of rows in --data.'
    )
  if options.batch_size > size:
    raise ValueError(
      f'--batch-size {options.batch_size} exceeds the dataset size {size}.'
    )
  return size


def save_options(
  options: Options, task: tasks.Task, output: pathlib.Path
) -> None:
  """Writes what ``--resume`` needs, or checks that it is still so.

  A seed is among it: one that was asked for is no secret.

  Raises:
    ValueError: If the run in ``output`` began with other frozen weights.
  """
  path = output / 'options.json'
  if not path.exists():
    stored = absolute(vars(options)) | {'base': task.base}
    files.write_json(path, stored)
  elif options.base != task.base:
    raise ValueError(
      f'--resume: the run in {output} began with the frozen weights '
      f'{options.base}, not with {task.base}.'
    )


def train_one(options: Options, output: pathlib.Path) -> None:
  """One method on two files."""
  task = tasks.read(options, output)
  classes = f'{len(task.labels)} classes' if task.labels else task.base['model']
  print(
    f'{task.name}: {classes}; measured on {len(task.evaluation.labels)} rows '
    f'of --eval, see --eval-rows; results in {output}'
  )
  # From here on a constant of the run, whatever becomes of the file.
  options.dataset_size = declared_size(options, len(task.train.labels))
  if options.head == 'released':
    task = releasing.with_head(task, options, output)
  planned = run.make(task, options, options.optimizer, output)
  save_options(options, task, output)
  releasing.save(task, output)
  if options.nonprivate_diagnostics:
    print('The files nonprivate_* will NOT be covered by the guarantee.')
  summary = run.train(planned)
  start, final = summary['start'], summary['final']
  measure = summaries.measure(final)
  print(
    f'{summary["optimizer"]}: {measure.removeprefix("eval_")} on --eval '
    f'{start[measure]:.3f} -> {final[measure]:.3f}; {summary["statement"]}.'
  )


def compare_on_digits(options: Options, output: pathlib.Path) -> None:
  """All methods, or the one asked for, on the default task."""
  options.dataset_size = digits.PRIVATE_SIZE
  # Before anything is written.
  declared_size(options, digits.PRIVATE_SIZE)
  print('A small vision transformer, pretrained on public digits ...')
  task = tasks.read(options, output)
  names = [options.optimizer] if options.optimizer else methods.COMPARED
  runs = [run.make(task, options, name, output / name) for name in names]
  save_options(options, task, output)
  pictures = len(task.evaluation.labels)
  rows = [('', 'evaluation accuracy', f'epsilon at delta {options.delta:g}')]

  def add(name: str, measured: dict[str, float], epsilon: str) -> None:
    accuracy = measured['eval_accuracy']
    error = summaries.standard_error(accuracy, pictures)
    rows.append((name, f'{accuracy:.3f} ± {error:.3f}', epsilon))

  statement = None
  for one in runs:
    summary, epsilon = run.train(one), 'not private'
    if not rows[1:]:
      add('before adaptation', summary['start'], '0')
    if summary['private']:
      epsilon = f'{summaries.round_up(summary["epsilon"]):.3f}'
      statement = summary['statement']
    add(one.name, summary['final'], epsilon)
  print(f'\nDigits read in a mirror, {pictures} of them:\n')
  for row in [rows[0], ('-' * 17, '-' * 19, '-' * len(rows[0][2])), *rows[1:]]:
    print('{:<17}  {:<19}  {}'.format(*row).rstrip())
  print(
    '\nOne run each; ± is the standard error over the pictures. Methods whose'
    ' accuracies are closer than two of these cannot be told apart by this run.'
  )
  if statement:
    print(f'\nSpent by each private run: {statement}.')
  print(f'Adapters and metrics are in {output}.')
