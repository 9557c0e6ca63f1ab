"""No test is lost by `--turn`."""

import pathlib
import types

import pytest

from tests import conftest

TESTS = pathlib.Path(conftest.__file__).parent


@pytest.mark.parametrize('folder', ['examples', 'docs', 'audit', 'replay'])
@pytest.mark.parametrize('slow', [True, False])
def test_each_has_one_turn_or_all(folder, slow):
  items = [
    types.SimpleNamespace(
      path=TESTS / folder / 'some_test.py', get_closest_marker=lambda _: slow
    )
    for _ in range(8)
  ]
  left_out = [
    conftest.without_a_turn(items, turn) for turn in range(conftest.TURNS)
  ]
  times = conftest.TURNS - 1 if slow and folder in ('examples', 'docs') else 0
  for item in items:
    assert sum(item is x for some in left_out for x in some) == times
