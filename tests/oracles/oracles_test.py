"""The oracles against numbers that were made without them."""

import numpy as np
import pytest

from tests.oracles import optimizer_oracles, oracles


@pytest.mark.parametrize('case', range(7))
def test_tangents_equal_the_golden_lifts(case, golden):
  d = golden('lift', f'c{case}_')
  tangents = oracles.Point.from_factors(d['A'], d['B']).project(d['G'])
  dense = d['oracle_dA'] @ d['B'].T + d['A'] @ d['oracle_dB'].swapaxes(1, 2)
  # The lift is large in the weak directions: its rounding, times condition.
  tolerance = 1e-14 * d['cond'].max()
  assert oracles.relative_error(tangents, dense) < tolerance
  norms = np.linalg.norm(tangents, axis=(1, 2))
  assert oracles.relative_error(norms, d['oracle_norm']) < 1e-13
  steps = (d['oracle_dA'][0], d['oracle_dB'][0])
  dl, dr = oracles.horizontal_lift((d['A'], d['B']), steps)
  assert (
    oracles.relative_error(dl @ d['B'].T + d['A'] @ dr.T, tangents[0])
    < 10 * tolerance
  )
  # Horizontal: no part along the gauge directions (A K, -B K^T).
  assert oracles.relative_error(d['A'].T @ dl, dr.T @ d['B']) < 1e-9


@pytest.mark.parametrize('case', range(5))
def test_retraction_equals_the_golden_one(case, golden):
  d = golden('retract', f'c{case}_')
  eta = golden('retract')['eta'][case]
  point = oracles.Point.from_factors(d['A'], d['B'])
  step = d['dA'] @ d['B'].T + d['A'] @ d['dB'].T
  rank = d['A'].shape[1]
  new = point.retract(eta * step, rank)
  assert oracles.relative_error(new.z, d['oracle_Z']) < 1e-13
  assert oracles.relative_error(new.z, d['bilinear_Z']) > 1e-3
  unaligned = oracles.balance((d['ref_A_noalign'], d['ref_B_noalign']))
  aligned = oracles.align(unaligned, (d['A'], d['B']))
  for value, name in zip(aligned, ('A', 'B'), strict=True):
    assert oracles.relative_error(value, d[f'oracle_{name}_align']) < 1e-12


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
