"""Times and memory."""

from collections.abc import Iterator
from typing import Any

from tests.docs.claims.data import stored
from tests.docs.claims.register import Claim, lines, of

Row = list[object]


def _ms(x: float) -> str:
  return f'{x:.1f}' if x < 10 else f'{x:.0f}'


def _update(threads: str, workload: str, method: str) -> dict[str, Any]:
  found = stored('update_time_cpu')['threads'][threads]
  return found['workloads'][workload][method]


@of('update')
def _():
  columns = [(w, t) for w in ('small', 'large') for t in ('1', '2')]
  names = {'adamw': 'AdamW', 'noise + adamw': 'noise + AdamW'}
  rows: list[Row] = [
    [text, *(_ms(_update(t, w, name)['median']) for w, t in columns)]
    for name, text in (names | {'prism': '`prism`'}).items()
  ]
  over = [f'{_update(t, w, "prism")["to noise + adamw"]:.2f}'
          for w, t in columns]  # fmt: skip
  rows.append(['`prism` over noise + AdamW', *over])
  return lines(
    ['', 'small, 1 core', 'small, 2 cores', 'large, 1 core', 'large, 2 cores'],
    rows,
  )


def scaling(threads: str, kind: str) -> list[tuple[int, float]]:
  """(modules, rank or width; time of `prism` over noise and AdamW)."""
  found = stored('update_time_cpu')['threads'][threads]['scaling'][kind]
  return [
    (row[kind], row['prism']['median'] / row['noise + adamw']['median'])
    for row in found
  ]


def _scaling(kind: str, head: str):
  rows: list[Row] = []
  for threads, text in (('1', 'one core'), ('2', 'two cores')):
    rows.append([text, *(f'{x:.1f}' for _, x in scaling(threads, kind))])
  return lines([head, *(str(n) for n, _ in scaling('1', kind))], rows)


@of('update-modules')
def _():
  return _scaling('modules', 'modules (384 x 384, rank 8)')


@of('update-ranks')
def _():
  return _scaling('rank', 'rank (24 modules of 384 x 384)')


@of('huge-pages')
def _():
  found = stored('update_time_cpu')
  rows: list[Row] = []
  for name, text in {
    'adamw': 'AdamW',
    'noise + adamw': 'noise + AdamW',
    'prism': '`prism`',
    'prism with clip': '`prism` with its clip',
  }.items():
    rows.append([text])
    for workload in ('small', 'large'):
      for threads in '12':
        after, before = (
          x['threads'][threads]['workloads'][workload][name]['median']
          for x in (found['huge pages'], found)
        )
        rows[-1].append(f'{after / before:.2f}')
  return lines(
    ['', 'small, 1 core', 'small, 2 cores', 'large, 1 core', 'large, 2 cores'],
    rows,
  )


@of('chains')
def _():
  chains = stored('update_time_cpu')['chains']
  names = {
    'prism_optax.chain': '`prism_optax.chain`',
    'optax.chain': '`optax.chain`',
    "optax.chain, optax's rate": "`optax.chain`, with optax's"
    ' `scale_by_learning_rate`',
    'noise as floats': 'noise as floats, not exact',
    'row scales': 'with `contrib.scale_by_row_moments`',
    'prism with clip': 'with the clip of 32 or 4 examples in front',
  }
  return lines(
    ['', 'small', 'large'],
    [
      [text, *(f'{chains[w][name]["to prism"]:.2f}' for w in chains
               if w != 'environment')]
      for name, text in names.items()
    ],
  )  # fmt: skip


@of('steps')
def _():
  ranks = stored('step_time_cpu')['ranks']
  names = {
    'adamw, not private': 'AdamW, not private',
    'dp-adamw': 'DP-AdamW (clip of jax-privacy)',
    'prism': '`prism`, clip of jax-privacy',
    'prism, clip in the chain, vmap': '`prism`, its own clip',
    'prism, clip in the chain, one backward': '`prism`, its own clip, one'
    ' backward pass',
    'dp-adamw, clip in the chain, vmap': 'DP-AdamW, clip of optax',
    'dp-adamw, clip in the chain, one backward': 'DP-AdamW, clip of optax, one'
    ' backward pass',
    'dp-muon': '`dp_muon`, clip of jax-privacy',
  }
  rows: list[Row] = []
  for name, text in names.items():
    at = {rank: found['methods'][name] for rank, found in ranks.items()}
    rows.append([text, f'{at["8"]["median"]:.0f}'])
    rows[-1] += [f'{at[rank]["to dp-adamw"]:.2f}' for rank in at]
    rows[-1] += [f'{at[r]["temporary megabytes"]:.0f} MB' for r in ('8', '64')]
  return lines(
    ['', 'rank 8', 'over DP-AdamW', 'rank 32', 'rank 64',
     'temporary memory, rank 8', 'rank 64'],
    rows,
  )  # fmt: skip


