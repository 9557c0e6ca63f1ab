"""The steps that the pages show are proved."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import pytest

from prism_optax import accounting, diagnostics
from tests.docs import docs_test

ROOT = pathlib.Path(__file__).parents[2]
FLOAT, BOOL, INT = jnp.float32, bool, jnp.int32


def shape(dtype, *sizes):
  return jax.ShapeDtypeStruct(sizes, dtype)


def until_step(source, count):
  """What a page defines, up to its function `step` of this number."""
  names = {}
  for node in ast.parse(source).body:
    exec(compile(ast.Module([node], []), '<page>', 'exec'), names)
    if isinstance(node, ast.FunctionDef) and node.name == 'step':
      count -= 1
      if not count:
        return names
  raise AssertionError('no step')


def state_of(names):
  """Of the page, or of its optimizer."""
  if 'state' in names:
    return names['state']
  return names['tx'].init(names.get('stacked', names.get('params')))


ROWS, WIDE = shape(FLOAT, 8, 8), shape(FLOAT, 8, 6)
NUMBERS, PADDING = shape(INT, 8), shape(BOOL, 8)
# The arguments behind parameters and state, those with records, the padding.
PAGES = {
  'own_step': ([ROWS, shape(FLOAT, 8, 5), PADDING], (2, 3), 4),
  'from_opacus': ([ROWS, WIDE, PADDING], (2, 3), 4),
  'clip_groups': ([ROWS, NUMBERS, PADDING], (2, 3), 4),
  'one_backward_pass': (
    [(shape(FLOAT, 8, 5, 16), NUMBERS), shape(FLOAT, 16, 12)], 2, (),
  ),
  'lora_trees': ([shape(FLOAT, 4, 8)], 2, ()),
  'from_jax_privacy': (
    [shape(FLOAT, 64, 8), shape(FLOAT, 64, 5), shape(BOOL, 64)], (2, 3), 4,
  ),
  'privatizers': ([ROWS, WIDE], (2, 3), ()),
  'train_state': ([ROWS, NUMBERS, PADDING], (2, 3), 4),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize('page', PAGES)
def test_the_step_of_a_page_is_proved(page, monkeypatch):
  # How much noise it is, no proof reads, and to calibrate takes seconds.
  monkeypatch.setattr(
    accounting, 'calibrate_noise_multiplier', lambda *_, **__: 1.0
  )
  rest, private, padding = PAGES[page]
  # The first step of that page has nothing of this package in it.
  number = 2 if page == 'from_jax_privacy' else 1
  names = until_step(docs_test.pasted(ROOT / f'docs/how_to/{page}.md'), number)
  if page == 'train_state':  # Parameters are in the state.
    held = names['state'], names['frozen']
  else:
    held = names.get('stacked', names['params']), state_of(names)
  proof = diagnostics.prove_released(
    names['step'], *held, *rest, private=private, padding=padding
  )
  assert proof, proof
  foreign = [x for x in proof.assumptions if 'not of this package' in x]
  assert len(foreign) == (page == 'privatizers')
  releases = [x for x in proof.trace if x.startswith('a release')]
  assert len(releases) == 1 + (page == 'clip_groups')
