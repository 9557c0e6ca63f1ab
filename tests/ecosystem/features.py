"""What works with which library, and the test that shows it.

    python -m tests.ecosystem.features

prints the table of `docs/how_to/lora_trees.md`.
"""

FEATURES = (
  'found by name',
  'delta is the change of the weight',
  'all adapters move',
  'no frozen weight moves',
  'initialise',
  'merge',
  'export to PEFT',
)
_CONVENTIONS = (
  'modules/conventions_test.py::test_deltas_are_the_changes_of_the_weight'
)
_INITIALISE = (
  'lora/initialization_test.py::test_the_best_approximation_goes_to_the_factors'
)
_ROUND_TRIP = (
  'lora/peft_test.py::test_stacked_and_split_modules_round_trip_bit_for_bit'
)


def _layers(file, frozen='no_frozen_weight_moves'):
  def named(test):
    return f'ecosystem/{file}_test.py::test_{test}'

  return (
    _CONVENTIONS,
    named('intrinsic_is_the_change_of_the_weight'),
    named('all_adapters_move'),
    named(frozen),
  )


# A test for each feature, in their order; None where nothing has been shown.
LIBRARIES = {
  'flax nnx (`LoRA`, `LoRALinear`, stacks)': (
    *_layers('flax'),
    'lora/initialization_test.py::test_a_flax_model_is_the_same_model',
    'lora/merging_test.py::test_a_merged_flax_model_needs_no_adapters',
    _ROUND_TRIP,
  ),
  'flax linen, dicts, MaxText': (
    *_layers('flax', 'no_frozen_weight_of_linen_moves'), _INITIALISE,
    'lora/merging_test.py::'
    'test_plain_pairs_and_adapters_in_one_tree_with_the_weights',
    _ROUND_TRIP,
  ),
  'qwix (dot_general, einsum, conv, scanned)': (
    *_layers('qwix'), None, None, None,
  ),
  'gemma (q, kv, attn_vec, gating, linear)': (
    *_layers('gemma', 'no_frozen_weight_of_a_whole_model_moves'),
    None,
    None,
    None,
  ),
  'keras 3 (Dense, EinsumDense)': (*_layers('keras'), None, None, None),
  'PEFT files': (
    _CONVENTIONS,
    'lora/peft_test.py::test_what_is_read_is_what_peft_computes',
    'modules/conventions_test.py::test_every_adapter_moves_in_a_private_step',
    None,
    None,
    'lora/merging_test.py::test_a_matrix_of_pytorch_is_transposed',
    'lora/peft_torch_test.py::test_peft_gives_our_logits_for_what_we_saved',
  ),
}  # fmt: skip


def table() -> str:
  """Markdown; a cell is a link to the file of its test, or a dash."""
  lines = [
    f'| | {" | ".join(FEATURES)} |',
    '| --- ' * (len(FEATURES) + 1) + '|',
  ]
  for library, tests in LIBRARIES.items():
    cells = [
      f'[yes](../../tests/{test.partition("::")[0]})' if test else '-'
      for test in tests
    ]
    lines.append(f'| {library} | {" | ".join(cells)} |')
  return '\n'.join(lines)


if __name__ == '__main__':
  print(table())
