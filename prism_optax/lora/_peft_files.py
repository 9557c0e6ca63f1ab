"""The two files of a PEFT adapter: strict reading, whole writing.

A file may come from anywhere. Whatever is in it, reading ends with an adapter
or with a ``ValueError`` that says what is wrong with which file.
"""

import functools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np

CONFIG, TENSORS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'
# The module, and the end of the name of one of its factors.
_FACTOR = re.compile(r'(.+)\.(lora_[AB]\.weight)')
_ENDS = 'lora_A.weight', 'lora_B.weight'
_LONGEST_NAME = 300
_TYPES: dict[str, np.dtype] = {
  'F64': np.dtype('<f8'),
  'F32': np.dtype('<f4'),
  'F16': np.dtype('<f2'),
  'BF16': jnp.dtype('bfloat16'),
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

  a: np.ndarray
  b: np.ndarray
  scale: float


Out = TypeVar('Out')
# What a JSON file may hold.
Json: TypeAlias = Any
Config = Mapping[str, Json]
Modules = dict[str, PeftModule]
Tensors = dict[str, np.ndarray]


def exactly(name: str) -> str:
  """The pattern key that matches this module and no other."""
  return '^' + re.escape(name)


def _safetensors() -> ModuleType:
  try:
    import safetensors.numpy
  except ImportError as error:
    raise ImportError(
      'PEFT adapters are safetensors files: pip install safetensors.'
    ) from error
  return safetensors


# Reading.


def read(folder: pathlib.Path) -> tuple[Modules, dict[str, Json], Tensors]:
  """Both files of a folder: modules, configuration, and all other tensors.

  Raises:
    ValueError: With the file and what is wrong with it.
  """
  config = _content(folder / CONFIG, _read_config)
  read_tensors = functools.partial(_read_tensors, config=config)
  modules, others = _content(folder / TENSORS, read_tensors)
  return modules, config, others


def _content(path: pathlib.Path, read: Callable[[bytes], Out]) -> Out:
  """What ``read`` makes of a file; what it refuses, with the name of the file.

  Raises:
    ValueError: Also if there is no such file.
  """
  try:
    return read(path.read_bytes())
  except ValueError as error:
    raise ValueError(f'{path}: {error}') from error
  except OSError as error:
    hint = ''
    if path.name == TENSORS and (path.parent / 'adapter_model.bin').exists():
      hint = ' There is an adapter_model.bin: save it again as safetensors.'
    message = f'{path}: cannot be read: {error.strerror}.{hint}'
    raise ValueError(message) from error


def _read_config(data: bytes) -> dict[str, Json]:
  try:
    config = json.loads(data.decode())
  except (ValueError, RecursionError) as error:  # Also no text, long numbers.
    raise ValueError(f'is no JSON file: {error}.') from error
  if not isinstance(config, dict):
    raise ValueError(f'expected an object, got {type(config).__name__}.')
  kind = config.get('peft_type', 'LORA')
  if kind != 'LORA':
    raise ValueError(f'expected peft_type LORA, got {kind!r}.')
  for field, meaning in _UNKNOWN.items():
    if config.get(field):
      raise ValueError(f'{field}: {meaning} cannot be read here.')
  start = config.get('init_lora_weights')
  if start not in _HARMLESS:
    raise ValueError(
      f'init_lora_weights={start!r} changes the base weights, and the adapter'
      ' is relative to the changed ones. Let PEFT convert it:'
      ' save_pretrained(..., path_initial_model_for_weight_conversion=...).'
    )
  _check_numbers(config, 'r', 'rank_pattern', (int,))
  _check_numbers(config, 'lora_alpha', 'alpha_pattern', (int, float))
  return config


def shown(value: object) -> str:
  """The value for an error message, which no file makes long."""
  text = repr(value)
  return text if len(text) < 200 else text[:200] + '...'


def _check_numbers(
  config: Config, field: str, patterns: str, types: tuple[type, ...]
) -> None:
  """Refuses a field that is no number > 0, and such in its patterns."""

  def fits(value: Json) -> bool:
    # No boolean, no NaN, and no integer beyond floats.
    return type(value) in types and 0 < value < 1e30

  if not fits(config.get(field)):
    kind = ' (integer)' if field == 'r' else ''
    got = shown(config.get(field, 'none'))
    raise ValueError(f'expected {field} > 0{kind}, got {got}.')
  found = {} if config.get(patterns) is None else config[patterns]
  if not isinstance(found, dict) or not all(map(fits, found.values())):
    raise ValueError(
      f'expected {patterns} to map names to numbers > 0, got {shown(found)}.'
    )
  for key in found:
    # Repeated groups and many repetitions can take exponentially long.
    repeats = len(re.findall(r'(?<!\\)[*+{]', key))
    message = f'the key {shown(key)} of {patterns} is'
    if repeats > 2 or re.search(r'\)[*+?{]', key) or len(key) > _LONGEST_NAME:
      raise ValueError(f'{message} too complex.')
    try:
      re.compile(_from_the_end(key))
    except (re.error, OverflowError, RecursionError) as error:
      raise ValueError(f'{message} no pattern: {error}.') from error


def _from_the_end(key: str) -> str:
  """How PEFT reads a pattern key."""
  return rf'(.*\.)?({key})$'


def _at(config: Config, field: str, patterns: str, name: str) -> Json:
  """The value for a module: that of the first key that matches."""
  for key, value in (config.get(patterns) or {}).items():
    if re.match(_from_the_end(key), name):
      return value
  return config[field]


def _read_tensors(data: bytes, config: Config) -> tuple[Modules, Tensors]:
  """The modules, and all tensors that are no factors."""
  safetensors = _safetensors()
  try:
    # From memory: offsets are checked against the bytes that are there.
    tensors = safetensors.deserialize(data)
  except Exception as error:  # Of a class that is not in every version.
    raise ValueError(f'is no whole safetensors file: {error}.') from error
  factors: dict[str, Tensors] = {}
  others = {}
  for key, tensor in tensors:
    kind = tensor['dtype']
    if kind not in _TYPES:
      raise ValueError(
        f'{shown(key)} is of type {kind}, expected one of {sorted(_TYPES)}.'
      )
    x = np.frombuffer(tensor['data'], _TYPES[kind]).reshape(tensor['shape'])
    found = _FACTOR.fullmatch(key)
    if not found:
      if 'lora_' in key:
        raise ValueError(f'{shown(key)} is no factor known here.')
      others[key.removeprefix(PREFIX)] = x
      continue
    name, end = found[1].removeprefix(PREFIX), found[2]
    if len(name) > _LONGEST_NAME or '/' in name:
      raise ValueError(f'{shown(name)} is no name of a module.')
    if end in factors.setdefault(name, {}):
      raise ValueError(f'more than one adapter for {name}.')
    factors[name][end] = x
  if not factors:
    names = sorted(key for key, _ in tensors)
    raise ValueError(f'no {" and ".join(_ENDS)} among {shown(names)}.')
  return _paired(factors, config), others


def _paired(factors: Mapping[str, Tensors], config: Config) -> Modules:
  """The modules, each of two factors that fit each other and the file."""
  modules = {}
  for name, found in sorted(factors.items()):
    absent = set(_ENDS) - set(found)
    if absent:
      raise ValueError(f'{name} has {min(found)} and no {min(absent)}.')
    a, b = (found[end] for end in _ENDS)
    rank = _at(config, 'r', 'rank_pattern', name)
    if a.ndim != 2 or b.ndim != 2 or not a.shape[0] == b.shape[1] == rank:
      raise ValueError(
        f'expected {_ENDS[0]} (r, in) and {_ENDS[1]} (out, r) with r={rank},'
        f' as {CONFIG} says, for {name}, got {a.shape} and {b.shape}.'
      )
    alpha = _at(config, 'lora_alpha', 'alpha_pattern', name)
    divisor = math.sqrt(rank) if config.get('use_rslora') else rank
    modules[name] = PeftModule(a, b, alpha / divisor)
  return modules


# Writing.


def write(
  folder: pathlib.Path,
  modules: Modules,
  config: Config,
  others: Tensors,
) -> None:
  """Both files, each under another name first; ``others`` as they are."""
  tensors = {
    f'{PREFIX}{name}': np.ascontiguousarray(x) for name, x in others.items()
  }
  for name, x in modules.items():
    for end, value in zip(_ENDS, (x.a, x.b), strict=True):
      tensors[f'{PREFIX}{name}.{end}'] = np.ascontiguousarray(value)
  data = _safetensors().numpy.save(tensors, metadata={'format': 'pt'})
  text = json.dumps(config, indent=2, sort_keys=True, default=_plain) + '\n'
  folder.mkdir(parents=True, exist_ok=True)
  for name, content in ((TENSORS, data), (CONFIG, text.encode())):
    partial = folder / f'{name}.partial'
    partial.write_bytes(content)
    os.replace(partial, folder / name)


def _plain(value: object) -> list[object]:
  """Sets, as PEFT has them for target_modules."""
  if isinstance(value, set | frozenset):
    return sorted(value)
  raise ValueError(
    f'Expected config to hold types of JSON, got {shown(value)}.'
  )
