"""No test is lost by `--turn`."""

import collections
import types

from tests import conftest


def test_each_slow_test_has_one_turn_and_others_have_all():
  items = [
    types.SimpleNamespace(get_closest_marker=lambda _, slow=i % 3: slow)
    for i in range(20)
  ]
  times = collections.Counter(
    id(item)
    for turn in range(conftest.TURNS)
    for item in conftest.without_a_turn(items, turn)
  )
  for i, item in enumerate(items):
    assert times[id(item)] == (conftest.TURNS - 1 if i % 3 else 0)
