"""Equal tuning: what is chosen, from which runs; every method makes a step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.accuracy import (
  encoded_text,
  equal_tuning,
  plain_layers,
  problems,
  recipe_runs,
  recipes,
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
