"""What is refused: the error names the argument and shows its value."""

import functools
import math
import re

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import prism_optax
from prism_optax import (
  accounting,
  contrib,
  diagnostics,
  fixed_rank,
  inference,
  lora,
  muon,
  training,
  transforms,
)  # fmt: skip
from prism_optax.contrib import heads
from tests import cases

REQUIRED = {
  'l2_clip_norm': 2.0, 'noise_multiplier': 0.4, 'expected_batch_size': 5.0
}  # fmt: skip
MUON = {
  'l2_clip_norms': 1.0, 'noise_multiplier': 1.0, 'expected_batch_size': 1.0
}  # fmt: skip
KEY, OLD_KEY = jax.random.key(7), jax.random.PRNGKey(0)
BAD_NUMBERS = 0.0, -1.0, math.nan, math.inf, '1'
NOISE = {'noise_stddev': 0.3}
PARAMS = cases.adapters([(9, 7, 3)])
FACTORS = fixed_rank.Factors(np.eye(7, 2), np.eye(5, 2))
TREE = {'lora_a': np.ones((6, 3)), 'lora_b': np.ones((3, 5))}
WEIGHTS = {'kernel': np.ones((6, 5))}
ROWS = np.ones((4, 3), np.float32)
LABELS = np.zeros(4, int)
of = functools.partial
DELTA = 1e-5
GAUSSIAN = dp_accounting.GaussianDpEvent(4.8448)
POISSON = accounting.dpsgd_event(1.0, 0.1, 3)
RELATION = accounting.NeighboringRelation
ADD, REPLACE = RELATION.ADD_OR_REMOVE_ONE, RELATION.REPLACE_ONE
HIDDEN, STATES = np.ones((2, 11)), jnp.ones((4, 3))
budget = of(accounting.PrivacyBudget, epsilon=5.0, delta=DELTA)
calibrate = of(accounting.calibrate_noise_multiplier, target_epsilon=1.0,
  delta=DELTA, sampling_probability=0.1, steps=3)  # fmt: skip
event = of(accounting.dpsgd_event, noise_multiplier=1.0,
  sampling_probability=0.1, steps=3)  # fmt: skip
plan = of(training.plan, 100, target_epsilon=1.0, delta=1e-3)
matrix = of(accounting.matrix_mechanism_event, noise_multiplier=1.0,
  max_participations=1)  # fmt: skip
on_host = of(inference.privatize_on_host, STATES, l2_clip_norm=1.0, stddev=1.0)
on_device = of(inference.privatize_hidden_states, STATES, l2_clip_norm=1.0,
  stddev=1.0)  # fmt: skip

