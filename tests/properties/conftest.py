"""The tiny encoder and the tiny files of the tests of the command."""

from tests.finetune.conftest import tiny_files, tiny_model  # noqa: F401
