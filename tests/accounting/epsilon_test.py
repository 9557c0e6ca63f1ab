"""Events and epsilon: equal to dp-accounting by hand, and its figures."""

import math
import pathlib
import re

import dp_accounting
import hypothesis
import numpy as np
import pytest
from dp_accounting import dp_event, pld, rdp
from hypothesis import strategies as st

from prism_optax import accounting
from prism_optax.accounting import _as_drawn, _events

Relation = accounting.NeighboringRelation
Q, STEPS, DELTA = 64 / 9919, 300, 1e-5
# Ten times the accountant's own grid: ten times as fast, and still a bound.
COARSE = {'value_discretization_interval': 1e-3}


def by_hand(
  event, relation, accountant, count=1, value_discretization_interval=1e-4
):
  makers = {
    'pld': lambda: pld.PLDAccountant(relation, value_discretization_interval),
    'rdp': lambda: rdp.RdpAccountant(neighboring_relation=relation),
  }
  return makers[accountant]().compose(event, count).get_epsilon(DELTA)


@pytest.mark.parametrize(
  ('noise_multiplier', 'expected', 'tolerance'),
  # Published to this many figures.
  [
    pytest.param(0.5, 6.62, 5e-3, marks=pytest.mark.slow),
    (1.0, 0.674, 5e-4),
  ],
)
def test_epsilon_of_a_run_by_pld(noise_multiplier, expected, tolerance):
  event = accounting.dpsgd_event(noise_multiplier, Q, STEPS)
  spent = accounting.epsilon(event, DELTA)
  assert spent == pytest.approx(expected, abs=tolerance)


@pytest.mark.parametrize(
  ('relation', 'accountant', 'grid'),
  [
    # dp-accounting's own grid.
    pytest.param(Relation.ADD_OR_REMOVE_ONE, 'pld', {}, marks=pytest.mark.slow),
    (Relation.ADD_OR_REMOVE_ONE, 'pld', COARSE),
    (Relation.ADD_OR_REMOVE_ONE, 'rdp', {}),
    (Relation.REPLACE_SPECIAL, 'pld', COARSE),
    (Relation.REPLACE_SPECIAL, 'rdp', {}),
  ],
)
def test_equals_dp_accounting_by_hand(relation, accountant, grid):
  event = dp_accounting.PoissonSampledDpEvent(
    0.03, dp_accounting.GaussianDpEvent(0.9)
  )
  spent = accounting.epsilon(
    accounting.dpsgd_event(0.9, 0.03, 17),
    DELTA,
    accountant=accountant,
    neighboring_relation=relation,
    **grid,
  )
  assert spent == by_hand(event, relation, accountant, 17, **grid)


def test_poisson_under_replace_one_equals_dp_accounting_by_hand():
  event = dp_accounting.PoissonSampledDpEvent(
    0.03, dp_accounting.GaussianDpEvent(0.9)
  )
  spent = accounting.epsilon(
    accounting.dpsgd_event(0.9, 0.03, 17),
    DELTA,
    neighboring_relation=Relation.REPLACE_ONE,
    **COARSE,
  )
  assert spent == by_hand(event, Relation.REPLACE_ONE, 'pld', 17, **COARSE)


def test_truncated_batches_equal_dp_accounting_by_hand():
  event = dp_event.TruncatedSubsampledGaussianDpEvent(
    dataset_size=300,
    sampling_probability=0.03,
    truncated_batch_size=14,
    noise_multiplier=0.9,
  )
  ours = accounting.dpsgd_event(
    0.9, 0.03, 17, truncated_batch_size=14, dataset_size=300
  )
  spent = accounting.epsilon(ours, DELTA, **COARSE)
  assert spent == by_hand(
    event, Relation.ADD_OR_REMOVE_ONE, 'pld', 17, **COARSE
  )
  # Cutting one batch in forty is not free: the plain event would be wrong.
  plain = accounting.epsilon(
    accounting.dpsgd_event(0.9, 0.03, 17), DELTA, **COARSE
  )
  assert spent > 1.01 * plain


