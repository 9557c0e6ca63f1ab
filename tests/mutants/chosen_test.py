"""The chosen mutants stand where the package is today."""

import pytest

from tests.mutants import copies
from tests.mutants.chosen import MUTANTS


@pytest.mark.parametrize('mutant', MUTANTS, ids=lambda x: x.name)
def test_its_line_is_there_once_and_its_tests_exist(mutant):
  text = (copies.ROOT / 'prism_optax' / mutant.path).read_text()
  assert text.count(mutant.old) == 1
  assert mutant.old != mutant.new
  for line in mutant.tests:
    assert (copies.ROOT / 'tests' / line.partition(' ')[0]).exists()
