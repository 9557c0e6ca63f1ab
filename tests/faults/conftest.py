"""The tiny encoder and the tiny files of the tests of the command."""

from tests.finetune.conftest import (  # noqa: F401
  tiny_files,
  tiny_model,
)
