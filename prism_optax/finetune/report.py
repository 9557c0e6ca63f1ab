"""One HTML page about finished runs, made of what they wrote for the public."""

import argparse
import base64
import io
import json
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.figure import Figure

from . import answers, command_line, files, finished, summaries, templates


def report(command: argparse.Namespace) -> None:
  """The command ``report``.

  Raises:
    ValueError: If there is no run, or one is not finished.
  """
  found = [run for folder in command.runs for run in finished.find_all(folder)]
  runs = {_name(run, found): run for run in found}
  path = pathlib.Path(command.output)
  files.require_writable(path.parent)
  files.write(path, page(runs, command.rows))
  print(path)


def _name(run: finished.Finished, runs: Sequence[finished.Finished]) -> str:
  """The folder's name, or all of its path if two have the same one."""
  folder = run.folder.resolve()
  same = [x for x in runs if x.folder.resolve().name == folder.name]
  return folder.name if len(same) == 1 else str(folder)


def page(runs: dict[str, finished.Finished], rows: int) -> str:
  """The whole page.

  Args:
    runs: By the names that they are to have on it.
    rows: How many public rows the models are to answer; 0 leaves the models
      alone.
  """
  parts = verdict, pictures, option_groups, answers.per_class, answers.spoken
  functions = {part.__name__: part for part in parts}
  return templates.render('report.html', runs=runs, rows=rows, **functions)


def verdict(summary: dict[str, Any]) -> str:
  """Whether a run learned anything, and for which epsilon, in a sentence.

  Accuracy has to rise by two standard errors over the rows, above the share of
  the commonest class and above what it was before anything was released.
  """
  measure = summaries.measure(summary['final'])
  before, after = (summary[x][measure] for x in ('start', 'final'))
  name, count = measure.removeprefix('eval_'), summary['eval_rows']
  chance, learned = summary['chance'], after < before
  released = summary.get('plan', {}).get('head_noise_multiplier')
  start = 'of the released head alone' if released else 'before'
  facts = f'{name} {after:.3f}, {start} {before:.3f}, on {count} public rows'
  if chance is not None:
    error = summaries.standard_error(after, count)
    least = chance if released else max(before, chance)
    learned = after - least > 2 * error
    facts += f'; the commonest class alone has {chance:.3f}'
  if summary['held_steps']:
    facts += f'; {summary["held_steps"]} steps diverged and were left out'
  privacy = 'not private'
  if summary['private']:
    epsilon = summaries.round_up(summary['epsilon'])
    privacy = f'epsilon {epsilon:.3f} at delta {summary["plan"]["delta"]:g}'
  said = 'learned' if learned else 'learned nothing that these rows show'
  return f'{said}: {facts} ({summary["optimizer"]}, {privacy}).'


def pictures(runs: dict[str, finished.Finished]) -> Iterator[tuple[str, str]]:
  """Each measure over the steps, and over epsilon of as many steps.

  Yields:
    What a picture shows, in words, and SVG in base64.
  """
  measures = {
    name: summaries.measure(run.summary['final']) for name, run in runs.items()
  }
  for measure in dict.fromkeys(measures.values()):
    those = {name: x for name, x in runs.items() if measures[name] == measure}
    yield _picture(measure, those, over_epsilon=False)
    if any(run.summary['private'] for run in those.values()):
      yield _picture(measure, those, over_epsilon=True)


def _picture(
  measure: str, runs: dict[str, finished.Finished], *, over_epsilon: bool
) -> tuple[str, str]:
  figure = Figure(figsize=(5, 3.5), layout='constrained')
  axis, told = figure.add_subplot(), []
  for number, (name, run) in enumerate(runs.items()):
    rows = summaries.Metrics(run.folder / 'metrics.jsonl', math.inf).rows
    values, color = [row[measure] for row in rows], f'C{number}'
    told.append(f'{name} from {values[0]:.3f} to {values[-1]:.3f}')
    if over_epsilon and not run.summary['private']:
      label = f'{name} (not private)'
      axis.axhline(values[-1], linestyle='--', label=label, color=color)
      continue
    x = run.summary['epsilons'] if over_epsilon else [r['step'] for r in rows]
    axis.plot(x, values, 'o-', label=name, color=color, markersize=4)
  found = {run.summary['chance'] for run in runs.values()}
  for chance in found - {None}:
    axis.axhline(chance, linestyle=':', color='gray', label='commonest class')
    told.append(f'the commonest class alone {chance:.3f}')
  name = measure.removeprefix('eval_')
  x_name = 'epsilon of a run of this length' if over_epsilon else 'step'
  axis.set(xlabel=x_name, ylabel=name)
  low, high = axis.get_ylim()
  if name == 'perplexity' and high > 10 * low:
    axis.set_yscale('log')
  axis.grid(alpha=0.3)
  axis.legend(fontsize='small')
  buffer = io.BytesIO()
  figure.savefig(buffer, format='svg')
  svg = base64.b64encode(buffer.getvalue()).decode()
  return f'{name} over {x_name}: {"; ".join(told)}', svg


def option_groups(run: finished.Finished) -> dict[str, dict[str, str]]:
  """All options under the titles of the help, and what follows from them."""
  summary = run.summary
  given = vars(run.options) | summary['settings'] | summary.get('plan', {})
  left = {
    name: value if isinstance(value, str) else json.dumps(value)
    for name, value in given.items()
    if value is not None and name not in ('plan', 'resume')
  }
  # The names of files, not where they lie on this machine.
  for name in {'data', 'eval', 'model', 'output'} & left.keys():
    left[name] = pathlib.Path(left[name]).name
  groups = {}
  for section in command_line.COMMANDS['train'].split('\n\n')[2:]:
    title, _, text = section.partition(':\n')
    names = command_line.options(text)
    groups[title] = {name: left.pop(name) for name in names if name in left}
  return groups | {'The mechanism': left, 'Versions': summary['versions']}
