"""Accuracy at equal privacy: MiniLM and a language model."""

import statistics
from collections.abc import Iterator

from benchmarks.accuracy import language_tables, utility_tables
from benchmarks.accuracy.sentences import DEFAULTS
from benchmarks.common import runner
from tests.docs.claims import data
from tests.docs.claims.data import short, stored
from tests.docs.claims.register import Claim, lines, of

METHOD = {
  'prism': '`prism`',
  'dp-adamw': 'DP-AdamW',
  'lora+': 'LoRA+',
  'prism, paper mode': '`published_prism`',
  'linear probe': 'linear probe',
  'ffa': 'FFA-LoRA',
  'prism, decayed': '`prism`, weight decay 1',
  'dp-adamw, decayed': 'DP-AdamW, weight decay 1, warm-up',
}


@of('utility')
def _():
  parts = [data.utility(f'SST-2, epsilon {e}') for e in (3, 6)]
  rows = []
  for name, text in METHOD.items():
    row = [text]
    for part in parts:
      accuracy = short(part[name].accuracy, 4)
      best = part[name].accuracy == max(x.accuracy for x in part.values())
      row += [f'**{accuracy}**' if best else accuracy, part[name].against()]
    rows.append(row)
  head = ['', 'epsilon 3', '`prism` minus it', 'epsilon 6', '`prism` minus it']
  return lines(head, rows)


@of('equal-tuning')
def _():
  store = runner.Store(data.RESULTS / 'accuracy.json', DEFAULTS)
  return utility_tables.equal_table(store.find).split('\n')


def _of_part(part: str) -> None:
  """The table of a part, on the page of its own."""
  of(f'accuracy-{part}')(
    lambda: utility_tables.table(stored('accuracy_compared'), part).split('\n')
  )


for _part in (*utility_tables.TITLES, 'lower-rate'):
  _of_part(_part)


@of('accuracy-nuisances')
def _():
  return _by_change('nuisances')


@of('accuracy-options')
def _():
  return _by_change('options')


@of('accuracy-other-rates')
def _():
  return _by_change('other-rates')


def _by_change(part: str) -> list[str]:
  spread = {} if part == 'other-rates' else data.varied(part)[data.SPREAD]
  ranges = [
    {'part': part, 'change': data.SPREAD, 'method': method, 'points': x}
    for method, x in spread.items()
  ]
  return utility_tables.by_change(
    [*stored('accuracy_compared'), *ranges],
    part,
    lambda found: f'{found[0]["points"]:+.2f}',
  ).split('\n')


@of('accuracy-transfer')
def _():
  return utility_tables.by_change(
    stored('accuracy_compared'),
    'transfer',
    lambda found: ' / '.join(f'{x["accuracy"]:.3f}' for x in found),
  ).split('\n')


@of('elsewhere')
def _():
  names = ('prism', 'dp-adamw', 'lora+', 'dp-adamw, decayed')
  titles = {
    'SST-2, epsilon 1': 'SST-2, epsilon 1',
    'SST-2, not private': 'SST-2, not private',
    'SST-2, 10,000 rows, epsilon 3': 'SST-2, 10,000 rows, epsilon 3',
    'SST-2, 2,000 rows, epsilon 3': 'SST-2, 2,000 rows, epsilon 3',
    'clinc150 domains, epsilon 3': 'clinc150 domains, epsilon 3',
    'banking77, epsilon 3': 'banking77, epsilon 3',
    'Next tokens of gsm8k and mawps, epsilon 3': 'words of problems, epsilon 3',
  }
  rows = []
  for title, text in titles.items():
    part = data.utility(title)
    rows.append([text])
    for name in names:
      found = part.get(name)
      rows[-1].append(found.beside() if found else '')
  return lines(
    ['', '`prism`', 'DP-AdamW', 'LoRA+', 'DP-AdamW, decay 1, warm-up'], rows
  )


@of('nuisances')
def _():
  found = data.varied('nuisances')
  names = {
    'prism': '`prism`',
    'prism, decayed': '`prism`, weight decay 1',
    'dp-adamw': 'DP-AdamW',
    'dp-adamw, decayed': 'DP-AdamW, weight decay 1, warm-up',
    'lora+': 'LoRA+',
  }
  changes = {
    'gauge=100.0': 'factorisation of condition 100',
    'scale=0.25': 'alpha / r of 0.25',
    'scale=4.0': 'alpha / r of 4',
    'rank=4': 'rank 4',
    'rank=32': 'rank 32',
    'start=balanced': 'balanced start',
    'start=spectral': 'spectral start',
    'rate / 3': 'a third of the rate',
    'rate * 3': 'three times the rate',
  }
  rows = [
    [text, *(f'{found[change][name]:+.2f}' for name in names)]
    for change, text in changes.items()
  ]
  spread = found[data.SPREAD]
  rows.append(['largest minus smallest', *(f'{spread[x]:.2f}' for x in names)])
  return lines(['change', *names.values()], rows)