@of('decoder')
def _():
  ranks = stored('decoder_step_time_cpu')['ranks']
  rows: list[Row] = [
    [text, *(f'{found[name]["to dp-adamw"]:.2f}' for found in ranks.values())]
    for name, text in (
      ('adamw, not private', 'AdamW, not private'),
      ('prism', '`prism`'),
      ('dp-muon', '`dp_muon`'),
    )
  ]
  rows.append(['temporary memory, DP-AdamW / `prism`'])
  for found in ranks.values():
    pair = (found[x]['temporary megabytes'] for x in ('dp-adamw', 'prism'))
    rows[-1].append(' / '.join(f'{x:.0f}' for x in pair) + ' MB')
  return lines(['', *(f'rank {rank}' for rank in ranks)], rows)


@of('make-private')
def _():
  found = stored('make_private_cpu')
  both = found['digits']['steps'], found['minilm']['steps']
  rows: list[Row] = []
  for name, text in (
    ('vmap', 'gradients by vmap'),
    ('one backward', 'one backward pass'),
  ):
    rows.append([text])
    for steps in both:
      step = steps[f'make_private, {name}']
      time = step['median']
      took = f'{time:.1f} ms' if time < 100 else f'{time / 1000:.1f} s'
      rows[-1].append(f'{step["to by hand"]:.2f} ({took})')
  draws = [f'{steps["a draw"]["median"]:.1f} ms' for steps in both]
  rows.append(['a draw of a batch, beside that', *draws])
  return lines(
    ['', 'digits, 128 rows, 200 rounds', 'MiniLM, 32 rows, 12 rounds'], rows
  )


@of('micro-batches')
def _():
  found = stored('make_private_cpu')['temporary megabytes']
  rows: list[Row] = [
    [text, *(f'{x:.0f} MB' for x in found[name].values())]
    for name, text in (
      ('vmap', 'by vmap'),
      ('one backward', 'one backward pass'),
    )
  ]
  return lines(['rows at once', *found['vmap']], rows)


@of('lowered')
def _():
  targets = {'h200': 'H200', 'tpu': 'TPU v5e'}
  modules = {
    'small': '24 of 384 x 384, rank 8',
    'large': '60 large, rank 16',
    'gemma': '180 as in Gemma 3 4B',
    'gemma, stacked': '180 as in Gemma 3 4B, stacked',
  }
  methods = {'noise + adamw': 'noise + AdamW', 'prism': '`prism`'}
  found = {
    tuple(row[x] for x in ('target', 'modules', 'method')): row
    for row in stored('lowered')['rows']
  }
  rows = []
  for target, where in targets.items():
    for name, what in modules.items():
      for method, text in methods.items():
        row = found.get((target, name, method))
        if row:
          names = 'launches', 'conditionals', 'solvers', 'loops'
          counts = [row[x] for x in names]
          rows.append(
            [where, what, text, *counts, f'{row["compile seconds"]:.0f}']
          )
  return lines(
    ['for', 'modules', '', 'launches', 'branches', 'SVD and eigh', 'loops',
     'compiling, s'],
    rows,
  )  # fmt: skip


@of('stacked')
def _():
  found = {tuple(row.values())[:3]: row for row in stored('lowered')['rows']}

  def cells(target, method, name):
    pair = (found[target, x, method][name] for x in ('gemma', 'gemma, stacked'))
    return [f'{x:.0f}' for x in pair]

  rows = [
    [text + where, *cells(target, method, 'compile seconds')]
    for method, text in (('prism', '`prism`'), ('noise + adamw', 'AdamW'))
    for target, where in (
      ('cpu', ': seconds to compile for a CPU'),
      ('h200', ': for an H200'),
    )
  ]
  kernels = cells('h200', 'prism', 'launches')
  rows.insert(2, ['`prism`: kernels on an H200', *kernels])
  return lines(['', 'a pair of leaves each', 'stacked'], rows)


