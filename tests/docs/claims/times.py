"""Times and memory."""

from collections.abc import Iterator
from typing import Any

from tests.docs.claims import data
from tests.docs.claims.data import stored
from tests.docs.claims.register import Claim, lines, of

Row = list[object]


def _ms(x: float) -> str:
  return f'{x:.1f}' if x < 10 else f'{x:.0f}'


def _update(
  threads: int, workload: str, method: str, *, huge_pages: bool = False
) -> dict[str, Any]:
  return data.row(
    'update_time_cpu', threads=threads, workload=workload, method=method,
    chain=None, huge_pages=huge_pages,
  )  # fmt: skip


@of('update')
def _():
  columns = [(w, t) for w in ('small', 'large') for t in (1, 2)]
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


def scaling(
  threads: int, kind: str
) -> list[tuple[int, dict[str, dict[str, Any]]]]:
  """(modules, rank or width; the row of each method)."""
  found: dict[int, dict[str, dict[str, Any]]] = {}
  for row in data.rows('update_time_cpu', threads=threads, axis=kind):
    found.setdefault(row[kind], {})[row['method']] = row
  return list(found.items())


def ratios(threads: int, kind: str) -> list[tuple[int, float]]:
  """The same; time of `prism` over that of noise and AdamW."""
  return [
    (n, row['prism']['median'] / row['noise + adamw']['median'])
    for n, row in scaling(threads, kind)
  ]


def _scaling(kind: str, head: str):
  rows: list[Row] = []
  for threads, text in ((1, 'one core'), (2, 'two cores')):
    rows.append([text, *(f'{x:.1f}' for _, x in ratios(threads, kind))])
  return lines([head, *(str(n) for n, _ in ratios(1, kind))], rows)


@of('update-modules')
def _():
  return _scaling('modules', 'modules (384 x 384, rank 8)')


@of('update-ranks')
def _():
  return _scaling('rank', 'rank (24 modules of 384 x 384)')


@of('huge-pages')
def _():
  rows: list[Row] = []
  for name, text in {
    'adamw': 'AdamW',
    'noise + adamw': 'noise + AdamW',
    'prism': '`prism`',
    'prism with clip': '`prism` with its clip',
  }.items():
    rows.append([text])
    for workload in ('small', 'large'):
      for threads in (1, 2):
        after, before = (
          _update(threads, workload, name, huge_pages=x)['median']
          for x in (True, False)
        )
        rows[-1].append(f'{after / before:.2f}')
  return lines(
    ['', 'small, 1 core', 'small, 2 cores', 'large, 1 core', 'large, 2 cores'],
    rows,
  )


def _chain(workload: str, name: str) -> dict[str, Any]:
  return data.row('update_time_cpu', workload=workload, chain=name)


@of('chains')
def _():
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
      [
        text,
        *(f'{_chain(w, name)["to prism"]:.2f}' for w in ('small', 'large')),
      ]
      for name, text in names.items()
    ],
  )


@of('steps')
def _():
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
    at = {x['rank']: x for x in data.rows('step_time_cpu', method=name)}
    rows.append([text, f'{at[8]["median"]:.0f}'])
    rows[-1] += [f'{at[rank]["to dp-adamw"]:.2f}' for rank in at]
    rows[-1] += [f'{at[r]["temporary megabytes"]:.0f} MB' for r in (8, 64)]
  return lines(
    ['', 'rank 8', 'over DP-AdamW', 'rank 32', 'rank 64',
     'temporary memory, rank 8', 'rank 64'],
    rows,
  )  # fmt: skip


@of('decoder')
def _():
  def of_method(name):
    return data.rows('decoder_step_time_cpu', method=name)

  rows: list[Row] = [
    [text, *(f'{x["to dp-adamw"]:.2f}' for x in of_method(name))]
    for name, text in (
      ('adamw, not private', 'AdamW, not private'),
      ('prism', '`prism`'),
      ('dp-muon', '`dp_muon`'),
    )
  ]
  rows.append(['temporary memory, DP-AdamW / `prism`'])
  for pair in zip(of_method('dp-adamw'), of_method('prism'), strict=True):
    both = ' / '.join(f'{x["temporary megabytes"]:.0f}' for x in pair)
    rows[-1].append(f'{both} MB')
  return lines(['', *(f'rank {x["rank"]}' for x in of_method('prism'))], rows)


