"""The two files of a PEFT adapter: strict reading, whole writing.

A file may come from anywhere. Whatever is in it, reading ends with an adapter
or with a ``ValueError`` that says what is wrong with which file.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'
# `.default` and the like: the name of the adapter, which PEFT leaves out today.
_FACTOR = re.compile(
  r'(?P<name>.+)\.(?:'
  r'lora_(?P<side>[AB])(?:\.[^.]+)?\.weight'
  r'|lora_embedding_(?P<table>[AB])(?:\.[^.]+)?)'
)
_LONGEST_NAME = 300
_TYPES: dict[str, Any] = {
  'F64': np.dtype('<f8'),
  'F32': np.dtype('<f4'),
  'F16': np.dtype('<f2'),
  'BF16': jnp.dtype('bfloat16'),
  'I64': np.dtype('<i8'),
  'I32': np.dtype('<i4'),
  'U8': np.dtype('u1'),
  'BOOL': np.dtype('?'),
}
# Initialisations that leave the base weights as they are.
_HARMLESS = (None, True, False, 'gaussian', 'eva', 'orthogonal')
# Features that change what an adapter computes, with what they are.
_UNKNOWN = {
  'use_dora': 'DoRA',
  'lora_bias': 'biases in lora_B',
  'layer_replication': 'replicated layers',
  'target_parameters': 'adapters of bare parameters',
  'alora_invocation_tokens': 'adapters that tokens activate',
  'use_bdlora': 'block-diagonal factors',
  'arrow_config': 'routed adapters',
  'use_qalora': 'QALoRA',
  'kasa_config': 'KaSA',
  'monteclora_config': 'MonteCLoRA',
}


class PeftModule(NamedTuple):
  """One module: ``a`` (r, in), ``b`` (out, r), as in PyTorch."""

  name: str
  a: np.ndarray
  b: np.ndarray
  scale: float
  is_embedding: bool


class PeftFiles(NamedTuple):
  """Both files, read."""

  modules: list[PeftModule]
  config: dict[str, Any]
  others: dict[str, np.ndarray]


def exactly(name: str) -> str:
  """The pattern key that matches this module and no other."""
  return '^' + re.escape(name)


def _safetensors() -> Any:
  try:
    import safetensors
    import safetensors.numpy
  except ImportError as error:
    raise ImportError(
      'PEFT adapters are safetensors files: pip install safetensors (or'
      " 'prism-optax[peft]')."
    ) from error
  return safetensors


# Reading.


def read(folder: pathlib.Path) -> PeftFiles:
  """Both files of a folder.

  Raises:
    ValueError: With the file and what is wrong with it.
  """
  config = _read_config(folder / CONFIG)
  path = folder / TENSORS
  factors, others = _sorted_out(path, _read_tensors(path))
  modules = []
  for (name, is_embedding), sides in sorted(factors.items()):
    key = f'lora_embedding_{"{}"}' if is_embedding else 'lora_{}.weight'
    if len(sides) < 2:
      there, absent = ('A', 'B') if 'A' in sides else ('B', 'A')
      raise ValueError(
        f'{path}: {name} has {key.format(there)} and no {key.format(absent)}.'
      )
    a, b = sides['A'], sides['B']
    rank = _at(config, 'r', 'rank_pattern', name)
    if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == rank:
      raise ValueError(
        f'{path}: expected {key.format("A")} (r, in) and {key.format("B")}'
        f' (out, r) with r={rank}, as {CONFIG} says, for {name}, got {a.shape}'
        f' and {b.shape}.'
      )
    alpha = _at(config, 'lora_alpha', 'alpha_pattern', name)
    divisor = math.sqrt(rank) if config.get('use_rslora') else rank
    modules.append(PeftModule(name, a, b, alpha / divisor, is_embedding))
  return PeftFiles(modules, config, others)


def _read_bytes(path: pathlib.Path) -> bytes:
  try:
    return path.read_bytes()
  except OSError as error:
    hint = ''
    if path.name == TENSORS and (path.parent / 'adapter_model.bin').exists():
      hint = ' There is an adapter_model.bin: save it again as safetensors.'
    raise ValueError(f'{path}: cannot be read: {error.strerror}.{hint}') from (
      error
    )


def _read_config(path: pathlib.Path) -> dict[str, Any]:
  data = _read_bytes(path)
  try:
    config = json.loads(data.decode())
  except (ValueError, RecursionError) as error:  # Also no text, long numbers.
    raise ValueError(f'{path}: is no JSON file: {error}.') from error
  if not isinstance(config, dict):
    raise ValueError(
      f'{path}: expected an object, got {type(config).__name__}.'
    )
  kind = config.get('peft_type', 'LORA')
  if kind != 'LORA':
    raise ValueError(f'{path}: expected peft_type LORA, got {kind!r}.')
  for field, meaning in _UNKNOWN.items():
    if config.get(field):
      raise ValueError(f'{path}: {field}: {meaning} cannot be read here.')
  start = config.get('init_lora_weights')
  if not any(start is x for x in _HARMLESS[:3]) and start not in _HARMLESS[3:]:
    raise ValueError(
      f'{path}: init_lora_weights={start!r} changes the base weights, and the'
      ' adapter is relative to the changed ones. Let PEFT convert it:'
      ' save_pretrained(..., path_initial_model_for_weight_conversion=...).'
    )
  for field, patterns, check in (
    ('r', 'rank_pattern', _is_rank),
    ('lora_alpha', 'alpha_pattern', _is_positive),
  ):
    if not check(config.get(field)):
      raise ValueError(
        f'{path}: expected {field} > 0{" (integer)" if field == "r" else ""},'
        f' got {_shown(config.get(field, "none"))}.'
      )
    _check_patterns(path, patterns, config.get(patterns), check)
  return config


def _is_rank(value: Any) -> bool:
  return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_positive(value: Any) -> bool:
  if isinstance(value, bool) or not isinstance(value, int | float):
    return False
  return 0 < value < 1e30  # Also no NaN, and no integer beyond floats.


def _shown(value: Any) -> str:
  text = repr(value)
  return text if len(text) < 60 else text[:60] + '...'


def _check_patterns(
  path: pathlib.Path, field: str, value: Any, check: Callable[[Any], bool]
) -> None:
  if value is None:
    return
  if not isinstance(value, dict) or not all(map(check, value.values())):
    raise ValueError(
      f'{path}: expected {field} to map names to numbers > 0, got'
      f' {_shown(value)}.'
    )
  for key in value:
    # Repeated groups and many repetitions can take exponentially long.
    repeats = len(re.findall(r'(?<!\\)[*+{]', key))
    if repeats > 2 or re.search(r'\)[*+?{]', key) or len(key) > _LONGEST_NAME:
      raise ValueError(
        f'{path}: the key {_shown(key)} of {field} is too complex.'
      )
    try:
      re.compile(_from_the_end(key))
    except (re.error, OverflowError, RecursionError) as error:
      raise ValueError(
        f'{path}: the key {_shown(key)} of {field} is no pattern: {error}.'
      ) from error


def _from_the_end(key: str) -> str:
  """How PEFT reads a pattern key."""
  return rf'(.*\.)?({key})$'


def _at(config: Mapping[str, Any], field: str, patterns: str, name: str) -> Any:
  """The value for a module: that of the first key that matches."""
  for key, value in (config.get(patterns) or {}).items():
    if re.match(_from_the_end(key), name):
      return value
  return config[field]


def _read_tensors(path: pathlib.Path) -> dict[str, np.ndarray]:
  safetensors = _safetensors()
  data = _read_bytes(path)
  try:
    # From memory: offsets are checked against the bytes that are there.
    found = safetensors.deserialize(data)
  except Exception as error:  # Of a class that is not in every version.
    raise ValueError(
      f'{path}: is no whole safetensors file: {error}.'
    ) from error
  tensors = {}
  for name, x in found:
    if x['dtype'] not in _TYPES:
      raise ValueError(
        f'{path}: {_shown(name)} is of type {x["dtype"]}, expected one of'
        f' {sorted(_TYPES)}.'
      )
    flat = np.frombuffer(x['data'], _TYPES[x['dtype']])
    tensors[name] = flat.reshape(x['shape'])
  return tensors


def _sorted_out(
  path: pathlib.Path, tensors: Mapping[str, np.ndarray]
) -> tuple[
  dict[tuple[str, bool], dict[str, np.ndarray]], dict[str, np.ndarray]
]:
  """Factors by (module, whether an embedding) and side, and all the rest."""
  factors: dict[tuple[str, bool], dict[str, np.ndarray]] = {}
  others = {}
  for key, x in tensors.items():
    found = _FACTOR.fullmatch(key)
    if not found:
      if 'lora_' in key:
        raise ValueError(f'{path}: {_shown(key)} is no factor known here.')
      others[key.removeprefix(PREFIX)] = x
      continue
    name = found['name'].removeprefix(PREFIX)
    if len(name) > _LONGEST_NAME or '/' in name:
      raise ValueError(f'{path}: {_shown(name)} is no name of a module.')
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f'{path}: expected floats in {key}, got {x.dtype}.')
    sides = factors.setdefault((name, bool(found['table'])), {})
    side = found['side'] or found['table']
    if side in sides:
      raise ValueError(f'{path}: more than one adapter for {name}.')
    sides[side] = x
  if not factors:
    raise ValueError(
      f'{path}: no lora_A.weight and lora_B.weight among'
      f' {_shown(sorted(tensors))}.'
    )
  both = {x for x, _ in factors}
  if len(both) < len(factors):
    raise ValueError(f'{path}: a module is a layer and an embedding at once.')
  return factors, others


# Writing.


def write(
  folder: pathlib.Path,
  modules: Sequence[PeftModule],
  config: Mapping[str, Any],
) -> None:
  """Both files, each under another name first."""
  tensors = {}
  for x in modules:
    stem = f'{PREFIX}{x.name}.lora_'
    keys = ('embedding_A', 'embedding_B') if x.is_embedding else (
      'A.weight', 'B.weight'
    )  # fmt: skip
    for key, value in zip(keys, (x.a, x.b), strict=True):
      tensors[stem + key] = np.ascontiguousarray(value)
  data = _safetensors().numpy.save(tensors, metadata={'format': 'pt'})
  text = json.dumps(config, indent=2, sort_keys=True, default=_plain) + '\n'
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in ((TENSORS, data), (CONFIG, text.encode())):
    partial = folder / f'{name}.partial'
    partial.write_bytes(content)
    os.replace(partial, folder / name)


def _plain(value: Any) -> Any:
  """Sets, as PEFT has them for target_modules, and NumPy numbers."""
  if isinstance(value, set | frozenset | tuple):
    return sorted(value)
  if isinstance(value, np.generic):
    return value.item()
  raise ValueError(
    f'Expected config to hold what JSON knows, got {_shown(value)}.'
  )