# Runs of the language model that are no longer than this are the short ones.
SHORT = 24


def _language_model(*, short: bool) -> list[dict]:
  return [x for x in stored('language_model')
          if (x.get('steps', SHORT) <= SHORT) == short]  # fmt: skip


@of('language-model')
def _():
  rows = _language_model(short=True)
  return language_tables.table(rows, finished_only=True).split('\n')


@of('language-model-long')
def _():
  rows = _language_model(short=False)
  return language_tables.table(rows, finished_only=True).split('\n')


@of('heads')
def _():
  found = stored('private_heads_cpu')
  tasks = {'sst2': 'SST-2', 'clinc150': 'clinc150', 'banking77': 'banking77'}
  of_ridge = [row for row in found if row['method'] == 'ridge']
  costs = {row['noise multiplier']: row['epsilon'] for row in of_ridge}
  rows = []
  for task, text in tasks.items():
    for method in ('ridge', 'class means'):
      mine = {
        row['noise multiplier']: row
        for row in found
        if (row['task'], row['method']) == (task, method)
      }
      first = mine[0.0]
      about = f'{text} ({first["private rows"]:,} rows of {first["classes"]})'
      about = about if method == 'ridge' else ''
      cells = (short(mine[sigma]['accuracy'], 3) for sigma in costs)
      rows.append([about, method, *cells])
  heads = [
    'no noise' if cost is None else f'noise {sigma:g}, epsilon {cost:.2f}'
    for sigma, cost in costs.items()
  ]
  return lines(['', '', *heads], rows)


def sentences() -> Iterator[Claim]:
  yield from _utility()
  yield from _margins()
  rows = _language_model(short=True)
  private = {row['task']: row['private rows'] for row in rows}
  yield (
    'with {:,} private rows of SST-2, {:,} of banking77, {:,} of mawps and {:,}'
    ' of gsm8k',
    tuple(private[task] for task in ('sst2', 'banking77', 'mawps', 'gsm8k')),
  )
  found = language_tables.groups(rows)
  yield (
    'on SST-2 it labels {:.0f} and {:.0f} in a hundred rows more than DP-AdamW',
    tuple(
      100
      * language_tables.compared(methods, language_tables.exact, 'prism+rows')[
        'difference'
      ]
      for epsilon in (8.0, 3.0)
      for (task, *_, each), methods in found.items()
      if (task, each) == ('sst2', epsilon)
    ),
  )
  # Of tasks and epsilons in few steps.
  (behind,) = (
    language_tables.compared(methods, language_tables.losses, 'prism')[
      'difference'
    ]
    for (task, *_, epsilon), methods in found.items()
    if (task, epsilon) == ('banking77', 8.0)
  )
  yield (
    'On banking77 in 24 steps DP-AdamW leads by {} nats',
    (short(behind, 2),),
  )
  yield from _longer()
  sizes = {
    row['task'] == 'gsm8k': (row.get('steps', SHORT), row.get('batch', 256))
    for row in rows
  }
  yield (
    '{} steps of {} expected rows, of gsm8k {} of {}.',
    (*sizes[False], *sizes[True]),
  )


