"""The oracles against numbers that were made without them."""

import pytest

from tests.oracles import optimizer_oracles, oracles


@pytest.mark.parametrize('setting', ['paper', 'noadapt'])
def test_paper_oracle_follows_the_golden_trajectory(setting, golden):
  inputs = golden('dp_step_inputs')
  outputs = golden(f'dp_step_{setting}')
  config = golden(f'dp_step_{setting}', 'cfg_')
  options = optimizer_oracles.PaperOptions.of_golden(config)
  modules = [
    optimizer_oracles.PaperOracle(
      (inputs[f'mod{k}_A0'], inputs[f'mod{k}_B0']), options
    )
    for k in range(2)
  ]
  for t in range(int(config['steps'])):
    signals, _, norms = oracles.clipped_mean(
      [oracles.Point.from_factors(*m.factors) for m in modules],
      [inputs[f'mod{k}_G'][t] for k in range(2)],
      l2_clip_norm=config['C'],
      normalize_by=config['batch_size'],
    )
    if t == 0:
      # Theirs has 1e-12 added under the root.
      assert oracles.relative_error(norms, inputs['oracle_norm'][0]) < 1e-11
    for k, module in enumerate(modules):
      draws = inputs[f'mod{k}_U'][t], inputs[f'mod{k}_V'][t]
      module.step(signals[k] + module.noise(draws))
      z = module.factors[0] @ module.factors[1].T
      undamped = outputs[f'mod{k}_Z_after_oracle_undamped_noise'][t]
      assert oracles.relative_error(z, undamped) < 1e-12
      # The damping of their sampler is the whole difference.
      assert oracles.relative_error(z, outputs[f'mod{k}_Z_after'][t]) < 1e-7
      left = outputs[f'mod{k}_A_after'][t]
      assert oracles.relative_error(module.factors[0], left) < 1e-7
