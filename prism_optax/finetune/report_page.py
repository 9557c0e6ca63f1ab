"""One HTML page about finished runs, made of what they wrote for the public."""

import argparse
import base64
import html
import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use('Agg')
from matplotlib import pyplot as plt

from . import files, finished, options, public_rows, reporting

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { border-bottom: 1px solid #ddd; padding: .3rem .8rem; text-align: left }
img { max-width: 100% }
"""


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
  parts = [
    '<!doctype html><html lang="en"><meta charset="utf-8">',
    '<meta name="viewport" content="width=device-width, initial-scale=1">',
    f'<title>Private fine-tuning</title><style>{STYLE}</style>',
    '<h1>Private fine-tuning</h1>',
    '<p>All figures are of public evaluation rows or declared.</p>',
    _comparison(runs),
    _picture(runs),
  ]
  for name, run in runs.items():
    parts += [f'<h2>{html.escape(name)}</h2>', _details(run)]
    if rows:
      parts.append(_spoken(run, rows))
  return '\n'.join(parts) + '\n'


def _comparison(runs: dict[str, finished.Finished]) -> str:
  rows = []
  for name, run in runs.items():
    summary = run.summary
    kind = reporting.measure(run.summary['final'])
    epsilon, delta = 'not private', ''
    if summary['private']:
      epsilon = f'{reporting.round_up(summary["epsilon"]):.3f}'
      delta = f'{summary["plan"]["delta"]:g}'
    rows.append(
      [
        name,
        summary['task'],
        summary['optimizer'],
        epsilon,
        delta,
        summary['final']['step'],
        kind.removeprefix('eval_'),
        f'{summary["start"][kind]:.4f}',
        f'{summary["final"][kind]:.4f}',
      ]
    )
  head = (
    *('run', 'data', 'method', 'epsilon', 'delta', 'steps'),
    *('measure', 'before', 'after'),
  )
  return _table(rows, head)


def _picture(runs: dict[str, finished.Finished]) -> str:
  """The measure over the steps and over what was spent by then."""
  figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout='constrained')
  for name, run in runs.items():
    kind = reporting.measure(run.summary['final'])
    rows = _metrics(run)
    values = [row[kind] for row in rows]
    style = {'label': name, 'linewidth': 2, 'marker': 'o', 'markersize': 4}
    axes[0].plot([row['step'] for row in rows], values, **style)
    if run.summary['private']:
      axes[1].plot(run.summary['epsilons'], values, **style)
    else:
      axes[1].axhline(
        values[-1], linestyle='--', label=f'{name} (not private)', color='gray'
      )
    for axis in axes:
      axis.set_ylabel(kind.removeprefix('eval_'))
  axes[0].set_xlabel('step')
  axes[1].set_xlabel('epsilon spent by then')
  for axis in axes:
    axis.grid(alpha=0.3)
  axes[1].legend(fontsize='small')
  buffer = io.BytesIO()
  figure.savefig(buffer, format='png', dpi=150)
  plt.close(figure)
  encoded = base64.b64encode(buffer.getvalue()).decode()
  return f'<img alt="curves" src="data:image/png;base64,{encoded}">'


def _metrics(run: finished.Finished) -> list[dict[str, Any]]:
  lines = (run.folder / 'metrics.jsonl').read_text('utf-8').splitlines()
  return [json.loads(line) for line in lines]


def _details(run: finished.Finished) -> str:
  summary = run.summary
  parts = [f'<p>{html.escape(summary["statement"])}.</p>']
  rows = [
    [name.removeprefix('eval_'), f'{before:.4f}', f'{final:.4f}']
    for name, before in summary['start'].items()
    if name.startswith('eval_')
    for final in [summary['final'][name]]
  ]
  parts.append(_table(rows, ('measure', 'before', 'after')))
  for name, values in (
    ('Settings', summary['settings']),
    ('Options', _without_paths(run.options)),
    ('Versions', summary['versions']),
  ):
    rows = [[key, _shown(value)] for key, value in values.items()]
    parts.append(
      f'<details><summary>{name}</summary>{_table(rows, ("", ""))}</details>'
    )
  return '\n'.join(parts)


def _without_paths(used: options.Options) -> dict[str, Any]:
  """The names of files, not where they lie on this machine."""
  return {
    key: pathlib.Path(value).name
    if key in ('data', 'eval', 'model', 'output') and value
    else value
    for key, value in vars(used).items()
  }


def _spoken(run: finished.Finished, rows: int) -> str:
  """What the model says to public rows."""
  if run.options.task == 'classify':
    found: list[Any] = [
      (name, count, f'{accuracy:.3f}')
      for name, count, accuracy in public_rows.per_class(run)
    ]
    return _table(found, ('class', 'public rows', 'accuracy'))
  if run.options.task == 'instruct':
    found = [list(x.values()) for x in public_rows.answers(run, rows)]
    return _table(found, ('prompt', 'response', 'before', 'after'))
  return ''


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
  return f'<table>\n{line("th", head)}\n{body}\n</table>'
