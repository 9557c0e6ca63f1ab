"""PEFT files: round trips, orientation, and every kind of bad file."""

import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors

from prism_optax import lora
from tests import cases
from tests.oracles import oracles

CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'


def _tensors(dtype=np.float32, seed=0):
  """As PEFT writes them: q (in 6, out 5, r 2), v (in 6, out 4, r 3)."""
  rng = np.random.default_rng(seed)
  shapes = {
    'layers.0.q.lora_A': (2, 6), 'layers.0.q.lora_B': (5, 2),
    'layers.0.v.lora_A': (3, 6), 'layers.0.v.lora_B': (4, 3),
  }  # fmt: skip
  return {
    f'{PREFIX}{name}.weight': rng.normal(size=shape).astype(dtype)
    for name, shape in shapes.items()
  }


def _config(**changes):
  config = {
    'peft_type': 'LORA', 'r': 2, 'lora_alpha': 8, 'rank_pattern': {'v': 3},
    'alpha_pattern': {'layers.0.v': 6.0}, 'target_modules': ['q', 'v'],
    'task_type': 'CAUSAL_LM',
  }  # fmt: skip
  return {k: v for k, v in (config | changes).items() if v != 'absent'}


def _folder(path, tensors=None, config=None):
  path.mkdir(exist_ok=True)
  safetensors.save_file(
    _tensors() if tensors is None else tensors, path / TENSORS
  )
  (path / CONFIG).write_text(json.dumps(config or _config()))
  return path


# Reading.