@of('language-model-memory')
def _():
  found = stored('language_model_memory_cpu')
  step, process = (
    found[f'{x} megabytes{y}']
    for x, y in (('temporary', ' of a step'), ('peak resident', ''))
  )
  rows: list[Row] = [
    [text, f'{step[name]:.0f} MB', f'{process[name]:,} MB']
    for name, text in (
      ('not private', 'LoRA, not private'),
      ('dp-adamw', '`dp-adamw`'),
      ('prism', '`prism`'),
    )
  ]
  return lines(['', 'a step', 'the process'], rows)


@of('large-models')
def _():
  found = stored('language_model_memory_table')['rows']
  batches = 1, 2, 4, 8
  rows = []
  for model in ('llama-3.2-1b', 'qwen2.5-3b', 'llama-3.1-8b'):
    for rank in (8, 16):
      at_rank = [x for x in found if (x['model'], x['rank']) == (model, rank)]
      one = at_rank[0]
      temporary = {x['micro-batch']: x['temporary GB'] for x in at_rank}
      rows.append(
        [model, rank, f'{one["trained, millions"]:.1f} M',
         f'{one["frozen GB"]:.1f}', f'{one["state GB"]:.2f}',
         *(f'{temporary[size]:.1f}' for size in batches)]
      )  # fmt: skip
  temporaries = [f'temporary, {size}' for size in batches]
  return lines(
    ['model', 'rank', 'trained', 'weights', 'state', *temporaries], rows
  )


def sentences() -> Iterator[Claim]:
  few = [x for _, x in scaling('1', 'modules')[:2]]
  rank = scaling('1', 'rank')[-1][1]
  yield (
    'one module takes {:.1f} times as long on one core, six take {:.1f}, and'
    ' rank 64 takes {:.1f} times as long',
    (*few, rank),
  )
  found = stored('update_time_cpu')
  rows = found['threads']['1']['scaling']['modules']
  compiling = [
    rows[i][method]['compile seconds']
    for method in ('prism', 'noise + adamw')
    for i in (4, 1)
  ]
  yield (
    '{:.1f} s for 180 and {:.1f} s for 6 on one core; for noise and AdamW it is'
    ' {:.1f} s and {:.1f} s',
    tuple(compiling),
  )
  chains = [found['chains'][w]['prism']['median'] for w in ('small', 'large')]
  yield '`prism` itself {:.1f} and {:.0f} ms', tuple(chains)
  noise = stored('step_time_noise_cpu')['methods']
  yield (
    '{:.2f} with gradients by vmap, {:.2f} from one backward pass',
    (
      noise['exact, vmap']['to vmap'],
      noise['exact, one backward']['to one backward'],
    ),
  )
  at = stored('step_time_cpu')['ranks']['64']['methods']
  yield (
    'takes {:.0f} MB where DP-AdamW takes {:.0f} MB; with'
    " jax-privacy's clip it takes {:.0f} MB",
    tuple(
      at[name]['temporary megabytes']
      for name in ('prism, clip in the chain, vmap', 'dp-adamw', 'prism')
    ),
  )
  private = [
    x['to adamw']
    for name, x in stored('step_time_cpu')['ranks']['8']['methods'].items()
    if name != 'adamw, not private'
  ]
  yield (
    'MiniLM at rank 8 take {:.2f} to {:.2f} times as long',
    (min(private), max(private)),
  )
  memory = stored('language_model_memory_cpu')
  of_step = memory['temporary megabytes of a step']
  yield (
    'needs {:.0f} MB beside its weights without privacy, {:.0f} MB with'
    ' `dp-adamw` and {:.0f} MB with `prism`',
    tuple(of_step[x] for x in ('not private', 'dp-adamw', 'prism')),
  )
  yield (
    'With `dp-adamw` a step needs {:.0f} MB more',
    (of_step['dp-adamw'] - of_step['not private'],),
  )
  yield (
    'reading the model alone takes {:,} MB of it',
    (memory['peak resident megabytes']['model read'],),
  )
