"""What is refused: the argument is named and its value shown."""

import functools
import math

import dp_accounting
import numpy as np
import pytest

from prism_optax import accounting

DELTA = 1e-5
GAUSSIAN = dp_accounting.GaussianDpEvent(4.8448)
POISSON = accounting.dpsgd_event(1.0, 0.1, 3)
REPLACE = accounting.NeighboringRelation.REPLACE_ONE
event, epsilon = accounting.dpsgd_event, accounting.epsilon
joint = accounting.joint_noise_multiplier
calibrate = accounting.calibrate_noise_multiplier
matrix = functools.partial(
  accounting.matrix_mechanism_event, 1.0, max_participations=1
)
budget = functools.partial(accounting.PrivacyBudget, 5.0, DELTA)
CUT = {'truncated_batch_size': 40, 'dataset_size': 300}
BY_RDP = {'accountant': 'rdp', 'entries': 1e12}

REFUSALS = [
  # Events.
  (lambda: event(-1.0, 0.1, 3), 'noise_multiplier.*-1.0'),
  (lambda: event(math.nan, 0.1, 3), 'noise_multiplier.*nan'),
  (lambda: event('x', 0.1, 3), 'noise_multiplier.*x'),
  (lambda: event(None, 0.1, 3), 'noise_multiplier.*None'),
  (lambda: event(1.0, 1.1, 3), 'sampling_probability.*1.1'),
  (lambda: event(1.0, -0.1, 3), 'sampling_probability.*-0.1'),
  (lambda: event(1.0, 0.1, -3), 'steps.*-3'),
  (lambda: event(1.0, 0.1, 2.5), 'steps.*2.5'),
  (lambda: event(1.0, 0.1, 3, truncated_batch_size=8), 'dataset_size=None'),
  (lambda: event(1.0, 0.1, 3, dataset_size=80), 'truncated_batch_size=None'),
  (
    lambda: event(1.0, 0.1, 3, truncated_batch_size=0, dataset_size=80),
    'truncated_batch_size=0',
  ),
  (lambda: joint([]), 'noise_multipliers'),
  (lambda: joint([1.0, -2.0]), r'noise_multipliers.*-2\.0'),
  (lambda: matrix(np.ones((2, 3))), r'square, got shape \(2, 3\)'),
  (lambda: matrix(np.ones((2, 2))), 'lower triangular'),
  (lambda: matrix([[np.nan]]), 'finite'),
  (lambda: matrix(np.zeros((2, 2))), 'positive diagonal'),
  (lambda: matrix(np.eye(2), max_participations=0), 'max_participations=0'),
  (lambda: matrix(np.eye(2), min_separation=0), 'min_separation=0'),
  (
    lambda: accounting.matrix_mechanism_event(
      -1, np.eye(2), max_participations=1
    ),
    'noise_multiplier=-1',
  ),
  (
    lambda: accounting.calibrate_matrix_mechanism(
      1.0, DELTA, np.eye(2), max_participations=1, neighboring_relation='add'
    ),
    'neighboring_relation',
  ),
  # Epsilon.
  (lambda: epsilon(POISSON, -1e-5), 'delta=-1e-05'),
  (lambda: epsilon(POISSON, 1.5), 'delta=1.5'),
  (lambda: epsilon(POISSON, math.nan), 'delta=nan'),
  (lambda: epsilon(POISSON, DELTA, accountant='moments'), "='moments'"),
  (
    lambda: epsilon(POISSON, DELTA, neighboring_relation='replace'),
    "neighboring_relation='replace'",
  ),
  (
    lambda: epsilon(POISSON, DELTA, value_discretization_interval=0.0),
    'value_discretization_interval',
  ),
  (lambda: epsilon(1.0, DELTA), 'event'),
  (
    lambda: epsilon(
      POISSON, DELTA, accountant='rdp', neighboring_relation=REPLACE
    ),
    r"'rdp' .*REPLACE_ONE.*Poisson",
  ),
  (
    lambda: accounting.privacy_statement(GAUSSIAN, DELTA, entries=1e17),
    r'entries=1e\+17',
  ),
  (lambda: accounting.gaussian_epsilon(-1.0, DELTA), 'mu=-1'),
  (lambda: accounting.gaussian_epsilon(1.0, 1.5), 'delta=1.5'),
  # Calibration.
  (lambda: calibrate(0.0, DELTA, 0.1, 3), 'target_epsilon.*0.0'),
  (lambda: calibrate(math.nan, DELTA, 0.1, 3), 'target_epsilon.*nan'),
  (lambda: calibrate(math.inf, DELTA, 0.1, 3), 'target_epsilon.*inf'),
  (lambda: calibrate(1.0, 0.0, 0.1, 3), 'delta.*0.0'),
  (lambda: calibrate(1.0, 1.0, 0.1, 3), 'delta.*1.0'),
  (lambda: calibrate(1.0, DELTA, 0.0, 3), 'sampling_probability.*0.0'),
  (lambda: calibrate(1.0, DELTA, 1.2, 3), 'sampling_probability.*1.2'),
  (lambda: calibrate(1.0, DELTA, 0.1, 0), 'steps.*0'),
  # Below what the accountant's tail can show, at any noise.
  (
    lambda: calibrate(1e-6, 1e-9, 0.01, 100),
    r'target_epsilon=1e-06.*reached',
  ),
  (
    lambda: calibrate(
      1.0, DELTA, 0.1, 3, accountant='rdp', neighboring_relation=REPLACE
    ),
    r"'rdp' has no analysis.*REPLACE_ONE",
  ),
  (
    lambda: calibrate(1.0, DELTA, 0.1, 3, accountant='rdp', **CUT),
    r"'rdp' has no analysis.*Truncated",
  ),
  (lambda: calibrate(2.0, DELTA, 1e-3, 9, **BY_RDP), r'adds .* to delta'),
  (
    lambda: calibrate(1e-9, 1e-4, 1e-3, 9, **BY_RDP | {'entries': 1e9}),
    r'adds .* to epsilon',
  ),
  # Budgets.
  (lambda: accounting.PrivacyBudget(0.0, DELTA), 'epsilon=0.0'),
  (lambda: accounting.PrivacyBudget(math.nan, DELTA), 'epsilon=nan'),
  (lambda: accounting.PrivacyBudget(math.inf, DELTA), 'epsilon=inf'),
  (lambda: accounting.PrivacyBudget(1.0, 0.0), 'delta=0.0'),
  (lambda: accounting.PrivacyBudget(1.0, 1.0), 'delta=1.0'),
  (lambda: budget(composition='basic'), "composition='basic'"),
  (lambda: budget(composition='advanced'), "composition='advanced'"),
  (lambda: budget(server_epsilon=-1.0), 'server_epsilon=-1.0'),
  (lambda: budget(neighboring_relation='all'), "neighboring_relation='all'"),
  (lambda: budget(timeout=0), 'timeout=0'),
  *(
    (functools.partial(call, session=session), 'session')
    for session in ('', None, 3)
    for call in (
      functools.partial(budget().spend, GAUSSIAN), budget().spent,
      budget().remaining, functools.partial(budget().how_many_more, GAUSSIAN),
    )
  ),
  (lambda: budget().spend(0.5, 'a'), 'event'),
]  # fmt: skip


@pytest.mark.parametrize(('call', 'message'), REFUSALS)
def test_the_argument_is_named_and_its_value_shown(call, message):
  with pytest.raises(ValueError, match=message):
    call()