@of('make-private')
def _():
  def found(task, step):
    return data.row('make_private_cpu', task=task, step=step)

  tasks = 'digits', 'minilm'
  rows: list[Row] = []
  for name, text in (
    ('vmap', 'gradients by vmap'),
    ('one backward', 'one backward pass'),
  ):
    rows.append([text])
    for task in tasks:
      step = found(task, f'make_private, {name}')
      time = step['median']
      took = f'{time:.1f} ms' if time < 100 else f'{time / 1000:.1f} s'
      rows[-1].append(f'{step["to by hand"]:.2f} ({took})')
  draws = [f'{found(x, "a draw")["median"]:.1f} ms' for x in tasks]
  rows.append(['a draw of a batch, beside that', *draws])
  return lines(
    ['', 'digits, 128 rows, 200 rounds', 'MiniLM, 32 rows, 12 rounds'], rows
  )


@of('micro-batches')
def _():
  rows: list[Row] = []
  for name, text in (
    ('vmap', 'by vmap'),
    ('one backward', 'one backward pass'),
  ):
    found = data.rows('make_private_cpu', step=name)
    cells = (f'{x["temporary megabytes"]:.0f} MB' for x in found)
    rows.append([text, *cells])
  return lines(['rows at once', *(str(x['rows at once']) for x in found)], rows)


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
    for row in stored('lowered')
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
  found = {tuple(row.values())[:3]: row for row in stored('lowered')}

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


def _memory(process: str) -> dict[str, Any]:
  return data.row('language_model_memory_cpu', process=process)


@of('language-model-memory')
def _():
  rows: list[Row] = [
    [
      text,
      f'{_memory(name)["temporary megabytes of a step"]:.0f} MB',
      f'{_memory(name)["peak resident megabytes"]:,} MB',
    ]
    for name, text in (
      ('not private', 'LoRA, not private'),
      ('dp-adamw', '`dp-adamw`'),
      ('prism', '`prism`'),
    )
  ]
  return lines(['', 'a step', 'the process'], rows)


@of('large-models')
def _():
  found = stored('language_model_memory_table')
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
  few = [x for _, x in ratios(1, 'modules')[:2]]
  rank = ratios(1, 'rank')[-1][1]
  yield (
    'one module takes {:.1f} times as long on one core, six take {:.1f}, and'
    ' rank 64 takes {:.1f} times as long',
    (*few, rank),
  )
  rows = scaling(1, 'modules')
  compiling = [
    rows[i][1][method]['compile seconds']
    for method in ('prism', 'noise + adamw')
    for i in (4, 1)
  ]
  yield (
    '{:.1f} s for 180 and {:.1f} s for 6 on one core; for noise and AdamW it is'
    ' {:.1f} s and {:.1f} s',
    tuple(compiling),
  )
  chains = [_chain(w, 'prism')['median'] for w in ('small', 'large')]
  yield '`prism` itself {:.1f} and {:.0f} ms', tuple(chains)
  yield (
    '{:.2f} with gradients by vmap, {:.2f} from one backward pass',
    tuple(
      data.row('step_time_cpu', method=f'exact, {x}')[f'to floats, {x}']
      for x in ('vmap', 'one backward')
    ),
  )
  yield (
    'takes {:.0f} MB where DP-AdamW takes {:.0f} MB; with'
    " jax-privacy's clip it takes {:.0f} MB",
    tuple(
      data.row('step_time_cpu', rank=64, method=name)['temporary megabytes']
      for name in ('prism, clip in the chain, vmap', 'dp-adamw', 'prism')
    ),
  )
  private = [
    x['to adamw']
    for x in data.rows('step_time_cpu', rank=8)
    if 'to adamw' in x and x['method'] != 'adamw, not private'
  ]
  yield (
    'MiniLM at rank 8 take {:.2f} to {:.2f} times as long',
    (min(private), max(private)),
  )
  of_step = {
    x: _memory(x)['temporary megabytes of a step']
    for x in ('not private', 'dp-adamw', 'prism')
  }
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
    (_memory('model read')['peak resident megabytes'],),
  )