# What is called, with arguments that are fine, and single ones that are not.
ARGUMENTS = [
  (of(prism_optax.prism, 0.1, **REQUIRED), {'l2_clip_norm': (0.0, math.nan),
    'noise_multiplier': (-1.0,), 'expected_batch_size': (0,),
    'weight_decay': (-0.1,), 'b1': (1.0,), 'b2': (-0.1,),
    'prng_key': ('secret',)}),
  (of(prism_optax.prism, **REQUIRED), {'steps': (0, 'unlimited')}),
  (of(prism_optax.published_prism, 0.1, **REQUIRED), {'floor_mode': ('trace',),
    'floor_factor': (-1.0,), 'noise_multiplier': (-1.0,)}),
  (of(contrib.prism_muon, 0.1, **REQUIRED), {'momentum': (1.0,),
    'weight_decay': (-0.1,), 'eps': (-1e-8,), 'expected_batch_size': (0,)}),
  (of(prism_optax.dp_muon, 0.1, **MUON), {'noise_multiplier': (-1.0,),
    'expected_batch_size': (0,), 'momentum': (1.0,), 'l2_clip_norms': (0.0,),
    'noise_split': ('half',), 'degree': (0,), 'weight_decay': (-0.1,),
    'consistent_rms': (0.0,), 'prng_key': ('secret',)}),
  (of(prism_optax.intrinsic_clip, l2_clip_norm=1.0),
    {'l2_clip_norm': BAD_NUMBERS, 'normalize_by': BAD_NUMBERS,
    'prng_key': ('secret',)}),
  (of(prism_optax.per_matrix_clip, 1.0), {'normalize_by': (0,)}),
  (prism_optax.per_matrix_clip, {'l2_clip_norms': (0.0,)}),
  (prism_optax.tangent_privatizer, {'stddev': (-1.0, math.nan)}),
  (of(prism_optax.tangent_privatizer, 1.0), {'steps': (0,)}),
  (of(prism_optax.correlated_tangent_privatizer, lambda key: None),
    {'steps': (0,)}),
  (of(transforms.correlated_noise_stddev, noising_matrix=np.eye(2), stddev=1.0,
    steps=2), {'stddev': (-1,), 'steps': (0,)}),
  (of(transforms.adapt_step_size, preconditioner=
    prism_optax.scale_by_rank_preconditioner(**NOISE), **NOISE),
    {'noise_stddev': (-1.0,), 'growth': (-0.1,), 'threshold': (0.0,),
    'preconditioner': ('adam', prism_optax.retract())}),
  (of(prism_optax.scale_by_rank_preconditioner, **NOISE),
    {'max_condition_number': (0.5,), 'eps': (-1e-8,), 'floor_factor': (-1.0,),
    'noise_stddev': (-1.0,)}),
  (contrib.orthogonalize_tangents, {'momentum': (1.0,), 'degree': (0,),
    'steps': (0, -1), 'normalize': ('l2',), 'coordinate_rms': (0.0,),
    'b1': (-0.1,), 'b2': (1.0,), 'eps': (-1e-8,)}),
  (prism_optax.add_decayed_factors, {'weight_decay': (-0.1,)}),
  (transforms.orthogonalize, {'degree': (0,), 'steps': (1.5,),
    'normalize': ('max',)}),
  (of(muon.newton_schulz, np.ones((3, 4))), {'degree': (0, 2.0), 'steps': (0,
    (), '5'), 'normalize': ('l1',)}),
  (of(muon.minimax_coefficients, least=0.1, steps=3), {'least': (0.0, 1.0),
    'steps': (0,), 'degree': (0, 6)}),
  (of(lora.initialize, TREE, prng_key=0), {'method': ('pissa',),
    'size': (0.0,)}),
  (of(lora.spectral_residual, TREE, WEIGHTS, prng_key=0),
    {'power_iterations': (0.5,)}),
  (of(lora.truncate, TREE), {'rank': (0,)}),
  (of(lora.in_microbatches, abs), {'microbatch_size': (0, 2.5)}),
  (lora.Layout, {'scale': (0,)}),
  (of(diagnostics.nonprivate_clip_statistics, PARAMS, PARAMS,
    l2_clip_norm=1.0), {'space': ('gauge',), 'l2_clip_norm': (0,)}),
  (of(heads.ridge, [(ROWS, LABELS)], num_classes=1, noise_multiplier=1.0,
    dataset_size=4), {'num_classes': (0,), 'noise_multiplier': (-1.0,),
    'dataset_size': (0,), 'logit_scale': (0.0,), 'prng_key': (-1,)}),
  (of(contrib.input_metric, [{'x': ROWS[:0]}], noise_multiplier=1.0,
    dataset_size=4), {'noise_multiplier': (-1.0,), 'dataset_size': (0,),
    'prng_key': (-1,), 'form': ('covariance',)}),
  # Accounting.
  (event, {'noise_multiplier': (-1.0, math.nan, 'x', None), 'steps': (-3, 2.5),
    'sampling_probability': (1.1, -0.1)}),
  (of(event, truncated_batch_size=8, dataset_size=80),
    {'truncated_batch_size': (0, None), 'dataset_size': (None, 0)}),
  (of(matrix, strategy_matrix=np.eye(2)), {'noise_multiplier': (-1,),
    'max_participations': (0,), 'min_separation': (0,)}),
  (of(accounting.calibrate_matrix_mechanism, 1.0, DELTA, np.eye(2),
    max_participations=1), {'neighboring_relation': ('add',)}),
  (of(accounting.epsilon, POISSON, delta=DELTA), {'accountant': ('moments',),
    'delta': (-1e-5, 1.5, math.nan), 'neighboring_relation': ('replace',),
    'value_discretization_interval': (0.0,)}),
  (of(accounting.epsilon, delta=DELTA), {'event': (1.0,)}),
  (of(accounting.privacy_statement, GAUSSIAN, DELTA),
    {'entries': (1e17,), 'possible_stops': (0,)}),
  (of(accounting.gaussian_epsilon, mu=1.0, delta=DELTA), {'mu': (-1.0,),
    'delta': (1.5,)}),
  (calibrate, {'target_epsilon': (0.0, math.nan, math.inf), 'steps': (0,),
    'delta': (0.0, 1.0), 'sampling_probability': (0.0, 1.2)}),
  (budget, {'epsilon': (0.0, math.nan, math.inf), 'delta': (0.0, 1.0),
    'composition': ('basic', 'advanced'), 'server_epsilon': (-1.0,),
    'neighboring_relation': ('all',), 'timeout': (0,)}),
  *((call, {'session': ('', None, 3)}) for call in (
    of(budget().spend, GAUSSIAN), budget().spent, budget().remaining,
    of(budget().how_many_more, GAUSSIAN))),
  (of(budget().spend, session='a'), {'event': (0.5,)}),
  (of(budget().spend, GAUSSIAN, 'a'), {'count': (0, -1, 1.5, True)}),
  # Inference.
  (of(inference.gaussian_stddev, epsilon=1.0, delta=DELTA, sensitivity=1.0),
    {'epsilon': (0.0, math.nan), 'delta': (0.0, 1.0), 'sensitivity': (-1.0,),
    'method': ('exact',)}),
  (of(inference.hidden_state_sensitivity, l2_clip_norm=1.0,
    neighboring_relation=ADD), {'l2_clip_norm': (0.0,),
    'neighboring_relation': ('replace',)}),
  (of(inference.release_event, stddev=1.0, l2_clip_norm=1.0,
    neighboring_relation=ADD), {'stddev': (-1.0,), 'count': (0,),
    'l2_clip_norm': (math.inf,), 'noise': ('laplace',)}),
  *((call, {'l2_clip_norm': (0.0, math.nan), 'stddev': (-1.0, math.nan),
    'block_ndim': (0,)}) for call in (on_host, of(on_device, prng_key=KEY))),
  (on_host, {'stddev': (1e-12,)}),
  (training.AutomaticClipping, {'stability': (0.0, math.nan)}),
  (training.QuantileClipping, {'quantile': (1.5,), 'learning_rate': (0.0,),
    'fraction_stddev': (-1.0,)}),
  # Plans.
  (of(training.plan, dataset_size=100, target_epsilon=1.0, delta=1e-3),
    {'dataset_size': (0,), 'target_epsilon': (-1.0,), 'delta': (1.0,),
    'examples_per_user': (0,)}),
]  # fmt: skip