@pytest.mark.parametrize('dtype', [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_read_is_what_peft_computes(tmp_path, dtype):
  """``W + lora_alpha / r * B @ A``, by the definition, for every module."""
  tensors = _tensors(dtype)
  adapter = lora.load_peft(_folder(tmp_path, tensors))
  assert adapter.config['task_type'] == 'CAUSAL_LM'
  assert adapter.others == {}
  scales = {'layers.0.q': 8 / 2, 'layers.0.v': 6 / 3}
  assert list(adapter.params) == list(scales)
  deltas = lora.deltas(adapter.params, layout=adapter.layout, dense=True)
  for name in scales:
    a, b = (
      np.float64(tensors[f'{PREFIX}{name}.lora_{side}.weight']) for side in 'AB'
    )
    assert oracles.relative_error(deltas[name], scales[name] * b @ a) < 1e-6
    assert adapter.params[name]['lora_a'].dtype == dtype


def test_rank_stabilised_scale(tmp_path):
  config = _config(use_rslora=True)
  adapter = lora.load_peft(_folder(tmp_path, config=config))
  scales = [pair.layout.scale for pair in adapter.layout]
  assert scales == [8 / np.sqrt(2), 6 / np.sqrt(3)]


# Into the tree of a JAX model.


def _model(dtype=jnp.float32, stack=2, rank=2):
  """Two scanned layers, heads split; and a head that is no adapter."""
  return {
    'layers': {
      'q': {
        'lora_a': np.zeros((stack, 6, rank), dtype),
        'lora_b': np.zeros((stack, rank, 4), dtype),
      },
      'kv': {
        'lora_a': np.zeros((6, stack, rank), dtype),
        'lora_b': np.zeros((rank, stack, 2, 3), dtype),  # Two heads of three.
      },
    }
  }


LAYOUT = [
  lora.Pair(
    'layers/q/lora_a', 'layers/q/lora_b', lora.Layout(-1, 1, (0,), (0,), 2.0)
  ),
  lora.Pair(
    'layers/kv/lora_a', 'layers/kv/lora_b', lora.Layout(-1, 0, (1,), (1,), 0.5)
  ),
]
NAMES = {
  'layers/q': 'model.layers.{}.q_proj',
  'layers/kv': 'model.layers.{}.kv_proj',
}


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_stacked_and_split_modules_round_trip_bit_for_bit(tmp_path, dtype):
  params = cases.normal(_model(dtype), 0)
  # Some entries that are zero say nothing of the others.
  for x in jax.tree.leaves(params):
    x[..., 0] = 0
  folder = tmp_path / 'new' / 'folder'
  lora.save_peft(folder, params, names=NAMES, layout=LAYOUT)
  with safetensors.safe_open(folder / TENSORS, 'numpy') as opened:
    assert opened.metadata() == {'format': 'pt'}  # PEFT reads no other.
  adapter = lora.load_peft(folder)
  assert sorted(adapter.params) == [
    f'model.layers.{i}.{name}_proj' for i in (0, 1) for name in ('kv', 'q')
  ]
  kv = adapter.params['model.layers.1.kv_proj']
  np.testing.assert_array_equal(
    np.float32(kv['lora_b']),
    np.float32(params['layers']['kv']['lora_b'][:, 1].reshape(2, 6)),
  )
  back = lora.from_peft(adapter, _model(dtype), names=NAMES, layout=LAYOUT)
  jax.tree.map(np.testing.assert_array_equal, back, params)


def test_configuration_of_mixed_ranks_and_scales(tmp_path):
  """The most common ones without a name; patterns match one module."""

  def pair(rank):
    return {'lora_a': np.ones((6, rank)), 'lora_b': np.ones((rank, 5))}

  params = {
    'q': pair(4), 'x': {'q': pair(2)}, 'y': {'q': pair(2)}, 'z.z': pair(2)
  }  # fmt: skip
  layout = {'q': lora.Layout(scale=2.0), 'z.z': lora.Layout(scale=1.25)}
  lora.save_peft(
    tmp_path, params, layout=layout,
    config={'r': 99, 'task_type': 'SEQ_CLS', 'tags': {'v', 'k'}},
  )  # fmt: skip
  config = json.loads((tmp_path / CONFIG).read_text())
  assert config['r'] == 2
  assert config['lora_alpha'] == 2
  assert config['rank_pattern'] == {'^q': 4}
  assert str(config['alpha_pattern']) == str({'^q': 8, '^z\\.z': 2.5})
  assert config['target_modules'] == ['q', 'x.q', 'y.q', 'z.z']
  assert config['task_type'] == 'SEQ_CLS'
  assert config['tags'] == ['k', 'v']  # PEFT has sets.
  adapter = lora.load_peft(tmp_path)
  assert {p.a: p.layout.scale for p in adapter.layout} == {
    'q/lora_a': 2.0, 'x.q/lora_a': 1.0, 'y.q/lora_a': 1.0, 'z.z/lora_a': 1.25
  }  # fmt: skip


def test_a_tree_with_the_names_of_peft_is_written_as_it_is(tmp_path):
  tensors = {k: v for k, v in _tensors().items() if '.q.' in k}
  lora.save_peft(tmp_path, tensors)
  written = safetensors.load_file(tmp_path / TENSORS)
  jax.tree.map(np.testing.assert_array_equal, written, tensors)


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    ({'names': {}}, r"1 times \{\} in the PyTorch name of 'layers/kv'"),
    ({'names': NAMES | {'layers/q': 'h.{}.q'}}, "no module 'h.0.q' for"),
    ({'params': {'layers': {'q': _model()['layers']['q']}},
      'layout': LAYOUT[:1]},
     r"takes \['model.layers.0.kv_proj'.* the modules are \['layers/q'\]"),
    ({'params': _model(stack=3)}, "no module 'model.layers.2.kv_proj'"),
    ({'params': _model(rank=3)},
     r'shapes \(\(6, 3\), \(3, 6\)\).*Make params of the rank'),
  ],
)  # fmt: skip
def test_a_tree_that_does_not_fit_is_refused(tmp_path, change, match):
  params = cases.normal(_model(), 0)
  lora.save_peft(tmp_path, params, names=NAMES, layout=LAYOUT)
  arguments = {'params': _model(), 'names': NAMES, 'layout': LAYOUT} | change
  with pytest.raises(ValueError, match=match):
    lora.from_peft(lora.load_peft(tmp_path), **arguments)


