"""``prism-optax plan``: steps, batch and noise, as a table and a picture."""

import argparse
from typing import Any

from matplotlib.figure import Figure

from prism_optax import training
from prism_optax.training import _plan


def plan(used: argparse.Namespace) -> None:
  """Prints the advice, and draws it if a picture is asked for.

  Raises:
    ValueError: If hours are given without a speed, or beside gradients.
  """
  gradients, hours = used.example_gradients, used.hours
  if (hours is None) != (used.gradients_per_second is None):
    raise ValueError('--hours and --gradients-per-second: give both or none.')
  if hours is not None:
    if gradients is not None:
      raise ValueError(
        f'--example-gradients {gradients:g} and --hours {hours:g}: give one.'
      )
    gradients = 3600 * hours * used.gradients_per_second
  found = training.plan(
    used.dataset_size,
    target_epsilon=used.target_epsilon,
    delta=used.delta,
    example_gradients=gradients,
    examples_per_user=used.examples_per_user,
  )
  print(found)
  if used.picture is not None:
    _draw(found, used.picture)


def _draw(found: _plan.Plan, path: str) -> None:
  """Signal over noise by cost, one point an alternative."""
  chosen, given = found.chosen, found.arguments
  figure = Figure(figsize=(7, 4), layout='constrained')
  axes = figure.add_subplot()
  small: dict[str, Any] = {'textcoords': 'offset points', 'fontsize': 8}

  def place(x: Any) -> tuple[float, float]:
    return x.example_gradients, x.signal_over_noise

  for steps in sorted({x.steps for x in found.alternatives}):
    group = [x for x in found.alternatives if x.steps == steps]
    places = [*map(place, group)]
    color, offset, side = '0.6', (-6, -3), 'right'
    if steps == chosen.steps:
      color, offset, side = 'C0', (6, -11), 'left'
      costs = sorted(x.example_gradients for x in group)
    for x, at in zip(group, places, strict=True):
      text = f'{x.steps} x {x.expected_batch_size}'
      axes.annotate(text, at, xytext=offset, ha=side, **small)
    axes.plot(*zip(*places, strict=True), marker='o', color=color)
  axes.scatter(*place(chosen), s=200, facecolor='none', edgecolor='C1')
  axes.axhline(found.limit, color='0.3', linestyle=':', linewidth=1)
  everyone = 'all records in every batch'
  axes.annotate(everyone, (costs[0], found.limit), xytext=(0, 3), **small)
  axes.set(
    xscale='log',
    xlim=(costs[0] / 1.3, costs[-1] * 1.9),
    ylim=(0, found.limit * 1.1),
    xlabel='gradients of examples',
    ylabel='signal over noise',
    title=(
      f'Steps x batch, the advice in a circle: epsilon'
      f' {given["target_epsilon"]:g}, {given["dataset_size"]:,} records'
    ),
  )
  axes.set_xticks(costs, [f'{x:,}' for x in costs])
  axes.minorticks_off()
  axes.spines[['top', 'right']].set_visible(False)
  figure.savefig(path, dpi=150)