def test_one_distribution_serves_every_delta_and_no_other_event(monkeypatch):
  made = []
  accountant = pld.PLDAccountant

  def counting(*args):
    made.append(args)
    return accountant(*args)

  def epsilon(event, delta=DELTA, relation=Relation.ADD_OR_REMOVE_ONE):
    return accounting.epsilon(
      event, delta, neighboring_relation=relation, **COARSE
    )

  monkeypatch.setattr(pld, 'PLDAccountant', counting)
  one = dp_event.GaussianDpEvent(3.21)  # Of no other test.
  fresh = accountant(Relation.ADD_OR_REMOVE_ONE, 1e-3).compose(one)
  for delta in (1e-6, 1e-5, 1e-6):
    assert epsilon(one, delta) == fresh.get_epsilon(delta)
  assert len(made) == 1
  doubled = by_hand(one, Relation.REPLACE_ONE, 'pld', **COARSE)
  assert epsilon(one, relation=Relation.REPLACE_ONE) == doubled
  # A list may grow after its events were counted.
  events = [one]
  composed = dp_event.ComposedDpEvent(events)
  assert epsilon(composed) == epsilon(one)
  events.append(one)
  two = by_hand(one, Relation.ADD_OR_REMOVE_ONE, 'pld', 2, **COARSE)
  assert math.isclose(epsilon(composed), two, rel_tol=1e-6)  # Other roundings.
  mixture = dp_event.MixtureOfGaussiansDpEvent(2.0, [0.0, 1.0], [0.5, 0.5])
  hand = by_hand(mixture, Relation.ADD_OR_REMOVE_ONE, 'pld', **COARSE)
  assert epsilon(mixture) == hand


def test_replace_one_doubles_the_sensitivity_once():
  event = accounting.dpsgd_event(4.8448, 1.0, 1)
  add_or_remove = accounting.epsilon(event, DELTA)
  replace = accounting.epsilon(
    event, DELTA, neighboring_relation=Relation.REPLACE_ONE
  )
  assert add_or_remove == pytest.approx(0.751, abs=5e-4)
  assert replace == pytest.approx(1.610, abs=5e-4)
  # Doubling by hand and by the relation would double twice.
  halved = accounting.dpsgd_event(4.8448 / 2, 1.0, 1)
  assert accounting.epsilon(halved, DELTA) == pytest.approx(replace, rel=1e-6)


def test_rdp_doubles_gaussians_under_replace_one_wherever_they_are():
  """RDP may never claim less than the tight accountant."""
  gaussian = dp_accounting.GaussianDpEvent(4.8448)
  nested = dp_accounting.ComposedDpEvent(
    [gaussian, dp_accounting.SelfComposedDpEvent(gaussian, 3)]
  )
  found = {
    accountant: accounting.epsilon(
      nested,
      DELTA,
      accountant=accountant,
      neighboring_relation=Relation.REPLACE_ONE,
    )
    for accountant in ('pld', 'rdp')
  }
  assert found['pld'] <= found['rdp'] <= 1.2 * found['pld']
  sampled = dp_event.SampledWithoutReplacementDpEvent(100, 10, gaussian)
  halved = dp_event.SampledWithoutReplacementDpEvent(
    100, 10, dp_accounting.GaussianDpEvent(4.8448 / 2)
  )
  assert accounting.epsilon(
    sampled,
    DELTA,
    accountant='rdp',
    neighboring_relation=Relation.REPLACE_ONE,
  ) == by_hand(halved, Relation.REPLACE_ONE, 'rdp')
  laplace = dp_event.DiscreteLaplaceDpEvent(2.0, 3)
  doubled = dp_event.DiscreteLaplaceDpEvent(2.0, 6)
  relation = Relation.REPLACE_ONE
  assert _events.with_relation(laplace, relation) == doubled


def test_rdp_with_poisson_and_replace_one_says_what_is_missing():
  event = accounting.dpsgd_event(1.0, 0.1, 3)
  with pytest.raises(ValueError, match=r"'rdp' .*REPLACE_ONE.*Poisson"):
    accounting.epsilon(
      event,
      DELTA,
      accountant='rdp',
      neighboring_relation=Relation.REPLACE_ONE,
    )


def test_nothing_released_costs_nothing_and_no_noise_costs_everything():
  assert accounting.epsilon(accounting.dpsgd_event(1.0, 0.1, 0), DELTA) == 0
  assert accounting.epsilon(accounting.dpsgd_event(1.0, 0.0, 5), DELTA) == 0
  for accountant in ('pld', 'rdp'):
    silent = accounting.dpsgd_event(0.0, 0.1, 5)
    spent = accounting.epsilon(silent, DELTA, accountant=accountant)
    assert math.isinf(spent)


