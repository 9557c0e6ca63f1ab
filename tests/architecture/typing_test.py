"""The types of the public surface, as a user's own type checker sees them."""

import os
import pathlib
import subprocess
import sys

import pytest

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


def check(program, folder):
  path = folder / 'program.py'
  path.write_text(program)
  # optax ships no types; those of the package itself are checked apart.
  return subprocess.run(
    [
      *(sys.executable, '-m', 'mypy', '--strict', '--follow-imports=silent'),
      *('--disable-error-code=import-untyped', '--cache-dir', folder / 'cache'),
      path,
    ],
    cwd=folder, env=os.environ | {'MYPYPATH': str(ROOT)},
    capture_output=True, text=True, check=False,
  )  # fmt: skip


@pytest.mark.slow
def test_a_user_program_is_checked(tmp_path):
  assert (ROOT / 'prism_optax' / 'py.typed').exists()
  done = check(USER, tmp_path)
  assert not done.returncode, done.stdout
  for mistake, program in MISTAKES.items():
    assert program != USER
    assert check(program, tmp_path).returncode == 1, mistake
