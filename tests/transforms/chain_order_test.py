"""Which chains are refused, and what they would have cost."""

import jax
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import lora, transforms
from tests import cases
from tests.transforms import chains

pytestmark = pytest.mark.usefixtures('x64')


_clip, _noise, _direction = chains.clip, chains.noise, chains.direction
_retract = prism_optax.retract


def _nothing(stacks, state, step):
  del step
  pairs, others = stacks
  return stacks._replace(pairs=pairs, others=others), state


OWN = transforms.tangent_transformation('mine', _nothing)
REFUSED = {
  'a clip behind the noise': (
    [_noise(), _clip()], 'intrinsic_clip must come first, got tangent_priv',
  ),
  'two clips': ([_clip(), _clip()], 'must come first, got intrinsic_clip'),
  'a cap before the clip': (
    [optax.clip_by_global_norm(1.0), _clip(), _noise()],
    'must come first, got transformation 0 of the chain before it',
  ),
  'an accumulation before the clip': (
    [optax.MultiSteps(optax.identity(), 2).gradient_transformation(), _clip()],
    'must come first, got transformation 0',
  ),
  'a mask before the clip': (
    [optax.masked(optax.scale(2.0), {'a': True}), _clip(), _noise()],
    'must come first, got transformation 0',
  ),
  'something of ones own before the clip': (
    [OWN, _clip(), _noise()], 'must come first, got mine before it',
  ),
  'a scale between clip and noise': (
    [_clip(), optax.scale(2.0), _noise()],
    'directly after the clip, got transformation 1 of the chain between',
  ),
  'a direction between clip and noise': (
    [_clip(), _direction(), _noise()],
    'directly after the clip, got scale_by_rank_preconditioner between',
  ),
  'a direction before the noise, without a clip': (
    [_direction(), _noise()], 'directly after the clip',
  ),
  'something behind the retraction': (
    [_clip(), _noise(), prism_optax.retract(), optax.scale(0.5)],
    'retraction must come last, got transformation 3',
  ),
  'two retractions': (
    [prism_optax.retract(), prism_optax.retract()],
    'retraction must come last, got retract after it',
  ),
  'noise behind the retraction': (
    [_clip(), _noise(), prism_optax.retract(), _noise()], 'directly after',
  ),
  'no noise': ([_clip()], 'No noise after intrinsic_clip'),
  'something of ones own that adds none': (
    [_clip(), OWN], 'No noise after intrinsic_clip',
  ),
  'no noise, and a whole optimizer': (
    [_clip(), _direction(), prism_optax.retract()],
    'No noise after intrinsic_clip.*noise_elsewhere=True',
  ),
  'the wrong order in nested chains': (
    [
      prism_optax.chain(_direction()),
      prism_optax.chain(_clip(), _noise(), retract_elsewhere=True),
    ],
    r'intrinsic_clip, ...\) must come first, got scale_by_rank_preconditioner',
  ),
  'no retraction': (
    [_clip(), _noise(), _direction()],
    r'out of scale_by_rank_preconditioner are tangent coordinates.*retract\(\)',
  ),
  'noise alone': (
    [_clip(), _noise()], 'out of tangent_privatizer are tangent coordinates'
  ),
  'an optimizer of optax in the place of the retraction': (
    [_noise(), optax.adamw(1e-3)],
    'out of transformation 1 of the chain are tangent coordinates',
  ),
  'per_matrix_clip': (
    [prism_optax.per_matrix_clip(1.0), _noise()],
    'Transformation 0 clips gradients as they are',
  ),
  'nothing': ([], 'at least one transformation, got none'),
}  # fmt: skip


@pytest.mark.parametrize('kind', REFUSED)
def test_orders_that_void_the_guarantee_are_refused(kind):
  parts, message = REFUSED[kind]
  with pytest.raises(ValueError, match=message):
    prism_optax.chain(*parts)


def test_noise_of_ones_own_is_the_noise_that_a_clip_asks_for():
  noise = transforms.tangent_transformation('own', _nothing, adds_noise=True)
  assert prism_optax.chain(_clip(), noise, _retract()).sensitivity() == 0.4
  with pytest.raises(ValueError, match='own must come directly after the clip'):
    prism_optax.chain(_clip(), _direction(), noise, _retract())


def test_a_clip_without_noise_can_be_asked_for():
  clip = prism_optax.chain(_clip(), noise_elsewhere=True)
  problem, params = chains.problem_and_params()
  grads = chains.batch(problem, params)
  found, with_own, want = (
    jax.jit(tx.update)(grads, tx.init(params), params)[0]
    for tx in (clip, optax.chain(clip, OWN), _clip())
  )
  cases.assert_same_bits(found, want)
  cases.assert_same_bits(with_own, want)
  # Whoever takes it is asked again.
  with pytest.raises(ValueError, match='No noise after intrinsic_clip'):
    prism_optax.chain(clip, _direction())
  chain = prism_optax.chain(clip, _noise(), _retract())
  assert chain.sensitivity() == chains.CLIP / chains.BATCH_SIZE
  # No other permission is in it.
  with pytest.raises(ValueError, match='directly after the clip'):
    prism_optax.chain(_clip(), _direction(), _noise(), noise_elsewhere=True)