@hypothesis.settings(max_examples=6, deadline=None)
@hypothesis.given(
  noise_multiplier=st.floats(0.6, 20.0),
  probability=st.floats(1e-3, 1.0),
  steps=st.integers(1, 50),
)
def test_rdp_is_never_below_pld(noise_multiplier, probability, steps):
  """Two upper bounds of one number, of which PLD's is tight."""
  event = accounting.dpsgd_event(noise_multiplier, probability, steps)
  tight = accounting.epsilon(event, DELTA, **COARSE)
  loose = accounting.epsilon(event, DELTA, accountant='rdp')
  # PLD's own slack: a tenth of its grid, once a step at the most.
  assert tight <= loose + 1e-4 * steps


def test_little_noise_neither_fills_the_memory_nor_lowers_the_bound():
  """The grid widens with epsilon; what comes out is still an upper bound."""
  event = accounting.dpsgd_event(0.02, 1.0, 1)
  # For one Gaussian, mu^2/2 + mu t with t the delta quantile, from below.
  spent = accounting.epsilon(event, DELTA)
  exact = 50.0**2 / 2 + 50.0 * 4.2649
  assert exact * (1 - 1e-3) < spent < exact * (1 + 1e-2)
  assert math.isinf(
    accounting.epsilon(accounting.dpsgd_event(1e-9, 0.1, 3), DELTA)
  )


def test_joint_noise_multiplier_is_the_law_of_inverse_squares():
  joint = accounting.joint_noise_multiplier
  assert joint([3.0] * 7) == pytest.approx(3.0 / math.sqrt(7), rel=1e-14)
  assert joint([1.0, 2.0]) == pytest.approx((1 + 1 / 4) ** -0.5, rel=1e-14)
  assert joint(0.7) == 0.7
  assert joint([1.5, math.inf]) == 1.5
  assert joint([1.5, 0.0]) == 0.0
  assert joint(s * 1e-200 for s in (1.0, 1.0)) == pytest.approx(
    1e-200 / math.sqrt(2)
  )


def test_joint_noise_multiplier_agrees_with_composed_releases():
  """Gaussian releases about one batch compose as they would in sequence."""
  sigmas = [3.0, 4.0, 7.0]
  composed = dp_accounting.ComposedDpEvent(
    [dp_accounting.GaussianDpEvent(s) for s in sigmas]
  )
  joint = accounting.dpsgd_event(
    accounting.joint_noise_multiplier(sigmas), 1.0, 1
  )
  assert accounting.epsilon(joint, DELTA) == pytest.approx(
    accounting.epsilon(composed, DELTA), rel=1e-4
  )
  # Reporting the plain sigma claims several times less than was spent.
  alone = accounting.dpsgd_event(3.0, 1.0, 1)
  assert accounting.epsilon(alone, DELTA) < 0.85 * accounting.epsilon(
    joint, DELTA
  )


def test_statement_of_the_noise_as_drawn_holds_at_the_delta_it_says():
  event = accounting.dpsgd_event(0.6, 1e-3, 1000)
  entries = 1e10  # More than most have: drawn noise adds 5e-7 to delta.
  ideal, drawn = (
    accounting.privacy_statement(event, DELTA, accountant='rdp', entries=x)
    for x in (None, entries)
  )
  assert drawn.endswith(', noise as drawn')
  assert '1e-05' in drawn
  spent, shown = (
    float(re.search(r'<= ([0-9.]+)', x)[1]) for x in (ideal, drawn)
  )
  assert spent < shown < 1.1 * spent
  # Some delta of ideal noise gives, with what drawn noise adds, no more.
  found = [
    _as_drawn.release_guarantee(
      accounting.epsilon(event, x, accountant='rdp'), x, entries
    )
    for x in np.linspace(0.5, 1, 20) * DELTA
  ]
  assert min(e for e, d in found if d <= DELTA) >= shown - 2e-3
  with pytest.raises(ValueError, match=r'entries=1e\+17'):
    accounting.privacy_statement(event, DELTA, accountant='rdp', entries=1e17)


