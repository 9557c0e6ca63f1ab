"""The files in ``templates``, filled in: a report's page, and a model card."""

from typing import Any

import jinja2


def render(name: str, **values: Any) -> str:
  """The text of a template; what is put into HTML is escaped."""
  environment = jinja2.Environment(
    loader=jinja2.PackageLoader(__package__ or ''),
    autoescape=jinja2.select_autoescape(),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
  )
  return environment.get_template(name).render(**values)
