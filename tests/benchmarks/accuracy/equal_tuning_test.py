"""Equal tuning: what is chosen, from which runs; every method makes a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.accuracy import (
  defaults,
  encoded_text,
  equal_tuning,
  plain_layers,
  problems,
  recipe_runs,
  recipes,
  short_experiments,
)
from benchmarks.accuracy.recipes import Knobs, Recipe

BEST = {'b1': 0.9, 'decay': 1.0, 'start': 'balanced', 'average': True}


def score(recipe):
  """Largest at ``BEST`` and a rate that depends on b1."""
  rate = 1e-3 if recipe.b1 == 0.9 else 3e-3
  steps = abs(np.log10(max(recipe.rate, 1e-9) / rate))
  return sum(getattr(recipe, k) == v for k, v in BEST.items()) - steps


def finished(rows, tasks):
  """All runs of a table, by made-up scores; in the order of a worker."""
  runs, order = {}, []
  while todo := list(equal_tuning.wanted(runs, rows, tasks, (0, 1))):
    recipe, report = todo[0]
    order.append((recipe, report))
    found = {'accuracy': score(recipe), 'rows': 16}
    if report:
      rng = np.random.default_rng([recipe.seed, len(recipe.method)])
      right = rng.random(16) < 0.7
      found['right'] = np.packbits(right).tobytes().hex()
    runs[equal_tuning.key(recipe, report)] = found
  return runs, order


def test_tuning_finds_the_best_and_reports_other_seeds():
  runs, order = finished(['dp-adamw', 'head alone'], ['sst2'])
  best = equal_tuning.tuned(runs, Recipe('dp-adamw', 'sst2'))
  expected = {**BEST, 'rate': 1e-3}
  assert {k: getattr(best, k) for k in expected} == expected
  reported = [recipe for recipe, report in order if report]
  assert [x for x in reported if x.method == 'dp-adamw'] == [
    dataclasses.replace(best, seed=seed) for seed in (0, 1)
  ]
  tuning = {recipe.seed for recipe, report in order if not report}
  assert tuning == {Recipe('dp-adamw', 'sst2').seed}
  assert not tuning & set(equal_tuning.SEEDS)
  # Nothing is run twice, and a table goes on where it was.
  assert len(order) == len(set(order)) == len(runs)
  assert (
    next(equal_tuning.wanted(runs, ['dp-adamw'], ['sst2'], (0, 1)), None)
    is None
  )


def test_every_method_is_tuned_alike():
  """The same values of every option that a method has."""
  for row in equal_tuning.ROWS:
    method = row.partition(',')[0]
    assert method in recipes.METHODS
    names = dict(equal_tuning.options(method))
    assert names['b1'] == (0.0, 0.9)
    assert ('average' in names) == (method not in recipes.MANIFOLD)
  compared = 'prism', 'dp-adamw', 'lora+', 'ffa'
  assert len({str(equal_tuning.options(x)[:3]) for x in compared}) == 1


def test_the_table_compares_with_the_first_row(monkeypatch):
  monkeypatch.setattr(equal_tuning, 'SEEDS', (0, 1))
  runs, _ = finished(['prism', 'dp-adamw'], ['sst2'])
  *_, first, second = equal_tuning.table(runs, ['sst2']).splitlines()
  assert first.startswith('| sst2 | prism | 0.9, 1, balanced, no, 0.001 |')
  assert first.endswith('|  |  |')
  assert '| sst2 | dp-adamw | 0.9, 1, balanced, yes, 0.001 |' in second
  # Of a method that is not finished nothing is said.
  del runs[
    equal_tuning.key(
      dataclasses.replace(
        equal_tuning.tuned(runs, Recipe('prism', 'sst2')), seed=1
      ),
      True,
    )
  ]
  assert '| prism |' not in equal_tuning.table(runs, ['sst2'])


def test_results_of_two_workers_are_kept(tmp_path):
  results = equal_tuning.Results(tmp_path / 'table.json')
  for seed, report in ((0, True), (1, True), (1, False)):
    results.put(Recipe('ffa', 'sst2', seed=seed), report, {'accuracy': seed})
  found = results.read()
  assert len(found) == 3
  second = equal_tuning.key(Recipe('ffa', 'sst2', seed=1), False)
  assert found[second] == {'accuracy': 1}


def params():
  a, b = jax.random.normal(jax.random.key(0), (2, 8, 3))
  return {
    'layers': [{'query': {'lora_a': a, 'lora_b': b.T}}],
    'head': {'kernel': jnp.ones((8, 2)), 'bias': jnp.ones(2)},
  }


@pytest.mark.parametrize(
  'method', [x for x in recipes.METHODS if x != 'head alone']
)
def test_an_optimizer_moves_and_decays_what_it_should(method):
  start = params()
  if method == 'linear probe':
    start['layers'] = [{}]

  @jax.jit
  def stepped(decay):
    tx = recipes.optimizer(
      method, Knobs(0.1, 0.5, decay), 0.0, 4, jax.random.key(1)
    )
    mean = recipes.coordinates(method, start)(
      jax.tree.map(lambda x: jnp.full_like(x, 0.1), start)
    )
    updates, _ = tx.update(mean, tx.init(start), start)
    return jax.tree.map(jnp.add, start, updates)

  plain, decayed = stepped(0.0), stepped(2.0)
  # Downhill, in the head as in the adapters; half of a step, b1 being .5.
  assert (plain['head']['kernel'] < start['head']['kernel']).all()
  np.testing.assert_array_equal(plain['head']['bias'], decayed['head']['bias'])
  if method not in ('published_prism', 'dp-adambc'):
    np.testing.assert_allclose(plain['head']['bias'], 0.95, atol=1e-4)
  if method == 'linear probe':
    return

  def size(tree):
    pair = tree['layers'][0]['query']
    return float(jnp.linalg.norm(pair['lora_a'] @ pair['lora_b']))

  if method == 'published_prism':  # It has no decay.
    assert size(decayed) == size(plain)
  else:
    assert size(decayed) < size(plain)
  moved = not np.array_equal(
    plain['layers'][0]['query']['lora_a'],
    start['layers'][0]['query']['lora_a'],
  )
  assert moved == (method != 'ffa')


@pytest.mark.parametrize('size', [1e-3, 0.7, 40.0])
def test_head_and_adapters_are_clipped_apart_to_norm_one_together(size):
  def norms(tree):
    return {name: float(optax.tree.norm(tree[name])) for name in tree}

  gradient = jax.tree.map(lambda x: size * x, params())
  before = norms(gradient)
  clipped = recipes.coordinates('dp-adamw', params(), 0.36)(gradient)
  after = norms(clipped)
  for name, bound in (('head', 0.6), ('layers', 0.8)):
    assert after[name] == pytest.approx(min(before[name], bound), rel=1e-6)
  same = recipes.coordinates('dp-adamw', params())(gradient)
  jax.tree.map(np.testing.assert_array_equal, same, gradient)


def test_the_head_has_a_rate_of_its_own():
  def moved(head_rate):
    tx = recipes.optimizer(
      'dp-adamw', Knobs(0.1, 0.0, 0.0, head_rate), 0.0, 4, jax.random.key(1)
    )
    return tx.update(params(), tx.init(params()), params())[0]

  plain, slow = moved(1.0), moved(0.25)
  np.testing.assert_allclose(
    slow['head']['kernel'], plain['head']['kernel'] / 4, rtol=1e-6
  )
  jax.tree.map(np.testing.assert_array_equal, slow['layers'], plain['layers'])


def test_a_new_field_that_changes_nothing_has_no_name():
  """Results from before it are found."""
  old = Recipe('prism', 'sst2')
  assert old.name == Recipe('prism', 'sst2', head_rate=1.0, head_share=0.0).name
  others = {'head_rate': 0.5}, {'head_share': 0.5}, {'seed': 1}
  names = [dataclasses.replace(old, **x).name for x in others]
  assert len({old.name, *names}) == 4


def made_up(recipe, bonus):
  gain = sum(getattr(recipe, k) == v for k, v in bonus.items())
  return 0.5 + 0.1 * gain - abs(np.log10(recipe.rate / 3e-2)) / 10


def test_defaults_are_compared_at_their_best_rates():
  todo = defaults.wanted(['sst2'])
  runs = {
    equal_tuning.key(x, False): {'accuracy': made_up(x, {'b1': 0.5})}
    for x in todo
  }
  lines = defaults.table(runs, ['sst2', 'clinc150']).splitlines()
  # A task that is not finished is not in it.
  assert lines[0] == '| b1 | decay | sst2 | mean |'
  assert '| 0.5 | 0.1 | 0.0 (rate 0.03) | 0.0 |' in lines
  assert '| 0.9 | 0.1 | -10.0 (rate 0.03) | -10.0 |' in lines


def test_short_experiments_compare_the_same_seeds():
  bonus = {'batch': 512}
  runs = {
    equal_tuning.key(x, False): {'accuracy': made_up(x, bonus) + x.seed / 1000}
    for change in ('as it is', 'batch 512, 30 steps')
    for recipes_ in short_experiments.recipes_of('sst2', change).values()
    for x in recipes_
  }
  lines = short_experiments.table(runs, ['sst2']).splitlines()[2:]
  assert len(lines) == 2
  assert lines[0].startswith('| sst2 | as it is | 0.03 |')
  assert lines[1].endswith('| +10.0 ± 0.0 |')


@pytest.mark.slow
def test_a_recipe_trains(monkeypatch):
  """Through releases, micro-batches and scores, on made-up sentences."""
  rng = np.random.default_rng(0)
  labels = rng.integers(2, size=320)
  tokens = rng.normal(size=(320, 4, 384)) + 2 * labels[:, None, None]
  rows = np.float16(tokens), np.full(320, 4, np.int32), labels
  parts = [problems.take(rows, np.arange(i, j)) for i, j in
           ((0, 200), (200, 260), (260, 320))]  # fmt: skip
  layer = encoded_text.make_layer(0)
  frozen = {'layers': [plain_layers.weights_of(layer)]}

  def problem(task, length, top, probing, *_):
    del task, length, top
    found = parts
    if probing:
      found = [(np.float32(x[0].mean(1)), *x[1:]) for x in parts]
    return problems.Problem(*found, frozen, encoded_text.row_losses, 2)

  monkeypatch.setattr(recipe_runs.problems, 'problem', problem)
  monkeypatch.setattr(recipe_runs, 'noise_multiplier', lambda *_: 0.5)
  recipe_runs.given.cache_clear()
  recipe = Recipe(
    'prism', 'sst2', 0.03, steps=3, batch=100, metric='mean', seed=1
  )
  result = recipe_runs.execute(recipe, 'data', 'cache', True)
  recipe_runs.given.cache_clear()
  assert result['rows'] == 60
  right = np.unpackbits(np.frombuffer(bytes.fromhex(result['right']), np.uint8))
  assert right[:60].mean() == pytest.approx(result['accuracy'])
