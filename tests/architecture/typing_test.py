"""The types of the public surface, as a user's own type checker sees them."""

import pathlib
import site
import subprocess
import sys
import textwrap
import venv

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


@pytest.fixture(scope='module')
def check(tmp_path_factory):
  """A type checker in an environment where the wheel is installed."""
  folder = tmp_path_factory.mktemp('user')
  venv.create(folder / 'env', with_pip=True)
  python = folder / 'env' / 'bin' / 'python'
  (packages,) = (folder / 'env').glob('lib/*/site-packages')
  subprocess.run(
    [python, '-m', 'pip', 'install', '-q', '--no-deps', ROOT], check=True
  )
  # What the wheel depends on stays where these tests have it.
  (packages / 'more.pth').write_text('\n'.join(site.getsitepackages()))
  assert (packages / 'prism_optax' / 'py.typed').exists()

  def run(program):
    path = folder / 'program.py'
    path.write_text(textwrap.dedent(program))
    return subprocess.run(
      [
        # optax ships no types.
        sys.executable, '-m', 'mypy', '--strict',
        '--disable-error-code=import-untyped', '--python-executable', python,
        '--cache-dir', folder / 'cache', path,
      ],
      cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip

  return run


@pytest.mark.slow
def test_a_user_program_is_checked_against_the_wheel(check):
  done = check(USER)
  assert not done.returncode, done.stdout
  for mistake, program in MISTAKES.items():
    assert program != USER
    assert check(program).returncode == 1, mistake
