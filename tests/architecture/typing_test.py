"""The types of the public surface, as a user's own type checker sees them."""

import pathlib
import re

import pytest
from mypy import api

ROOT = pathlib.Path(__file__).parents[2]
USER = """
from typing import assert_type

import jax
import jax.numpy as jnp
import optax

import prism_optax
from prism_optax import accounting, fixed_rank, lora, transforms

params = {'lora_a': jnp.eye(3, 1), 'lora_b': jnp.zeros((1, 2))}
tx = prism_optax.prism(
  optax.linear_schedule(0.1, 0.0, 100),
  l2_clip_norm=1.0,
  noise_multiplier=0.5,
  expected_batch_size=8,
  layout=lora.Layout(scale=2.0),
)
tx.sensitivity()
state = tx.init(params)
grads = jax.tree.map(lambda x: jnp.ones((8, *x.shape)), params)
updates, state = tx.update(grads, state, params)
params = optax.apply_updates(params, updates)
spelled_out = prism_optax.chain(
  prism_optax.intrinsic_clip(1.0, normalize_by=8),
  prism_optax.tangent_privatizer(0.1),
  prism_optax.retract(),
)
transformation: optax.GradientTransformationExtraArgs = spelled_out
optimizer: optax.GradientTransformation = optax.chain(spelled_out)
frame = fixed_rank.frame(fixed_rank.Factors(jnp.eye(3, 1), jnp.eye(2, 1)))
assert_type(frame.left, jax.Array)
event = accounting.dpsgd_event(0.5, 0.01, 100)
"""
MISTAKES = {
  'a rate that is text': USER.replace(
    'optax.linear_schedule(0.1, 0.0, 100)', "'0.1'"
  ),
  'a clip norm that is text': USER.replace(
    '1.0, normalize', "'1.0', normalize"
  ),
  'a layout that is none': USER.replace('lora.Layout(scale=2.0)', '2.0'),
  'an option that is gone': USER.replace(
    'layout=', 'orthogonalize=True,\n  layout='
  ),
  'factors of one side': USER.replace(', jnp.eye(2, 1))', ')'),
}


@pytest.mark.slow
def test_user_programs_are_checked(tmp_path, monkeypatch):
  assert (ROOT / 'prism_optax' / 'py.typed').exists()
  programs = {'right': USER, **MISTAKES}
  for i, program in enumerate(programs.values()):
    (tmp_path / f'_{i}.py').write_text(program)
  monkeypatch.setenv('MYPYPATH', str(ROOT))
  # optax ships no types; those of the package itself are checked apart.
  printed, *_ = api.run(
    [
      *('--strict', '--follow-imports=silent', '--config-file='),
      *('--disable-error-code=import-untyped', f'--cache-dir={tmp_path}'),
      *map(str, tmp_path.glob('_*.py')),
    ]
  )
  wrong = set(re.findall(r'_(\d+)\.py:\d+: error', printed))
  expected = {str(i) for i, name in enumerate(programs) if name in MISTAKES}
  assert wrong == expected, printed
