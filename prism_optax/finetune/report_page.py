"""One HTML page about finished runs, made of what they wrote for the public."""

import argparse
import base64
import html
import io
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt

from . import command_line, files, finished, public_rows, reporting

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222;
  max-width: 64rem; margin: 1.5rem auto; padding: 0 1rem }
h2 { border-top: 1px solid #ddd; padding-top: 1rem; margin-top: 2rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border-bottom: 1px solid #ddd; padding: .3rem .8rem .3rem 0;
  text-align: left; vertical-align: top }
td { overflow-wrap: anywhere }
td:first-child { overflow-wrap: normal }
.wide { overflow-x: auto }
.figures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)) }
img { width: 100%; max-width: 34rem }
.bar { width: 7rem; background: #eee }
.bar div { background: #4477aa; height: 1em }
"""
SHOWN_CLASSES = 20  # The worst ones; the others are folded away.


def report(command: argparse.Namespace) -> None:
  """The command ``report``.

  Raises:
    ValueError: If there is no run, or one is not finished.
  """
  found = [run for folder in command.runs for run in finished.find_all(folder)]
  if not found:
    raise ValueError('report needs the folder of a run.')
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


def page(runs: dict[str, finished.Finished], rows: int = 0) -> str:
  """The whole page.

  Args:
    runs: By the names that they are to have on it.
    rows: How many public rows the models are to answer; 0 leaves the models
      alone.
  """
  verdicts = ''.join(
    f'<li><b>{html.escape(name)}</b>: {html.escape(verdict(run.summary))}</li>'
    for name, run in runs.items()
  )
  parts = [
    '<!doctype html><html lang="en"><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f'<title>Private fine-tuning</title><style>{STYLE}</style>',
    '<h1>Private fine-tuning</h1>',
    f'<ul>{verdicts}</ul>',
    '<p>All figures are of public evaluation rows or declared.</p>',
    '<div class="figures">',
    *_pictures(runs),
    '</div>',
  ]
  for name, run in runs.items():
    parts += [f'<h2>{html.escape(name)}</h2>', _details(run)]
    if rows:
      parts.append(_spoken(run, rows))
    parts.append(_options(run))
  return '\n'.join(parts) + '\n'


def verdict(summary: dict[str, Any]) -> str:
  """Whether a run learned anything, and for which epsilon, in a sentence.

  Accuracy has to rise by two standard errors over the rows, above what it was
  before and above the share of the commonest class.
  """
  measure = reporting.measure(summary['final'])
  before, after = (summary[x][measure] for x in ('start', 'final'))
  name, count = measure.removeprefix('eval_'), summary.get('eval_rows')
  chance, learned = summary.get('chance'), after < before
  facts = f'{name} {after:.3f}, before {before:.3f}'
  if count:
    facts += f', on {count} public rows'
  if chance is not None and count:
    error = math.sqrt(after * (1 - after) / count)
    learned = after - max(before, chance) > 2 * error
    facts += f'; the commonest class alone has {chance:.3f}'
  elif measure == 'eval_accuracy':
    learned = after > before
  if summary.get('held_steps'):
    facts += f'; {summary["held_steps"]} steps diverged and were left out'
  privacy = 'not private'
  if summary['private']:
    epsilon = reporting.round_up(summary['epsilon'])
    privacy = f'epsilon {epsilon:.3f} at delta {summary["plan"]["delta"]:g}'
  said = 'learned' if learned else 'learned nothing that these rows show'
  return f'{said}: {facts} ({summary["optimizer"]}, {privacy}).'


def _pictures(runs: dict[str, finished.Finished]) -> list[str]:
  """Each measure over the steps, and over what was spent by then."""
  by_measure: dict[str, dict[str, finished.Finished]] = {}
  for name, run in runs.items():
    measure = reporting.measure(run.summary['final'])
    by_measure.setdefault(measure, {})[name] = run
  return [
    _picture(measure, those, over_epsilon)
    for measure, those in by_measure.items()
    for over_epsilon in (False, True)
    if not over_epsilon or any(run.summary['private'] for run in those.values())
  ]


def _picture(
  measure: str, runs: dict[str, finished.Finished], over_epsilon: bool
) -> str:
  figure, axis = plt.subplots(figsize=(5, 3.5), layout='constrained')
  told = []
  for number, (name, run) in enumerate(runs.items()):
    rows, color = _metrics(run), f'C{number}'
    values = [row[measure] for row in rows]
    told.append(f'{name} from {values[0]:.3f} to {values[-1]:.3f}')
    if over_epsilon and not run.summary['private']:
      label = f'{name} (not private)'
      axis.axhline(values[-1], linestyle='--', label=label, color=color)
      continue
    x = run.summary['epsilons'] if over_epsilon else [r['step'] for r in rows]
    axis.plot(x, values, 'o-', label=name, color=color, markersize=4)
  found = {run.summary.get('chance') for run in runs.values()}
  for chance in (x for x in found if x is not None):
    axis.axhline(chance, linestyle=':', color='gray', label='commonest class')
    told.append(f'the commonest class alone {chance:.3f}')
  name = measure.removeprefix('eval_')
  x_name = 'epsilon spent by then' if over_epsilon else 'step'
  axis.set(xlabel=x_name, ylabel=name)
  low, high = axis.get_ylim()
  if name == 'perplexity' and high > 10 * abs(low):
    axis.set_yscale('log')
  axis.grid(alpha=0.3)
  axis.legend(fontsize='small')
  buffer = io.BytesIO()
  figure.savefig(buffer, format='svg')
  plt.close(figure)
  encoded = base64.b64encode(buffer.getvalue()).decode()
  alt = html.escape(f'{name} over {x_name}: {"; ".join(told)}')
  return f'<img alt="{alt}" src="data:image/svg+xml;base64,{encoded}">'


def _metrics(run: finished.Finished) -> list[dict[str, Any]]:
  lines = (run.folder / 'metrics.jsonl').read_text('utf-8').splitlines()
  return [json.loads(line) for line in lines]


def _details(run: finished.Finished) -> str:
  summary = run.summary
  rows = [
    [name.removeprefix('eval_'), f'{before:.4f}', f'{final:.4f}']
    for name, before in summary['start'].items()
    if name.startswith('eval_')
    for final in [summary['final'][name]]
  ]
  return (
    f'<p>{html.escape(summary["task"])}, {html.escape(summary["optimizer"])}: '
    f'{html.escape(summary["statement"])}.</p>\n'
    + _table(rows, ('measure', 'before', 'after'))
  )


def _options(run: finished.Finished) -> str:
  """All options under the titles of the help, and what follows from them."""
  summary = run.summary
  left = vars(run.options) | summary['settings'] | summary.get('plan', {})
  left = {
    # The names of files, not where they lie on this machine.
    name: pathlib.Path(value).name
    if name in ('data', 'eval', 'model', 'output')
    else value
    for name, value in left.items()
    if value is not None and name not in ('plan', 'resume')
  }
  groups = {}
  for section in command_line.TRAIN.split('\n\n')[2:]:
    title, _, text = section.partition(':\n')
    names = command_line.options(text)
    groups[title] = {name: left.pop(name) for name in names if name in left}
  groups |= {'The mechanism': left, 'Versions': summary['versions']}
  return '\n'.join(
    f'<details><summary>{title}</summary>'
    + _table([[name, _shown(x)] for name, x in values.items()], ())
    + '</details>'
    for title, values in groups.items()
  )


def _spoken(run: finished.Finished, rows: int) -> str:
  """What the model says to public rows."""
  if run.options.task == 'instruct':
    found = [list(x.values()) for x in public_rows.answers(run, rows)]
    return _table(found, ('prompt', 'response', 'before', 'after'))
  if run.options.task != 'classify':
    return ''
  classes = sorted(public_rows.per_class(run), key=lambda x: x[2])
  worst, others = classes[:SHOWN_CLASSES], classes[SHOWN_CLASSES:]
  text = '<h3>Accuracy by class, the worst first</h3>' + _bars(worst)
  if others:
    text += f'<details><summary>The other {len(others)} classes</summary>'
    text += f'{_bars(others)}</details>'
  return text


def _bars(classes: Sequence[tuple[str, int, float]]) -> str:
  lines = ''.join(
    f'<tr><td>{html.escape(name)}</td><td>{accuracy:.3f}</td><td>{rows}</td>'
    f'<td><div class="bar"><div style="width:{accuracy:.1%}"></div></div></td>'
    '</tr>'
    for name, rows, accuracy in classes
  )
  head = '<tr><th>class</th><th>accuracy</th><th>rows</th><th></th></tr>'
  return f'<table>{head}{lines}</table>'


def _shown(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value)


def _table(rows: Sequence[Sequence[Any]], head: Sequence[str]) -> str:
  def line(tag: str, cells: Sequence[Any]) -> str:
    return (
      '<tr>'
      + ''.join(f'<{tag}>{html.escape(str(x))}</{tag}>' for x in cells)
      + '</tr>'
    )

  body = '\n'.join(line('td', row) for row in rows)
  top = line('th', head) if head else ''
  return f'<div class="wide"><table>\n{top}\n{body}\n</table></div>'