def test_what_cannot_be_written_is_refused(tmp_path):
  pair = {'lora_a': jnp.ones((3, 1)), 'lora_b': jnp.ones((1, 2))}
  for arguments, match in (
    ({'params': {'q': pair, 'head': jnp.ones(2)}}, "no place for 'head'"),
    (
      {'params': {'q': pair, 'h': {'kernel': jnp.ones((2, 1, 1))}}},
      r"no place for 'h/kernel' \(2, 1, 1\)",
    ),
    ({'params': {'q': pair | {'bias': jnp.ones(2)}}}, "place for 'q/bias'"),
    (
      {
        'params': {
          'q': pair,
          'h': {'scale': jnp.ones(1), 'weight': pair['lora_a']},
        }
      },
      "Two leaves are named 'h.weight'",
    ),
    (
      {'params': {'q': pair | {'lora_b': jnp.zeros((1, 2))}}},
      'zero in every module of params.*never moved them',
    ),
    ({'params': {'q': pair, 'p': pair}, 'names': lambda _: 'x'}, "named 'x'"),
    ({'params': {'q': pair}, 'config': {'x': object()}}, 'types of JSON'),
    ({'params': {'q': pair}, 'names': {'q': 'h.{}'}}, r'0 times \{\}'),
  ):
    with pytest.raises(ValueError, match=match):
      lora.save_peft(tmp_path / 'new', **arguments)
  assert not (tmp_path / 'new').exists()


def test_a_head_is_a_module_that_was_trained_as_a_whole(tmp_path):
  """As PEFT writes ``modules_to_save``; and back, bit for bit."""
  rng = np.random.default_rng(0)
  shapes = {
    'q': {'lora': {'lora_a': (3, 1), 'lora_b': (1, 2)}},
    'head': {'kernel': (4, 5), 'bias': (5,)},
    'norm': {'scale': (4,)},
  }
  params = jax.tree.map(
    lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32),
    shapes,
    is_leaf=lambda x: isinstance(x, tuple),
  )
  # The last /lora of a module may be left out.
  names = {'q': 'model.q', 'head': 'classifier', 'norm': 'model.norm'}
  lora.save_peft(tmp_path, params, names=names)
  written = safetensors.load_file(tmp_path / TENSORS)
  weight = written[f'{PREFIX}classifier.weight']
  np.testing.assert_array_equal(weight, params['head']['kernel'].T)
  assert f'{PREFIX}model.q.lora_A.weight' in written
  adapter = lora.load_peft(tmp_path)
  assert adapter.config['modules_to_save'] == ['classifier', 'model.norm']
  assert sorted(adapter.others) == [
    'classifier.bias', 'classifier.weight', 'model.norm.weight'
  ]  # fmt: skip
  zeros = jax.tree.map(jnp.zeros_like, params)
  back = lora.from_peft(adapter, zeros, names=names)
  jax.tree.map(np.testing.assert_array_equal, back, params)
  # What the file does not have stays as it is; another shape is refused.
  del names['head']
  back = lora.from_peft(adapter, zeros, names=names)
  names['head'] = 'classifier'
  assert not np.any(back['head']['kernel'])
  zeros['head']['bias'] = jnp.zeros(6)
  with pytest.raises(ValueError, match=r"'classifier.bias'.*\(6,\) of 'head"):
    lora.from_peft(adapter, zeros, names=names)


def test_without_safetensors_it_says_what_to_install(tmp_path, monkeypatch):
  _folder(tmp_path)
  monkeypatch.setitem(sys.modules, 'safetensors', None)
  with pytest.raises(ImportError, match='pip install safetensors'):
    lora.load_peft(tmp_path)


# Bad files.


def _but(**sides):
  """The tensors, with others, or none, in the place of q's."""
  others = {f'{PREFIX}layers.0.q.lora_{k}.weight': x for k, x in sides.items()}
  return {k: x for k, x in (_tensors() | others).items() if x is not None}


def _ones(*shape, dtype=np.float32):
  return np.ones(shape, dtype)


