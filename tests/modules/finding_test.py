"""Finding pairs: what is accepted, and what every refusal says."""

import functools

import numpy as np
import pytest
from flax import nnx

from prism_optax import lora

ones = functools.partial(np.ones, dtype=np.float32)


def _pair(n=6, m=5, r=2, stack=()):
  return {'lora_a': ones((*stack, n, r)), 'lora_b': ones((*stack, r, m))}


def _sizes(params, layout=None):
  return [
    (name, x.left.shape[-2], *x.right.shape[-2:], x.left.shape[:-2])
    for name, x in lora.deltas(params, layout=layout).items()
  ]


def test_nested_dicts_and_stacks():
  params = {
    'layers': [_pair(), _pair(stack=(3, 4))],
    'head': {'kernel': ones((5, 2))},
    'skipped': None,
  }
  assert _sizes(params) == [
    ('layers/0', 5, 6, 2, ()),
    ('layers/1', 5, 6, 2, (3, 4)),
  ]


def test_stacks_as_long_as_the_rank_read_as_stacks():
  """(r, in, r) and (r, r, out): the first axis is the stack, never another."""
  assert _sizes(_pair(n=2, m=2, r=2, stack=(2,))) == [('lora_a', 2, 2, 2, (2,))]


@pytest.mark.parametrize(
  ('params', 'match'),
  [
    ({}, 'at least one array'),
    ({'w': ones((3, 2))}, r'No LoRA pair found.*w \(3, 2\)'),
    (dict.fromkeys('abcdefghijk', ones(2)), r'g \(2,\), h \(2,\) and 3 more'),
    ({'x': {'lora_a': ones((6, 2))}},
      r'belong to no pair: x/lora_a \(6, 2'),
    ({'x': {'lora_a': ones((6, 2))}, 'y': {'lora_b': ones((2, 5))}},
      'x/lora_a.*y/lora_b'),
    ({**_pair(), 'w_lora_a': ones((6, 2))},
      r'named like LoRA factors.*w_lora_a'),
    ({**_pair(), 'x': {'lora_b': ones((2, 5))}}, 'named like.*x/lora_b'),
    ({**_pair(), 'x.lora_A.weight': ones((2, 6))}, 'named like.*x.lora_A'),
    ({**_pair(), 'x': {'lora': {'a': ones((6, 2))}}}, 'named like.*lora/a'),
    ({**_pair(), 'lora': {'a': ones((6, 2))}}, 'named like.*lora/a'),
    ({'lora_a': ones((6, 2)), 'lora_b': ones((3, 5))},
      r'does not fit together: lora_a \(6, 2\) and lora_b \(3, 5\)'),
    ({'lora_a': ones((3, 6, 2)), 'lora_b': ones((4, 2, 5))},
      'does not fit together'),
    (_pair(n=3, m=9, r=4), r'rank <= min.*rank=4, in=3, out=9'),
    ({'lora_a': ones(6), 'lora_b': ones((2, 5))}, 'two axes'),
    ({**_pair(), 'count': np.ones((), np.int32)}, "'count' of dtype int32"),
    ({**_pair(), 'name': 'x'}, "'name' of <class 'str'>"),
    ({'a': _pair(), 'a/lora_a': ones(3)}, 'distinct names .*a/lora_a'),
  ],
)  # fmt: skip
def test_refusals_name_the_leaves(params, match):
  with pytest.raises(ValueError, match=match):
    lora.deltas(params)


def test_given_pairs():
  params = {'down': ones((6, 2)), 'up': ones((5, 2)), 'b': ones(5)}
  layout = lora.Layout(-1, -1, (), (), scale=4.0)
  pairs = [lora.Pair('down', 'up', layout)]
  assert [x[1:] for x in _sizes(params, pairs)] == [(5, 6, 2, ())]
  (z,) = lora.deltas(params, layout=pairs, dense=True).values()
  np.testing.assert_allclose(z, 8, rtol=1e-6)
  two = dict.fromkeys('abcd', params['down'])
  pairs = lora.Pair('c', 'b', layout), lora.Pair('d', 'a', layout)
  assert [*lora.deltas(two, layout=pairs)] == ['d', 'c']  # As the leaves are.
  for pair, match in (
    (lora.Pair('down', 'sideways', layout), "No leaf at 'sideways'"),
    (lora.Pair('down', 'down', layout), 'one pair only'),
    (lora.Pair('down', 'up', lora.Layout(-1, 0, (), ())), 'not fit together'),
    (('down', 'up'), r'lora\.Pair'),
  ):
    with pytest.raises(ValueError, match=match):
      lora.deltas(params, layout=[pair])