@pytest.mark.parametrize(
  ('call', 'name', 'value'),
  [
    (call, name, value)
    for call, arguments in ARGUMENTS
    for name, values in arguments.items()
    for value in values
  ],
)
def test_an_argument_out_of_range_is_named_with_its_value(call, name, value):
  with pytest.raises(
    ValueError, match=rf'\b{name}\b.*{re.escape(repr(value))}'
  ):
    call(**{name: value})


AUGMENTED = tuple(transforms.augmented_optimizer(prism_optax.retract()))


def _update(tx, *args):
  return tx.update(*args)


def _update_without_params(tx):
  return tx.update(PARAMS, tx.init(PARAMS))


privatizer = prism_optax.tangent_privatizer
correlated = prism_optax.correlated_tangent_privatizer
noop = optax.identity()
CALLS = {
  # Noise.
  'nothing to draw': (privatizer, 'exactly one of stddev and privatizer'),
  'two noises': (of(privatizer, 1.0, privatizer=noop),
    'exactly one of stddev and privatizer'),
  'no last step': (of(privatizer, privatizer=noop), 'steps=None'),
  'steps as a word': (of(privatizer, privatizer=noop, steps='many'),
    "steps='many'"),
  'two keys': (of(privatizer, privatizer=noop, prng_key=1),
    'a privatizer has its own'),
  'an old key': (of(privatizer, 1.0, prng_key=OLD_KEY), 'Expected prng_key'),
  'a seed under jit': (lambda: jax.jit(privatizer(1.0).init)(PARAMS),
    'outside of jit'),
  'a correlated seed under jit': (lambda: jax.jit(correlated(lambda k: noop,
    steps=1).init)(PARAMS), 'outside of jit'),
  'a privatizer that has its key': (of(correlated, noop, steps=3),
    'from a key to a privatizer'),
  'correlated with an old key': (of(correlated, lambda k: noop, steps=1,
    prng_key=OLD_KEY), 'Expected prng_key'),
  'fewer rows than steps': (of(transforms.correlated_noise_stddev, np.eye(2),
    1.0, 3), 'at least steps=3 rows'),
  'Muon without noise': (of(prism_optax.dp_muon, 0.1, **MUON |
    {'noise_multiplier': None}), 'exactly one'),
  'Muon with two noises': (of(prism_optax.dp_muon, 0.1, **MUON,
    privatizer=noop), 'exactly one'),
  'Muon with two keys': (of(prism_optax.dp_muon, 0.1, **MUON |
    {'noise_multiplier': None}, prng_key=0, privatizer=noop,
    steps='unlimited'), 'privatizer'),
  **{
    f'noise of shape or value {i}': (
      of(prism_optax.scale_by_rank_preconditioner, noise_stddev=np.array(x)),
      'noise_stddev',
    )
    for i, x in enumerate([[1, -1], [1, np.nan], [np.inf], [], [[1.0]]])
  },
  'a recipe without its length': (of(prism_optax.prism, **REQUIRED),
    'learning_rate, or steps'),
  # Traced it would be an array in the state, and a constant of no use.
  'an injected seed': (lambda: optax.inject_hyperparams(prism_optax.prism)(0.1,
    **REQUIRED, prng_key=1).init(PARAMS), 'prng_key to be None, an int or'),
  # Options that decide what is compiled stay what they are.
  'an injected degree': (lambda: optax.inject_hyperparams(prism_optax.dp_muon,
    static_args=('prng_key', 'ns_steps'))(0.1, **MUON, prng_key=1).init(TREE),
    'degree'),
  # Clips.
  'one bad norm of a tree': (of(prism_optax.per_matrix_clip, {'a': 1.0, 'b':
    -1.0}), 'norms=-1.0'),
  'one missing norm of a tree': (of(prism_optax.per_matrix_clip, {'a': None}),
    'l2_clip_norms=None'),
  'norms of another tree': (of(prism_optax.per_matrix_clip({'x': 1.0}).init,
    TREE), 'l2_clip_norms'),
  'no group': (of(transforms.split_noise_multiplier, 1.0, [], []), 'Expected'),
  'groups without a size': (of(transforms.split_noise_multiplier, 1.0, [1.0],
    [1, 2]), 'Expected'),
  'another split': (of(transforms.split_noise_multiplier, 1.0, [1.0], [1],
    noise_split='most'), 'most'),
  # Updates.
  **{
    f'{tx.__name__} without params': (
      of(_update_without_params, tx(*args)),
      'needs `params`|params=None',
    )
    for tx, *args in (
      (prism_optax.intrinsic_clip, 1.0), (prism_optax.per_matrix_clip, 1.0),
      (privatizer, 1.0), (prism_optax.retract,),
      (contrib.orthogonalize_tangents,),
      (lambda: optax.GradientTransformation(*AUGMENTED[:2]),),
    )
  },
  **{
    f'{make.__name__} of {kind}': (
      of(_update, make(1.0), grads, (), PARAMS), 'batch axis'
    )
    for make in (prism_optax.intrinsic_clip, prism_optax.per_matrix_clip)
    for kind, grads in {
      'one gradient': PARAMS,
      'batches of two sizes': jax.tree.map(
        lambda x: np.ones((len(x.shape), *x.shape)), PARAMS
      ),
    }.items()
  },
  'an augmented optimizer that cannot move': (of(AUGMENTED[0],
    {'m0': jax.tree.map(np.zeros_like, PARAMS['m0'])}),
    'Both factors are zero'),
  'a module that cannot move': (of(prism_optax.intrinsic_clip(1.0).init, PARAMS
    | {'m0': jax.tree.map(np.zeros_like, PARAMS['m0'])}),
    r"zero in params of \['m0'\]"),
  'a vector as a matrix':
    (of(transforms.orthogonalize(weight_dimension_numbers=optax.contrib.MuonDimensionNumbers()).init,
    {'w': np.zeros((2, 3)), 'x': np.zeros(3)}), r'axes of the leaf.*\(3,\)'),
  'a vector': (of(muon.newton_schulz, np.ones(3)), r'shape=\(3,\)'),
  **{
    f'coefficients {steps}': (
      of(muon.newton_schulz, np.ones((3, 4)), steps=steps),
      r'degree \+ 1 = 3 coefficients',
    )
    for steps in (((1.0, 0.5),), (1.0, 0.5, 0.375))
  },
  # Adapters.
  'no size of a balanced start': (of(lora.initialize, TREE, 0,
    method='balanced'), 'size=None'),
  'a number as a key': (of(lora.initialize, TREE, jnp.ones(())),
    'prng_key to be'),
  'a float as a key': (of(lora.spectral_residual, TREE, WEIGHTS, 0.5),
    'prng_key to be None, an int'),
  'no weight': (of(lora.spectral_residual, TREE, {'bias': np.ones(3)}, 0),
    r'one weight of shape \(6, 5\)'),
  'a rank for each module': (of(lora.truncate, TREE, {'m0': 1}),
    'rank to be an integer'),
  'another tree': (of(lora.difference, PARAMS, TREE), 'initial.*structure'),
  'another rank': (lambda: lora.difference(TREE, lora.truncate(TREE, 1)),
    'initial at.*shape'),
  'canonicalized under jit': (lambda: jax.jit(lora.canonicalize)(TREE),
    'outside of jit'),
  'half of it canonicalized under jit': (lambda: jax.jit(lambda x:
    lora.canonicalize(TREE | {'lora_a': x}))(TREE['lora_a']),
    'outside of jit'),
  'one rank axis of two': (of(lora.Layout, a_rank_axis=1),
    'a_rank_axis=1, b_rank_axis=None'),
  'probes of another shape': (lambda:
    contrib.tangent_probes(PARAMS).attach(jax.tree.map(lambda x: x[None],
    PARAMS)), 'Expected probes at'),
  # Geometry.
  **{
    f'factors {left} and {right}': (
      lambda left=left, right=right: fixed_rank.frame(
        fixed_rank.Factors(np.zeros(left), np.zeros(right))
      ),
      message,
    )
    for left, right, message in (
      ((5, 2), (4, 3), r'\(5, 2\).*\(4, 3\)'),
      ((2, 5, 2), (3, 4, 2), r'\(2, 5, 2\).*\(3, 4, 2\)'),
      ((5, 4), (3, 4), 'rank'), ((3, 4), (5, 4), 'rank'),
      ((5,), (4,), r'\(5,\)'), ((2,), (4, 2), r'\(2,\)'),
      ((5, 0), (4, 0), 'rank'),
    )
  },
  # Broadcasting would turn some of these into a wrong answer.
  **{
    f'{i}: a tangent of shapes {shapes}': (
      lambda call=call, shapes=shapes: call(
        fixed_rank.frame(FACTORS), fixed_rank.Tangent(*map(np.zeros, shapes))
      ),
      r'\(7, 2\)|\(5, 2\)',
    )
    for i, call in enumerate((
      fixed_rank.tangent_from_gradients, fixed_rank.project,
      lambda frame, x: fixed_rank.transport(frame, frame, x),
      fixed_rank.retraction,
    ))
    for shapes in (((6, 2), (5, 2)), ((7, 3), (5, 3)), ((5, 2), (7, 2)))
  },
  # Proofs.
  **{
    f'proved of {args}, {axes}': (
      of(diagnostics.prove_independent, lambda *args: args, *args,
        in_axes=axes), message,
    )
    for args, axes, message in (
      ((np.ones((1, 2)),), 0,
        r'at least 2 examples, got the first axes \[\(1,\)'),
      ((np.ones(3), np.ones(4)), 0, r'\[\(3,\), \(4,\)\]'),
      ((1.0,), 0, r'\[\(\)\]'),
      ((np.ones(3),), None, r'got the first axes \[\]'),
      ((np.ones(3),), (0, 0), r'in_axes=\(0, 0\)'),
      ((np.ones(3),), 1, r'in_axes=1'),
    )
  },
  # Accounting.
  'a size and no cut': (of(event, dataset_size=80),
    'truncated_batch_size=None'),
  'no multiplier': (of(accounting.joint_noise_multiplier, []),
    'noise_multipliers'),
  'one bad multiplier': (of(accounting.joint_noise_multiplier, [1.0, -2.0]),
    r'noise_multipliers.*-2\.0'),
  **{
    f'strategy matrix: {message}': (of(matrix, strategy_matrix=x), message)
    for x, message in (
      (np.ones((2, 3)), r'square, got shape \(2, 3\)'),
      ([[1, -1.5e-6], [1, 1]], 'lower triangular'),
      ([[1, 0], [np.inf, 1]], 'finite'),
      (np.diag([1.0, 0.0]), 'positive diagonal'),
    )
  },
  'replaced records by Renyi': (of(accounting.epsilon, POISSON, DELTA,
    accountant='rdp', neighboring_relation=REPLACE),
    r"'rdp' .*REPLACE_ONE.*Poisson"),
  **{
    f'calibrated: {message}': (of(calibrate, **options), message)
    for options, message in (
      ({'prior_events': [dp_accounting.UnsupportedDpEvent()]}, 'no analysis'),
      # Below what the accountant's tail can show, at any noise.
      ({'target_epsilon': 1e-6, 'delta': 1e-9, 'sampling_probability': 0.01,
        'steps': 100}, r'target_epsilon=1e-06.*reached'),
      ({'accountant': 'rdp', 'neighboring_relation': REPLACE},
        r"'rdp' has no analysis.*REPLACE_ONE"),
      ({'accountant': 'rdp', 'truncated_batch_size': 40, 'dataset_size': 300},
        r"'rdp' has no analysis.*Truncated"),
      ({'target_epsilon': 2.0, 'sampling_probability': 1e-3, 'steps': 9,
        'accountant': 'rdp', 'entries': 1e12}, r'adds .* to delta'),
      ({'target_epsilon': 1e-9, 'delta': 1e-4, 'sampling_probability': 1e-3,
        'steps': 9, 'accountant': 'rdp', 'entries': 1e9},
        r'adds .* to epsilon'),
    )
  },
  # Inference.
  'a classic stddev too far': (of(inference.gaussian_stddev, 10, DELTA, 1.0,
    method='classic'), "'classic' is not enough.*epsilon=10"),
  **{
    f'delta of {x.shape}, {left.shape}': (
      of(inference.lora_delta, x, left, np.ones((11, 3))), 'right'
    )
    for x, left in (
      (HIDDEN, np.ones(5)), (HIDDEN[:, 1:], np.ones((5, 3))),
      (np.ones(()), np.ones((5, 3))),
    )
  },
  **{
    f'hidden states {i}: {message}': (call, message)
    for i, (call, message) in enumerate((
      *((of(call, **options), message)
        for call in (on_host, of(on_device, prng_key=KEY))
        for options, message in (({'block_ndim': 3}, '3 axes'),
          ({'mask': np.ones(3, bool)}, r'mask .*\(4,\)'))),
      (of(inference.privatize_hidden_states, jnp.ones((4, 3), int), KEY,
        l2_clip_norm=1.0, stddev=1.0), 'hidden'),
      (of(inference.privatize_hidden_states, jnp.ones(()), KEY,
        l2_clip_norm=1.0, stddev=1.0), r'shape=\(\)'),
      (of(on_device, prng_key=jax.random.split(KEY, 4)), 'prng_key'),
      (of(on_device, prng_key=3), 'prng_key'),
    ))
  },
  # Plans.
  'too few gradients': (of(plan, example_gradients=100), 'at least 120'),
  'memory for what': (of(plan, memory_bytes=1e9), 'bytes_per_example=None'),
  'no memory for one user': (of(plan, memory_bytes=5.0, bytes_per_example=2.0,
    examples_per_user=3), 'one record'),
}  # fmt: skip


@pytest.mark.parametrize('case', CALLS)
def test_what_does_not_fit_together_is_said(case):
  call, message = CALLS[case]
  with pytest.raises(ValueError, match=message):
    call()
