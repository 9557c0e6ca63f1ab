"""Files of any bytes: the private one never raises for a row, nor drops it."""

import json

import hypothesis.strategies as st
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given

from prism_optax.finetune import adapters, data
from prism_optax.finetune import files as files_lib
from prism_optax.finetune.models import minilm
from tests.finetune import conftest
from tests.properties import cases

values = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
  lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=4), inner, max_size=3)
  ),
  max_leaves=6,
)
rows = st.one_of(
  st.fixed_dictionaries({'text': st.text(max_size=12), 'label': st.integers()}),
  st.dictionaries(st.sampled_from(['text', 'label', 'other']), values),
).map(lambda row: json.dumps(row).encode())
lines = st.one_of(
  rows,
  rows.map(lambda row: row[: len(row) // 2]),  # Cut off.
  st.binary(max_size=24).map(lambda b: b.replace(b'\n', b' ')),
)
files = st.lists(lines, max_size=6)


@pytest.fixture(scope='module')
def path(tmp_path_factory):
  return tmp_path_factory.mktemp('fuzz') / 'file.jsonl'


@pytest.mark.slow
@cases.settings
@given(files)
def test_a_private_file_of_any_bytes_keeps_its_rows(path, content):
  path.write_bytes(b'\n'.join([b'{"text": "a", "label": 1}', *content]))
  found = data.read_private(conftest.columns(path))
  text = path.read_text('utf-8', errors='replace')
  count = len([line for line in text.split('\n') if line.strip()])
  assert len(found.texts) == len(found.labels) == count
  assert found.texts[0] == 'a'
  encoded = data.encode_labels(found.labels, ('1', '2'))
  assert encoded.dtype == np.int32
  assert set(encoded) <= {0, 1, data.BLANK}


@cases.settings
@given(files)
def test_a_public_file_of_any_bytes_is_read_or_refused(path, content):
  path.write_bytes(b'\n'.join(content))
  columns = conftest.columns(path)
  found = cases.read_or_refused(lambda: data.read_public(columns), path)
  if found is not None:
    assert all(isinstance(x, str) for x in (*found.texts, *found.labels))
    assert found.texts


_PARAMS = nnx.State(
  {
    'lora_a': nnx.LoRAParam(jnp.arange(6.0).reshape(3, 2)),
    'lora_b': nnx.LoRAParam(jnp.ones((2, 4))),
  }
)
# (place as a fraction of the file, new byte), and a length to cut it to.
edits = st.lists(
  st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4
)


@cases.settings
@given(edits, st.floats(0, 1) | st.just(1.0))
def test_a_damaged_adapter_is_read_or_refused(path, changes, kept):
  adapters.save(path, _PARAMS, {'base': 'x'})
  content = bytearray(path.read_bytes())
  for place, byte in changes:
    content[int(place * len(content))] = byte
  path.write_bytes(content[: int(kept * len(content))])
  found = cases.read_or_refused(lambda: adapters.load(path, _PARAMS), path)
  if found is not None:
    # Numbers may have changed, names and shapes may not.
    for name, value in adapters.names(found).items():
      assert value.shape == adapters.names(_PARAMS)[name].shape
  if kept == 1.0 and not changes:
    np.testing.assert_array_equal(found['lora_a'][...], _PARAMS['lora_a'][...])


configs = st.one_of(
  st.binary(max_size=24),
  st.fixed_dictionaries(
    {},
    optional={
      name: st.integers(-1, 9) | values
      for name in minilm.Config.__dataclass_fields__
    },
  ).map(lambda x: json.dumps(x).encode()),
)


@cases.settings
@given(configs)
def test_a_configuration_of_any_bytes_is_read_or_refused(path, content):
  file = path.with_name('config.json')
  file.write_bytes(content)
  found = cases.read_or_refused(
    lambda: minilm.Config.from_dict(files_lib.read_json(file), str(file)), file
  )
  assert found is None or all(value > 0 for value in vars(found).values())
