"""Private training on handwritten digits, one option at a time.

    python -m benchmarks.accuracy.digits [--only clipping] [--table]

Small networks, so that every setting has all its learning rates and five to ten
seeds: the best rate is chosen on pictures that are set aside, the accuracy is
that of other pictures. Poisson batches, `make_private`. Experiments:

``options``: LoRA of rank 4 on a network of two layers that was trained on
turned pictures (``digits_network.py``), epsilon 2 at delta 1e-4, expected batch
100, 96 steps, zero start, cosine decay of the rate, no weight decay, Adam's
bias correction. Each option is changed by itself, with the noise calibrated
anew, and DP-AdamW on the factors is run beside it.

``clipping``: the same with expected batch 96, a balanced start, ``b1=0.5`` and
epsilon 2 and 8, by the rule that bounds a record: a flat clip, an automatic
one, one for each module, one that follows a quantile. Then users with 1, 2, 4
and 8 records each, in as many batches of as many records: epsilon is of users.

``correlated``: the same network in a fixed order that repeats, with independent
and with correlated noise, and with Poisson batches, whose amplification
correlated noise cannot use. A constant rate, a balanced start.

``plans``: the same network with ``b1=0.5`` and epsilon 2 at equal cost, 9,600
gradients: by the number of steps, of which `training.plan` has 120.

``muon``: a perceptron from scratch by DP-Muon and DP-Adam, delta 1e-5; rates
are tuned on other seeds, and the error is that of the mean over seeds.

Some fifteen minutes on one CPU core, most of them for compiling.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax_privacy.matrix_factorization import streaming_matrix, toeplitz

import prism_optax
from benchmarks.accuracy import digits_network as network
from benchmarks.common import methods, private, runner
from prism_optax import contrib, lora, training

METRIC_NOISE = 10.0
# All fields of a setting. `decay` is the share of the cosine decay of the rate.
DEFAULTS = {
  'method': 'prism', 'epsilon': 2.0, 'rank': 4, 'batch': 100, 'steps': 96,
  'start': 'one_sided', 'rule': 'flat', 'clip': 1.0, 'records of a user': 1,
  'b1': 0.9, 'b2': 0.999, 'floor_factor': 1.0, 'max_condition_number': 1e4,
  'bias_correction': True, 'decay': 1.0, 'weight_decay': 0.0, 'metric': None,
  'noise': 'Poisson',
}  # fmt: skip
OURS = {'bias_correction': False, 'weight_decay': 0.1}
ADAM, BALANCED = {'method': 'dp-adamw'}, {'start': 'balanced'}
RULES = {
  'flat': None,
  'automatic': training.AutomaticClipping(),
  'by module': training.GroupClipping(
    {name: name for name in ('first', 'last')}, {'first': 1.0, 'last': 1.0}
  ),
  'quantile': training.QuantileClipping(),
}
POLYNOMIALS = prism_optax.muon.minimax_coefficients
# Optimizers of the perceptron, and the norm of their clip.
MUON: dict[str, tuple[float, Callable[..., Any]]] = {
  'DP-Adam': (1.0, optax.adam),
  **{
    name: (
      0.5,
      functools.partial(
        functools.partial,
        prism_optax.dp_muon,
        adam_learning_rate=0.01,
        **options,
      ),
    )
    for name, options in {
      'DP-Muon': {},
      'DP-Muon, least energy': {'noise_split': 'least_energy'},
      'DP-Muon, best polynomials, 3 steps': {'ns_steps': POLYNOMIALS(0.1, 3)},
      'DP-Muon, best polynomials, 5 steps': {'ns_steps': POLYNOMIALS(0.003, 5)},
    }.items()
  },
}


def options() -> list[dict[str, Any]]:
  """One option at a time around ``DEFAULTS``."""
  metrics = [
    {'b1': b1, 'metric': metric, **other}
    for metric in ('mean', 'second_moment')
    for b1 in (0.5, 0.0)
    for other in ({}, ADAM | BALANCED, ADAM)
  ]
  return [
    {}, ADAM, ADAM | BALANCED, ADAM | {'b2': 0.99},
    {'batch': 25, 'steps': 384}, {'batch': 50, 'steps': 192},
    {'batch': 200, 'steps': 48},
    *({'steps': x} for x in (24, 48, 192, 384)),
    *({'clip': x} for x in (0.1, 0.3, 3.0, 10.0)),
    *({'rank': x} for x in (1, 2, 8)),
    BALANCED, {'decay': 0.0},
    *({'floor_factor': x} for x in (0.1, 4.0)),
    {'max_condition_number': 1.0},
    *({'b1': x} for x in (0.0, 0.5, 0.97)),
    {'b1': 0.5, 'steps': 384}, {'b1': 0.5, 'decay': 0.0},
    {'b1': 0.5, **BALANCED}, {'b1': 0.5, **ADAM, **BALANCED},
    *metrics,
    {'b1': 0.0, **ADAM, **BALANCED}, {'b1': 0.5, **ADAM}, {'b1': 0.0, **ADAM},
    {'b2': 0.9}, {'b2': 0.99}, {'weight_decay': 0.1},
    {'bias_correction': False}, OURS,
    *({'bias_correction': False, 'weight_decay': x} for x in (0.3, 1.0)),
    *(OURS | {'weight_decay': x, 'steps': 384} for x in (0.1, 0.3)),
  ]  # fmt: skip


def clipping() -> list[dict[str, Any]]:
  """Rule, norm (for a quantile the first one), and records of a user."""
  rows = [
    *(('flat', norm, 1) for norm in (1.0, 10.0, 0.1, 0.3, 3.0)),
    *(('quantile', norm, 1) for norm in (10.0, 0.1, 1.0)),
    *(('flat', 1.0, records) for records in (8, 4, 2)),
    ('automatic', 1.0, 1), ('by module', 1.0, 1),
  ]  # fmt: skip
  return [
    {
      'epsilon': epsilon, 'rule': rule, 'clip': norm,
      'records of a user': records, 'batch': 96, **method, **BALANCED,
      'b1': 0.5, 'bias_correction': False,
    }
    for epsilon in (2.0, 8.0)
    for rule, norm, records in rows
    for method in ({'method': 'prism'}, ADAM)
  ]  # fmt: skip


EXPERIMENTS: dict[str, Callable[[], list[dict[str, Any]]]] = {
  'options': options,
  'plans': lambda: [
    {'b1': 0.5, 'steps': steps, 'batch': 9600 // steps}
    for steps in (30, 60, 120, 240, 480)
  ],
  'clipping': clipping,
  'correlated': lambda: [
    {
      'noise': noise, 'epsilon': epsilon, 'decay': 0.0,
      'bias_correction': False, **BALANCED,
    }
    for epsilon in (2.0, 8.0)
    for noise in ('independent', 'prefix sums', 'banded', 'Poisson')
  ],
  'muon': lambda: [
    {'epsilon': epsilon, 'method': method, 'batch': 128, 'steps': 120,
     'clip': MUON[method][0]}
    for epsilon in (1.0, 3.0)
    for method in MUON
  ],
}  # fmt: skip


def rates_and_seeds(setting: dict[str, Any]) -> tuple[tuple[float, ...], int]:
  """Learning rates and the number of seeds of a setting."""
  if setting['method'] in MUON:
    return (0.003, 0.01, 0.03, 0.1, 0.3), 6
  if setting['decay'] == 0 and not setting['bias_correction']:
    return (1e-2, 3e-2, 1e-1, 3e-1), 5
  if setting['batch'] == 96:
    if setting['method'] == 'prism':
      return (0.1, 0.18, 0.3, 0.56), 5
    return (0.03, 0.056, 0.1, 0.18), 5
  return (1e-2, 1.8e-2, 3e-2, 5.6e-2, 0.1, 0.18, 0.3, 0.56), 10


class Problem(NamedTuple):
  """What is trained on what.

  Attributes:
    start: ``start(seed)``, the parameters.
    frozen: Weights that are not trained.
    logits: ``logits(params, frozen, x)``.
    rows: Private pictures and labels.
    tuning: Those that choose a rate.
    test: Those that are reported.
  """

  start: Callable[[int], Any]
  frozen: Any
  logits: Callable[..., jax.Array]
  rows: network.Rows
  tuning: network.Rows
  test: network.Rows

  def loss(self, params: Any, frozen: Any, x: Any, y: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(
      self.logits(params, frozen, x), y
    )


@functools.cache
def adapted_network(rank: int, start: str) -> Problem:
  """LoRA on the pretrained network, whose start is taken out of its weights."""
  public, rows, held_out = network.pictures()
  weights = network.public_weights(*public)
  empty = {
    name: {
      'lora_a': jnp.zeros((w.shape[0], rank)),
      'lora_b': jnp.zeros((rank, w.shape[1])),
    }
    for name, w in weights.items()
  }
  size = 1.0 if start == 'balanced' else None
  params = lora.initialize(empty, 0, method=start, size=size)
  frozen = {
    name: w - params[name]['lora_a'] @ params[name]['lora_b']
    for name, w in weights.items()
  }
  third = len(held_out.x) // 3
  parts = (network.Rows(*(x[p] for x in held_out))
           for p in (slice(third), slice(third, None)))  # fmt: skip
  return Problem(lambda seed: params, frozen, network.logits, rows, *parts)


@functools.cache
def perceptron() -> Problem:
  """Two layers of 64 units from scratch, another start for each seed."""
  images, labels = network.digits.shuffled()
  cuts = (slice(0, 1197), slice(1197, 1497), slice(1497, None))
  flat = images.reshape(len(images), -1)
  parts = (network.Rows(flat[c], labels[c]) for c in cuts)

  def start(seed):
    keys = jax.random.split(jax.random.key(seed))
    return {
      name: {'b': jnp.zeros(n), 'w': jax.random.normal(key, (64, n)) / 8}
      for name, key, n in zip(('hidden', 'out'), keys, (64, 10), strict=True)
    }

  def logits(params, frozen, x):
    del frozen
    h = jnp.tanh(x @ params['hidden']['w'] + params['hidden']['b'])
    return h @ params['out']['w'] + params['out']['b']

  return Problem(start, {}, logits, *parts)


@functools.cache
def input_metric(form: str | None, seed: int) -> contrib.InputMetric | None:
  """The metric of the inputs, as a seed releases it."""
  if form is None:
    return None
  public, rows, _ = network.pictures()
  weights = network.public_weights(*public)
  return contrib.input_metric(
    [{'first': rows.x, 'last': jax.nn.relu(rows.x @ weights['first'])}],
    noise_multiplier=METRIC_NOISE,
    dataset_size=len(rows.x),
    form=form,
    prng_key=jax.random.fold_in(jax.random.key(seed), 2),
  )


def optimizer(setting: dict[str, Any], rate: Any) -> Any:
  """The optimizer of a setting."""
  steps = setting['steps']
  if setting['method'] in MUON:
    schedule = optax.linear_schedule(1.0, 0.1, steps)
    return MUON[setting['method']][1](lambda t: rate * schedule(t))
  half = (1 - jnp.cos(jnp.pi * jnp.arange(steps) / steps)) / 2

  def decayed(count):
    return rate * (1 - setting['decay'] * half[count])

  if setting['method'] == 'dp-adamw':
    return optax.adamw(
      decayed, setting['b1'], setting['b2'],
      weight_decay=setting['weight_decay'],
    )  # fmt: skip
  names = ('b1', 'b2', 'floor_factor', 'weight_decay', 'bias_correction',
           'max_condition_number')  # fmt: skip
  return methods.MANIFOLD[setting['method']](
    decayed, **{name: setting[name] for name in names}
  )


def training_of(
  setting: dict[str, Any],
  problem: Problem,
  metric: contrib.InputMetric | None,
  rate: Any,
  key: Any,
  noise_multiplier: float | None = None,
) -> training.PrivateTraining:
  """The private training; without a noise multiplier it is calibrated."""
  records = setting['records of a user']
  noise = {'noise_multiplier': noise_multiplier}
  if noise_multiplier is None:
    noise = {'target_epsilon': setting['epsilon']}
  return training.make_private(
    problem.loss,
    problem.start(0),
    optimizer=optimizer(setting, rate),
    clipping=RULES[setting['rule']],
    l2_clip_norm=setting['clip'],
    expected_batch_size=setting['batch'] // records,
    dataset_size=len(problem.rows.x) // records,
    steps=setting['steps'],
    delta=1e-5 if setting['method'] in MUON else 1e-4,
    examples_per_user=None if records == 1 else records,
    change_of_variables=metric,
    prng_key=key,
    **noise,
  )


def poisson(
  setting: dict[str, Any], problem: Problem, sigma: float
) -> Callable[[float, int], Any]:
  """``train(rate, seed)``, by Poisson batches."""
  records = setting['records of a user']
  # Users with records of any kind: they differ by chance.
  users = None if records == 1 else np.arange(len(problem.rows.x)) // records

  @functools.cache
  def program(metric_of: int):
    metric = input_metric(setting['metric'], metric_of)
    return private.Program(
      lambda numbers, key: training_of(
        setting, problem, metric, numbers['rate'], key, sigma
      )
    )

  @functools.cache
  def batches(seed: int):
    metric_of = 0 if setting['metric'] is None else seed
    drawn = program(metric_of).batches(
      problem.start(seed), tuple(problem.rows), {'rate': 0.1}, seed,
      users=users,
    )  # fmt: skip
    return private.stacked(list(drawn))

  def train(rate, seed):
    metric = input_metric(setting['metric'], seed)
    params = program(0 if metric is None else seed).end(
      problem.start(seed), problem.frozen, batches(seed), {'rate': rate}, seed
    )
    return params if metric is None else metric.to_params(params)

  return train


def strategies(steps: int, epoch: int) -> dict[str, tuple[Any, np.ndarray]]:
  """Noising matrices with their strategy matrices, by name."""
  every = methods.strategy_coefficients(steps, steps)
  bands = methods.strategy_coefficients(steps, epoch)
  lower = toeplitz.materialize_lower_triangular
  return {
    'independent': (streaming_matrix.identity(), np.eye(steps)),
    'prefix sums': (toeplitz.inverse_as_streaming_matrix(every), lower(every)),
    'banded': (
      toeplitz.inverse_as_streaming_matrix(bands[:epoch]), lower(bands)
    ),
  }  # fmt: skip


def fixed_order(
  setting: dict[str, Any], problem: Problem, smoke: bool
) -> tuple[Callable[[float, int], Any], float]:
  """``train(rate, seed)`` in a fixed order, and the noise multiplier.

  Each record takes part once in every epoch, which is what the matrix mechanism
  is accounted with.
  """
  batch, steps = setting['batch'], setting['steps']
  epoch = len(problem.rows.x) // batch
  matrix, strategy = strategies(steps, epoch)[setting['noise']]
  sigma = 1.0
  if not smoke:
    sigma = methods.correlated_noise_multiplier(
      setting['epsilon'], 1e-4, strategy, epoch
    )
  program = private.Program(
    lambda numbers, key: methods.correlated(
      numbers['rate'], matrix, l2_clip_norm=setting['clip'],
      noise_multiplier=sigma, expected_batch_size=batch, steps=steps,
      prng_key=key, weight_decay=0.0,
    ),
    loss=problem.loss,
  )  # fmt: skip
  drawn = private.stacked(
    list(private.fixed_order(problem.rows, batch, steps, 0))
  )

  def train(rate, seed):
    params, numbers = problem.start(seed), {'rate': rate}
    return program.end(params, problem.frozen, drawn, numbers, seed)

  return train, sigma


def measure(smoke: bool, setting: dict[str, Any]) -> dict[str, Any]:
  """One row: accuracies of every rate, the best of them by the tuning part."""
  setting = {**DEFAULTS, **setting}
  is_muon = setting['method'] in MUON
  problem = perceptron()
  if not is_muon:
    problem = adapted_network(setting['rank'], setting['start'])
  rates, seeds = rates_and_seeds(setting)
  if smoke:
    rates, seeds, setting = rates[:1], 2, setting | {'steps': 4}
  if setting['noise'] != 'Poisson':
    train, sigma = fixed_order(setting, problem, smoke)
  else:
    sigma = 1.0
    if not smoke:
      metric = input_metric(setting['metric'], 0)
      sigma = training_of(setting, problem, metric, 0.1, 0).noise_multiplier
    train = poisson(setting, problem, sigma)

  @jax.jit
  def right(params, rows):
    guess = jnp.argmax(problem.logits(params, problem.frozen, rows[0]), -1)
    return jnp.mean(guess == rows[1])

  def accuracies(rates, seeds):
    """On both parts, (2, rates, seeds)."""
    ends = [[train(rate, seed) for seed in seeds] for rate in rates]
    parts = problem.tuning, problem.test
    return np.array([[[right(x, part) for x in row] for row in ends]
                     for part in parts])  # fmt: skip

  tuned = accuracies(rates, range(1000, 1002) if is_muon else range(seeds))
  best = int(np.argmax(tuned[0].mean(1)))
  of_seeds = tuned[1, best]
  if is_muon:
    of_seeds = accuracies(rates[best : best + 1], range(seeds))[1, 0]
  spread = float(of_seeds.std(ddof=1))
  return {
    'noise multiplier': sigma,
    'learning rate': rates[best],
    'rates': rates,
    'seeds': seeds,
    'tuning accuracy': float(tuned[0, best].mean()),
    'accuracy': float(of_seeds.mean()),
    'standard deviation over seeds': spread,
    'standard error': spread / seeds**0.5,
    'accuracies of the seeds': of_seeds.tolist(),
    'accuracies by rate': tuned[1].mean(1).tolist(),
    'accuracies by rate and seed': tuned[1].tolist(),
  }


def main() -> None:
  args = runner.parser_of(__doc__).parse_args()
  store = runner.store_of(args, 'digits', defaults=DEFAULTS)
  only = [x for x in args.only if x in EXPERIMENTS] or list(EXPERIMENTS)
  settings = [x for name in only for x in EXPERIMENTS[name]()]
  if args.smoke:
    settings = [EXPERIMENTS[x]()[-1] for x in only]
  if not args.table:
    runner.run(
      store, runner.fixed(settings), functools.partial(measure, args.smoke),
      args.minutes,
    )  # fmt: skip
  print(runner.table(store.rows))


if __name__ == '__main__':
  main()
