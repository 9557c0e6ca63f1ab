"""No test is lost by `--turn`."""

import types

from tests import conftest


def test_each_slow_test_has_one_turn_and_others_have_all():
  items = [
    types.SimpleNamespace(get_closest_marker=lambda _, slow=i % 3: slow)
    for i in range(20)
  ]
  left_out = [
    conftest.without_a_turn(items, turn) for turn in range(conftest.TURNS)
  ]
  for i, item in enumerate(items):
    times = sum(item is x for some in left_out for x in some)
    assert times == (conftest.TURNS - 1 if i % 3 else 0)