def _longer() -> Iterator[Claim]:
  rows = _language_model(short=False)
  found = {
    (task, steps, epsilon): methods
    for (task, steps, *_, epsilon), methods in language_tables.groups(
      rows
    ).items()
  }

  def ahead(task: str, steps: int, method: str) -> tuple[float, ...]:
    nats, right = (
      language_tables.compared(found[task, steps, 8.0], values, method)
      for values in (language_tables.losses, language_tables.exact)
    )
    return (
      -nats['difference'], nats['p'], 100 * right['difference'], right['p']
    )  # fmt: skip

  yield (
    'ahead of DP-AdamW by {:.2f} nats (p = {:.2f} over five seeds) and by'
    ' {:.1f} in a hundred rows (p = {:.2f}), and with them it labels {:.1f}'
    ' fewer',
    (*ahead('sst2', 240, 'prism'), -ahead('sst2', 240, 'prism+rows')[2]),
  )
  _, p, _, q = ahead('sst2', 240, 'prism')
  yield (
    '`prism` has {:.1f} % right, DP-AdamW {:.1f}, each tuned (five seeds, p ='
    ' {:.2f}; by perplexity {:.2f})',
    (
      *(
        100
        * statistics.mean(
          float(language_tables.exact(row).mean())
          for row in found['sst2', 240, 8.0][method]
        )
        for method in ('prism', 'dp-adamw')
      ),
      q,
      p,
    ),
  )
  nats, p, right, q = ahead('banking77', 96, 'prism+rows')
  yield (
    'row scales lead by {:.2f} nats and {:.1f} in a hundred rows, but with p ='
    ' {:.2f} and {:.2f}',
    (nats, right, p, q),
  )
  yield (
    'tuning run of 240 steps has a perplexity of {:.2f}',
    tuple(
      row['tuning perplexity']
      for row in rows
      if (row['task'], row.get('steps')) == ('banking77', 240)
    ),
  )


def _utility() -> Iterator[Claim]:
  three = {
    name: statistics.mean(found[seed] for seed in range(3))
    for name, found in {
      'none': data.accuracies(
        'prism', rate=0.1, options=[['weight_decay', 0.0]]
      ),
      'prism': data.accuracies('prism', rate=0.1),
      'dp-adamw': data.accuracies('dp-adamw', rate=0.03),
    }.items()
  }
  without, default, adamw = (short(x, 4) for x in three.values())
  yield (
    'decay `prism` falls from {} to {} (first three seeds, epsilon 3, at the'
    " same rate), level with DP-AdamW's {}.",
    (default, without, adamw),
  )
  banking = data.utility('banking77, epsilon 3')['dp-adamw']
  yield (
    'On banking77 the {:.1f} points have p = {}',
    (100 * banking.difference, short(banking.p, 3)),
  )
  words = data.utility('Next tokens of gsm8k and mawps, epsilon 3')['dp-adamw']
  yield "DP-AdamW's lead there has p = {}", (short(words.p, 3),)
  rest = data.utility('SST-2, epsilon 3, other methods')
  for text, method, digits in (
    ('DP-Muon on the full matrices {},', 'dp-muon', 4),
    ('correlated noise {},', 'prism, correlated noise', 4),
    ('LoRA-RITE from a spectral start {}', 'lora-rite, spectral start', 4),
    ('it only guesses: {}', 'lora-rite', 3),
    ('DP-AdamBC {},', 'dp-adambc', 4),
    ("`prism` with Muon's direction {};", 'prism, muon', 4),
    ('LAMB {}', 'lamb', 4),
  ):
    yield text, (short(rest[method].accuracy, digits),)
  lower = data.utility('lower-rate')
  ours, theirs = lower['prism'], lower['dp-adamw']
  yield (
    '`prism` has {} and DP-AdamW {} (p = {}, five seeds)',
    (short(ours.accuracy, 4), short(theirs.accuracy, 4), short(theirs.p, 3)),
  )


def _margins() -> Iterator[Claim]:
  """Of the page on differences."""
  parts = [f'SST-2, epsilon {e}' for e in (1, 3, 6)]
  parts += ['clinc150 domains, epsilon 3', 'banking77, epsilon 3']
  found = {part: data.utility(part) for part in parts}
  margins = [100 * found[x]['dp-adamw'].difference for x in parts]
  yield (
    'it is {:.1f}, {:.1f} and {:.1f} points on SST-2 at epsilon 1, 3 and 6,'
    ' {:.1f} on the domains of clinc150 and {:.1f} on banking77 at epsilon 3,'
    ' the last with p = {}',
    (*margins, short(found[parts[-1]]['dp-adamw'].p, 3)),
  )
  yield (
    'and {:.1f} and {:.1f} on SST-2 at epsilon 3 and 6 over the published',
    tuple(
      100 * found[part]['prism, paper mode'].difference for part in parts[1:3]
    ),
  )
  words = data.utility('Next tokens of gsm8k and mawps, epsilon 3')['dp-adamw']
  yield (
    'word problems it is {:.1f} points, with p = {}',
    (100 * words.difference, short(words.p, 3)),
  )
  decayed = [
    -100 * row['dp-adamw, decayed'].difference
    for row in [*found.values(), data.utility('SST-2, 2,000 rows, epsilon 3')]
  ]
  yield (
    'is between {:.1f} points below and {:.1f} above `prism`',
    (-min(decayed), max(decayed)),
  )
