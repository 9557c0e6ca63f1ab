"""Files of an adapter of any bytes: an adapter, or an error with the name."""

import json

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from prism_optax import lora
from tests.lora import peft_test
from tests.properties import cases, readers_test

FIELDS = [
  'peft_type', 'r', 'lora_alpha', 'rank_pattern', 'alpha_pattern',
  'target_modules', 'use_rslora', 'use_dora', 'bias', 'fan_in_fan_out',
  'init_lora_weights', 'modules_to_save', 'lora_bias', 'layer_replication',
]  # fmt: skip
patterns = st.dictionaries(
  st.sampled_from(['v', 'layers.0.v', '.*', '(a+)+$', '[', '']) | st.text(),
  st.integers(-2, 5) | st.floats() | st.none(),
  max_size=2,
)
changes = st.dictionaries(
  st.sampled_from(FIELDS), readers_test.values | patterns, max_size=3
)
settings = hypothesis.settings(cases.settings, max_examples=150)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return peft_test._folder(tmp_path_factory.mktemp('fuzz') / 'adapter')


def _read_or_refused(folder):
  found = cases.read_or_refused(lambda: lora.load_peft(folder), folder)
  if found is None:
    return None
  for pair in found.layout:
    assert np.isfinite(pair.layout.scale)
    a, b = found.params[pair.a.rpartition('/')[0]].values()
    assert a.shape[-1] == b.shape[0]
  lora.deltas(found.params, layout=found.layout)
  return found


@pytest.mark.slow
@settings
@given(changes)
def test_a_configuration_of_any_values(folder, change):
  config = peft_test._config() | change
  (folder / peft_test.CONFIG).write_text(json.dumps(config))
  found = _read_or_refused(folder)
  if not change:
    assert found is not None


@settings
@given(readers_test.edits, st.floats(0, 1) | st.just(1.0), st.booleans())
def test_tensors_of_any_bytes(folder, edits, kept, everything):
  peft_test._folder(folder)
  path = folder / peft_test.TENSORS
  content = bytearray(path.read_bytes())
  # The header, where all the structure is, or any place.
  reach = len(content) if everything else 8 + int(content[0]) + 256
  for place, byte in edits:
    content[int(place * min(reach, len(content)))] = byte
  path.write_bytes(content[: int(kept * len(content))])
  found = _read_or_refused(folder)
  if kept == 1.0 and not edits:
    assert found is not None


@settings
@given(st.binary(max_size=64), st.binary(max_size=64))
@hypothesis.example(b'[' * 100_000, b'')
@hypothesis.example(b'{"r": 1' + b'0' * 9999 + b'}', b'')
def test_files_of_nothing_but_bytes(folder, config, tensors):
  (folder / peft_test.CONFIG).write_bytes(config)
  (folder / peft_test.TENSORS).write_bytes(tensors)
  assert _read_or_refused(folder) is None
