"""The tiny encoder and the tiny files of the tests of the examples."""

from tests.examples.conftest import (  # noqa: F401
  tiny_files,
  tiny_model,
)
