"""The package's own names; pyproject.toml has the layers of its modules."""

import ast
import importlib
import pathlib

import pytest

import prism_optax
from tests import conftest


def test_the_package_itself_only_re_exports():
  """What a type checker reads and what is imported on use are the same."""
  source, found = pathlib.Path(prism_optax.__file__).read_text(), {}
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, ast.ImportFrom):
      found |= {alias.name: node.module for alias in node.names}
  assert sorted(found) == sorted(prism_optax.__all__)
  assert set(found) <= set(dir(prism_optax))  # Of what is not imported yet.
  for name, home in found.items():
    value = getattr(prism_optax, name)
    assert value is getattr(importlib.import_module(home), name), name
  with pytest.raises(AttributeError, match="'prism_optax' has no .* 'nothing'"):
    _ = prism_optax.nothing


@pytest.mark.slow
def test_accounting_does_without_jax():
  program = 'import sys; from prism_optax import accounting; accounting.epsilon'
  conftest.python('-c', f"{program}; assert 'jax' not in sys.modules")