BAD_TENSORS = {
  'no partner': (_but(B=None), r'layers.0.q has lora_A.weight and no lora_B'),
  'ranks of a pair': (_but(B=_ones(5, 3)),
    r'r=2.*for layers.0.q, got \(2, 6\) and \(5, 3\)'),
  'rank of the config': (_but(A=_ones(4, 6), B=_ones(5, 4)),
    r'with r=2, as adapter_config.json says'),
  'transposed': (_but(A=_ones(6, 2)), r'got \(6, 2\) and \(5, 2\)'),
  'convolution': (_but(A=_ones(2, 6, 3, 3)), r'\(2, 6, 3, 3\)'),
  'integers': (_but(A=_ones(2, 6, dtype=np.int32)), 'of type I32'),
  'two adapters': (_tensors() | {'layers.0.q.lora_A.weight': _ones(2, 6)},
    'more than one adapter for layers.0.q'),
  'unknown factor': (
    _tensors() | {f'{PREFIX}layers.0.q.lora_magnitude_vector': _ones(5)},
    'lora_magnitude_vector.*no factor known'),
  'no factors': ({'w': _ones(3)}, r"no lora_A.weight.*\['w'\]"),
  'a path for a name': (
    {f'../../etc.lora_{s}.weight': _ones(2, 2) for s in 'AB'},
    'no name of a module'),
  'a long name': (
    {f'{"x." * 200}lora_{s}.weight': _ones(2, 2) for s in 'AB'},
    'no name of a module'),
}  # fmt: skip


@pytest.mark.parametrize('case', BAD_TENSORS)
def test_bad_tensors_are_named(tmp_path, case):
  tensors, match = BAD_TENSORS[case]
  with pytest.raises(ValueError, match=rf'{TENSORS}: .*{match}'):
    lora.load_peft(_folder(tmp_path, tensors))


BAD_CONFIGS = {
  'no rank': (_config(r='absent'), 'expected r > 0 .integer., got'),
  'rank of zero': (_config(r=0), 'r > 0 .integer., got 0'),
  'rank as text': (_config(r='2'), "got '2'"),
  'no alpha': (_config(lora_alpha='absent'), 'expected lora_alpha > 0, got'),
  'negative alpha': (_config(lora_alpha=-1), 'got -1'),
  'alpha that is no number': (_config(lora_alpha=float('nan')), 'got nan'),
  'alpha beyond floats': (_config(lora_alpha=10**400), 'got 1000'),
  'patterns of another kind': (_config(rank_pattern=[3]), 'to map names'),
  'rank pattern of text': (_config(rank_pattern={'v': '3'}), 'to map names'),
  'a broken pattern': (_config(rank_pattern={'(?i)v': 3}), 'is no pattern'),
  'a slow pattern': (_config(rank_pattern={'(a+)+$': 3}), 'too complex'),
  'a long search': (_config(rank_pattern={'.*v.*v.*': 3}), 'too complex'),
  'another method': (_config(peft_type='IA3'), "got 'IA3'"),
  'DoRA': (_config(use_dora=True), 'use_dora: DoRA'),
  'changed weights': (
    _config(init_lora_weights='pissa_niter_4'), 'changes the base weights'
  ),
  'unknown start': (_config(init_lora_weights=[1]), 'changes the base weights'),
  'a list': ([1, 2], 'expected an object, got list'),
}  # fmt: skip


@pytest.mark.parametrize('case', BAD_CONFIGS)
def test_bad_configurations_are_named(tmp_path, case):
  config, match = BAD_CONFIGS[case]
  with pytest.raises(ValueError, match=rf'{CONFIG}: .*{match}'):
    lora.load_peft(_folder(tmp_path, config=config))


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    *(('init_lora_weights', x) for x in (True, False, None, 'gaussian', 'eva')),
    *(('alpha_pattern', x) for x in (None, {}, 'absent')),
  ],
)
def test_other_starts_and_no_patterns_are_fine(tmp_path, field, value):
  config = _config(**{field: value})
  assert len(lora.load_peft(_folder(tmp_path, config=config)).params) == 2


def test_missing_files_are_named(tmp_path):
  with pytest.raises(ValueError, match=f'{CONFIG}: cannot be read: No such'):
    lora.load_peft(tmp_path)
  (tmp_path / CONFIG).write_text(json.dumps(_config()))
  with pytest.raises(ValueError, match=f'{TENSORS}: cannot be read'):
    lora.load_peft(tmp_path)
  (tmp_path / 'adapter_model.bin').write_bytes(b'')
  with pytest.raises(ValueError, match=r'adapter_model.bin: save it again'):
    lora.load_peft(pathlib.Path(tmp_path))
