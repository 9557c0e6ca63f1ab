"""The tiny language model of the tests of the command."""

from tests.finetune.conftest import source  # noqa: F401
