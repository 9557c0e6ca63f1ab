"""The card of an exported model: what was done, and what it guarantees."""

import pathlib

import jinja2

from . import finished


def card(run: finished.Finished, kind: str) -> str:
  """Markdown with the header that the hub reads.

  Args:
    run: What was exported.
    kind: The format it was exported in.
  """
  summary = run.summary
  environment = jinja2.Environment(
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
  )
  template = pathlib.Path(__file__).with_suffix('.md').read_text('utf-8')
  return environment.from_string(template).render(
    kind=kind,
    used=run.options,
    summary=summary,
    plan=summary.get('plan'),
    settings=summary['settings'],
    tags=['lora'] + ['differential-privacy'] * summary['private'],
  )
