"""No test is lost by `--turn`."""

import types

import pytest

from tests import conftest


@pytest.mark.parametrize('slow', [True, False])
def test_each_has_one_turn_or_all(slow):
  items = [
    types.SimpleNamespace(get_closest_marker=lambda _: slow) for _ in range(8)
  ]
  left_out = [
    conftest.without_a_turn(items, turn) for turn in range(conftest.TURNS)
  ]
  times = conftest.TURNS - 1 if slow else 0
  for item in items:
    assert sum(item is x for some in left_out for x in some) == times
