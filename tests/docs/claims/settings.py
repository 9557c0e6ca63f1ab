"""Numerals of the documentation that no result has.

What the test that it names asserts is in ``TESTED``. What claims nothing is in
``SETTINGS``, with the reason.
"""

_OF_STATES = 'tests/inference/calibration_test.py'
_EXACT = 'tests/audit/exact_release_test.py'
TESTED: dict[str, str] = {
  'Floats that are added in turn move by 1.25 clip norms for 4,096 such'
  ' records, 2.00 for 8,192 and 65 for 65,536': f'{_EXACT}::'
  'test_records_in_the_worst_order_move_sums_of_floats',
  'Sums of 65,536 records in the worst order': f'{_EXACT}::'
  'test_65_536_records_in_the_worst_order_have_one_sum',
  '256 of them at epsilon 1 cost 18.9': f'{_OF_STATES}::'
  'test_releases_cost_what_they_cost',
  'the default is exact and needs 0.77 of it': f'{_OF_STATES}::'
  'test_classic_stddev_is_the_published_one_and_analytic_is_smaller',
}

SETTINGS: dict[str, str] = {
  'jax-privacy 2.0': 'a version',
  'one of 128 examples: float32, in a gauge of scale 16': 'one of the table',
  '(Eq. 8, 9, 21; dotted in the plot)': 'numbers of equations',
  'decay of `prism` is only 0.1, because 1 ruins': 'a setting',
  'runs with 100,000': 'a setting',
  'alone and with 31 others': 'a setting',
  'steps modulo 64': 'a setting',
  'a lattice 64 times as coarse': 'a setting',
  '(1,000 entries, alone': 'a setting',
  'hardly matters from 0.1 to 3': 'rows of the table',
  'A quantile** that starts at 10': 'a setting',
  'with probability 0.999': 'a setting',
  'at delta 1e-5': 'a setting',
  '(74 and 600 ms with its clip': "the authors' measurement",
  '(36 of 2560 x 2560': 'a setting',
  'within a round, of 20.': 'a setting',
  'and 60 steps of 256': 'settings',
  'calibrated to epsilon 6 spends 17.5': 'printed by the session before it',
  "authors' trainer uses 0.5 of the scalar floor": "the authors' choice",
  'is on by default, 0.1,': 'a setting',
  "the paper's margin over DP-AdamW is 5 points": "the paper's",
  '(0.490 at epsilon 6, where PRISM has 0.690 and AdamW 0.641)': "the paper's",
  'three ranks gave .684, .690 and .682': "the paper's",
  '[0.1; up to 1 near the pretrained model]': 'a setting',
  '[0.9, and try 0.5]': 'a setting',
  'none from 0.1 to 3': 'rows of the table',
  '`b1` stays at 0.9': 'a setting',
  'gets the joint 0.8': 'printed by the session before it',
  '(48 here)': 'a setting',
  'The paper reports 18.64 s for PRISM and 9.37 s for AdamW': "the paper's",
}