def test_given_layouts():
  params = {'q': _pair(), 'mlp': {'up': _pair()}}
  for layout, scales in (
    (lora.Layout(scale=2.0), {'mlp/up': 2.0, 'q': 2.0}),
    ({'mlp/*': lora.Layout(scale=3.0)}, {'mlp/up': 3.0, 'q': 1.0}),
  ):
    found = lora.deltas(params, layout=layout, dense=True)
    for name, scale in scales.items():
      np.testing.assert_allclose(found[name], 2 * scale, rtol=1e-6)
  cube = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
  of = {'lora_a': cube, 'lora_b': cube}  # In another way than by their names.
  (z,) = lora.deltas(of, layout=lora.Layout(1, 1), dense=True).values()
  np.testing.assert_allclose(z, cube.mT @ cube)
  with pytest.raises(ValueError, match=r"'attention'.*match no pair"):
    lora.deltas(params, layout={'attention': lora.Layout(scale=3.0)})


def test_description_lists_everything():
  text = lora.describe_pairs({'q': _pair(stack=(3,)), 'head': ones(4)})
  assert text.splitlines()[:2] == [
    'module  right (n, r)  left (m, r)  stack  scale',
    'q       6 x 2         5 x 2        (3,)   1',
  ]
  assert text.splitlines()[-1] == 'other trainable leaves: head'


def _warning(params, layout=None):
  last = lora.describe_pairs(params, layout=layout).splitlines()[-1]
  return last if last.startswith('warning: ') else ''


def _lora_linear():
  return nnx.LoRALinear(6, 5, lora_rank=2, rngs=nnx.Rngs(0))


WHOLE = {
  # A filter that lets kernels through: nnx.LoRAParam is an nnx.Param.
  'nnx.Param': (lambda: nnx.state(_lora_linear(), nnx.Param), 'kernel'),
  'a wrapped module': (
    lambda: nnx.state(
      {'up': nnx.LoRA(6, 2, 5, base_module=_lora_linear(), rngs=nnx.Rngs(0))},
      nnx.Param,
    ),
    'up/base_module/kernel',
  ),
  'a single pair': (lambda: _pair() | {'kernel': ones((6, 5))}, 'kernel'),
  'a pair in a module of its own': (
    lambda: {'d': {'lora': _pair(), 'kernel': ones((6, 5))}}, 'd/kernel',
  ),
  'linen': (lambda: {'d': _pair() | {'kernel': ones((6, 5))}}, 'd/kernel'),
  'qwix': (
    lambda: {
      'd': {
        'w_lora_a': ones((3, 6, 2)),
        'w_lora_b': ones((3, 2, 5)),
        'w': ones((3, 6, 5)),
      }
    },
    'd/w',
  ),
}  # fmt: skip


@pytest.mark.parametrize('kind', WHOLE)
def test_weights_that_are_trained_as_well_are_named(kind):
  make, name = WHOLE[kind]
  assert f' {name}, the weights that adapters change' in _warning(make())


def test_a_head_is_no_reason_to_warn_unless_it_is_nearly_all():
  """22 entries are factors; the head has the shape of a weight, elsewhere."""
  params = {'d': _pair(), 'head': {'kernel': ones((6, 5)), 'bias': ones(5)}}
  assert not _warning(params)
  params['head']['kernel'] = ones((6, 33))
  assert '90% of the entries' in _warning(params)
  text = _warning(params | {f'x{i}': ones(99) for i in range(2)})
  assert ': head/bias, head/kernel, x0 and 1 more. They' in text
  params['head']['kernel'] = ones((6, 32))
  assert not _warning(params)