def test_what_drawn_noise_adds_to_a_delta_of_zero():
  """The terms of the derivation, one entry, at an epsilon of zero."""
  shift, added = _as_drawn.release_guarantee(0.0, 0.0, 1)
  # tau + beta + nu + beta: 5e-17, 1e-20, 1e-19 and 1e-20.
  assert math.isclose(added, 5e-17 + 1e-19 + 2e-20, rel_tol=1e-5)
  assert 0 < shift < 1e-6


def test_statement_says_what_epsilon_depends_on_and_rounds_up():
  event = accounting.dpsgd_event(2.0, 0.1, 5)
  statement = accounting.privacy_statement(event, DELTA)
  assert 'add-or-remove-one' in statement
  assert '1e-05' in statement
  assert 'PLD' in statement
  shown = float(re.search(r'<= ([0-9.]+)', statement)[1])
  assert 0 <= shown - accounting.epsilon(event, DELTA) <= 1e-3
  replaced = accounting.privacy_statement(
    event, DELTA, neighboring_relation=Relation.REPLACE_ONE
  )
  assert 'replace-one' in replaced


@pytest.mark.parametrize(
  ('arguments', 'message'),
  [
    ((-1.0, 0.1, 3), 'noise_multiplier.*-1.0'),
    ((math.nan, 0.1, 3), 'noise_multiplier.*nan'),
    (('x', 0.1, 3), 'noise_multiplier.*x'),
    ((None, 0.1, 3), 'noise_multiplier.*None'),
    ((1.0, 1.1, 3), 'sampling_probability.*1.1'),
    ((1.0, -0.1, 3), 'sampling_probability.*-0.1'),
    ((1.0, 0.1, -3), 'steps.*-3'),
    ((1.0, 0.1, 2.5), 'steps.*2.5'),
  ],
)
def test_bad_event_arguments_are_named(arguments, message):
  with pytest.raises(ValueError, match=message):
    accounting.dpsgd_event(*arguments)


def test_truncation_needs_both_of_its_constants():
  with pytest.raises(ValueError, match='dataset_size=None'):
    accounting.dpsgd_event(1.0, 0.1, 3, truncated_batch_size=8)
  with pytest.raises(ValueError, match='truncated_batch_size=None'):
    accounting.dpsgd_event(1.0, 0.1, 3, dataset_size=80)
  with pytest.raises(ValueError, match='truncated_batch_size=0'):
    accounting.dpsgd_event(1.0, 0.1, 3, truncated_batch_size=0, dataset_size=80)


def test_bad_epsilon_arguments_are_named():
  event = accounting.dpsgd_event(1.0, 0.1, 3)
  for delta in (-1e-5, 1.5, math.nan):
    with pytest.raises(ValueError, match='delta'):
      accounting.epsilon(event, delta)
  with pytest.raises(ValueError, match="accountant='moments'"):
    accounting.epsilon(event, DELTA, accountant='moments')
  with pytest.raises(ValueError, match="neighboring_relation='replace'"):
    accounting.epsilon(event, DELTA, neighboring_relation='replace')
  with pytest.raises(ValueError, match='value_discretization_interval'):
    accounting.epsilon(event, DELTA, value_discretization_interval=0.0)
  with pytest.raises(ValueError, match='event'):
    accounting.epsilon(1.0, DELTA)
  with pytest.raises(ValueError, match='noise_multipliers'):
    accounting.joint_noise_multiplier([])
  with pytest.raises(ValueError, match=r'noise_multipliers.*-2\.0'):
    accounting.joint_noise_multiplier([1.0, -2.0])


def test_accounting_imports_no_jax_and_nothing_above_it():
  """Read from the source: the package itself imports JAX before we can."""
  folder = pathlib.Path(accounting.__file__).parent
  imported = re.compile(r'^\s*(?:from|import)\s+([\w.]+)(.*)$', re.MULTILINE)
  files = sorted(folder.glob('*.py'))
  assert len(files) >= 3
  for file in files:
    for module, names in imported.findall(file.read_text()):
      assert module.split('.')[0] not in ('jax', 'jaxlib', 'optax', 'flax')
      if module == 'prism_optax':
        assert names.strip() in ('import _validate', 'import accounting')
      elif module.startswith('prism_optax'):
        assert module.startswith('prism_optax.accounting')