def test_a_release_without_retraction_can_be_asked_for():
  release = prism_optax.chain(_clip(), _noise(), retract_elsewhere=True)
  # Whoever takes it is asked again; and what has no noise is a part.
  with pytest.raises(ValueError, match='end with retract'):
    prism_optax.chain(release, _direction())
  descent = prism_optax.chain(prism_optax.chain(_direction()), _retract())
  assert prism_optax.chain(release, descent).sensitivity()
  # No other permission is in it.
  with pytest.raises(ValueError, match='No noise after'):
    prism_optax.chain(_clip(), retract_elsewhere=True)


def test_a_chain_has_one_layout():
  one, other = lora.Layout(scale=2.0), lora.Layout(scale=4.0)
  noise = prism_optax.tangent_privatizer(1.0, layout=one)
  with pytest.raises(ValueError, match=r'scale=4.0.*scale=2.0'):
    prism_optax.chain(noise, layout=other, retract_elsewhere=True)
  with pytest.raises(ValueError, match='Expected one layout'):
    prism_optax.chain(noise, prism_optax.retract(layout=other))
  # What one part says holds for those that say nothing.
  tx = prism_optax.chain(noise, _retract())
  assert tx.layout == prism_optax.chain(tx, layout=one).layout == one


def test_states_and_arguments_that_do_not_fit_are_named():
  problem, params = chains.problem_and_params()
  grads = chains.batch(problem, params)
  tx = prism_optax.chain(_clip(), _noise(), retract_elsewhere=True)
  state = prism_optax.chain(_noise(), retract_elsewhere=True).init(params)
  with pytest.raises(ValueError, match='a state of 2 parts, got 1'):
    tx.update(grads, state, params)
  with pytest.raises(ValueError, match='`update` needs `params`'):
    tx.update(grads, tx.init(params))


# What the refused orders would have cost: how far one record moves the sum, in
# units of the clip norm. It may be one.


def _neighbours(size, records=12):
  """Records that agree, and one of another size that is there or is not.

  Absent, it is a row of zeros: the clip counts both alike.
  """
  one = jax.tree.map(
    lambda x: x[:1], chains.batch(*chains.problem_and_params())
  )
  # Each of them is clipped, with some room: each adds the clip norm to the sum.
  length = 100 * chains.CLIP / cases.norm(one)
  rows = jax.tree.map(lambda x: np.repeat(length * x, records, 0), one)
  return [
    jax.tree.map(lambda x, v=v: np.concatenate([x[:-1], v * x[-1:]]), rows)
    for v in (0.0, size)
  ]


def _cap(params):
  return optax.clip_by_global_norm(1000 * chains.CLIP)


def _masked_cap(params):
  return optax.masked(_cap(params), jax.tree.map(lambda _: True, params))


def _accumulated(params):
  """Rows are averages of several records: the last ones of two parts differ."""
  del params
  steps = optax.MultiSteps(optax.identity(), 2).gradient_transformation()
  second = jax.tree.map(
    lambda x: np.concatenate([x[:-1], x[:1]]), _neighbours(0.0)[0]
  )

  def update(grads, state, params=None):
    del params
    _, state = steps.update(grads, state)
    return steps.update(second, state)

  return optax.GradientTransformation(steps.init, update)


@pytest.mark.parametrize(
  ('before', 'sizes', 'least', 'most'),
  [
    (lambda params: optax.identity(), (-1.0, 1e6, 1e30), 0.0, 1 + 1e-9),
    # A huge record scales all others down, below the clip norm: eleven times.
    (_cap, (-1e6,), 9.0, 12.0),
    (_masked_cap, (-1e6,), 9.0, 12.0),
    # One of them turns its average round.
    (_accumulated, (-1e6,), 1.99, 2.01),
  ],
  ids=['nothing', 'a cap', 'a masked cap', 'an accumulation'],
)
def test_what_stands_before_the_clip_moves_the_sum(before, sizes, least, most):
  """The attack on the order that is allowed, and on those that are refused."""
  _, params = chains.problem_and_params()
  clip, tx = prism_optax.intrinsic_clip(chains.CLIP), before(params)

  @jax.jit
  def summed(grads):
    grads, _ = tx.update(grads, tx.init(grads), params)
    return clip.update(grads, clip.init(params), params)[0]

  for size in sizes:
    one, other = (jax.device_get(summed(x)) for x in _neighbours(size))
    moved = cases.norm(jax.tree.map(np.subtract, one, other)) / chains.CLIP
    assert least <= moved <= most
