"""Records that are made to break something. Stand-in."""
import numpy as np

TINY, HUGE = np.float32(1e-45), np.float32(3e38)
FLOATS = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 1e-38, 1e-30, 1e-23, 1e-19, 1e-10, 1e3, 1e10, 1e18, 1e19, 1.8e19, 2e19, 1e25, 1e38, 3.4e38, -3.4e38]
INTS = [-1, 0, 2, 7, -2**31, 2**31-1]

def floats(shape, rng):
  out = {}
  for v in FLOATS:
    out[f'all {v}'] = np.full(shape, v, np.float32)
    x = rng.normal(size=shape).astype(np.float32); x.reshape(-1)[0] = v
    out[f'one {v}'] = x
    x = np.zeros(shape, np.float32); x.reshape(-1)[-1] = v
    out[f'only {v}'] = x
    with np.errstate(all='ignore'):
      out[f'times {v}'] = (rng.normal(size=shape) * v).astype(np.float32)
  return out

def numeric_records(like, rng):
  """Of the declared types; dict leaf by leaf."""
  out = {}
  for v, x in floats(like['x'].shape, rng).items():
    out[f'x {v}'] = like | {'x': x}
  for v in (0, 1, 127, 128, 255):
    out[f'pixels {v}'] = like | {'pixels': np.full(3, v, np.uint8)}
  for v in INTS:
    out[f'label {v}'] = like | {'label': np.int32(v)}
  return out

def wild_records(like, rng):
  import jax.numpy as jnp
  out = {}
  for name, x in {
    'int8': np.ones(3, np.int8), 'int32': np.full(3, -7, np.int32), 'int64': np.full(3, 2**40), 'bool': np.ones(3, bool),
    'float16': np.ones(3, np.float16), 'float64': np.full(3, 1e300), 'complex': np.full(3, 1+2j), 'text': 'text', 'bytes': b'bytes',
    'none': None, 'list': [1, 2, 3], 'floats': [1.5, 2.5, np.nan], 'ragged': [1, [2]], 'longer': np.ones(5, np.float32), 'shorter': np.ones(1, np.float32),
    'empty': np.ones(0, np.float32), 'scalar': 1.0, 'deep': np.ones((3, 1), np.float32), 'object': np.array([1, None, 'a'], object), 'dates': np.array(['2020-01-01']*3, 'M8[D]'),
    'big int': 2**70, 'big ints': [2**70, 1, 2], 'dict': {'a': 1}, 'tuple': (1, 2, 3), 'jax': jnp.ones(3), 'void': np.zeros(3, 'i4,f4'), 'an object': object(), 'strings': ['a', 'b', 'c'],
    'huge longdouble': np.full(3, 1e300, np.longdouble), 'nan64': np.full(3, np.nan),
  }.items():
    out[f'x {name}'] = like | {'x': x}
    out[f'pixels {name}'] = like | {'pixels': x}
    out[f'label {name}'] = like | {'label': x}
  for name, x in {'int64': np.int64(2**40), 'negative': -1, 'float': 1.5, 'nan': np.nan, 'inf': np.inf, 'uint8': np.uint8(200), 'bool': True, 'one entry': np.ones(1, np.int32), '2^31': 2**31, '2^63': 2**63}.items():
    out[f'label {name}'] = like | {'label': x}
  out |= {'none': None, 'text': 'text', 'empty dict': {}, 'missing': {k: v for k, v in like.items() if k != 'x'}, 'more': like | {'z': 1}, 'list': list(like.values()), 'tuple': tuple(like.values()), 'array': like['x'], 'number': 1, 'nested': {'a': like}, 'dict of int keys': {1: 2, 'a': 3}, 'object': object(), 'nan': np.nan,
   'ordered otherwise': dict(reversed(list(like.items())))}
  return out

def gradient_records(rng):
  out = {}
  shapes = {'bias': (2,), 'a': (3, 1), 'b': (1, 2)}
  def tree(d):
    return {'bias': d['bias'], 'layer': {'lora_a': d['a'], 'lora_b': d['b']}}
  normal = lambda: {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}
  for v in FLOATS:
    with np.errstate(all='ignore'):
      out[f'times {v}'] = tree({k: (x * np.float64(v)).astype(np.float32) for k, x in normal().items()})
    for leaf in shapes:
      d = normal(); d[leaf] = np.full(shapes[leaf], v, np.float32)
      out[f'{leaf} {v}'] = tree(d)
      d = {k: np.zeros(s, np.float32) for k, s in shapes.items()}; d[leaf].reshape(-1)[0] = v
      out[f'only {leaf} {v}'] = tree(d)
  return out
