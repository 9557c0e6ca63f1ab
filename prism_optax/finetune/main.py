"""The program ``prism-optax``: its commands, and how it ends."""

import argparse
import sys
from collections.abc import Callable, Sequence


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line; returns its exit status."""
  argv = sys.argv[1:] if argv is None else list(argv)
  try:
    from absl import logging

    # The libraries' warnings; what concerns the user is printed.
    logging.set_verbosity(logging.ERROR)
    run(argv)
  except KeyboardInterrupt as stop:
    # With words of its own, or before the first step, or for the second time.
    message = str(stop) or 'Stopped. Go on with --resume if a run has begun.'
    print(f'\n{message}', file=sys.stderr)
    return 130
  except ModuleNotFoundError as error:
    package = (error.name or str(error)).partition('.')[0]
    message = f'{package} is missing: pip install "prism-optax[finetune]"'
  except (ValueError, OSError) as error:
    message = str(error)
  else:
    return 0
  print(f'error: {message}', file=sys.stderr)
  return 2


def run(argv: Sequence[str]) -> None:
  """Runs a command; JAX is imported after the options have been read."""
  from . import command_line, options

  used = command_line.parse(argv)
  command: Callable[[argparse.Namespace], None]
  if used.command == 'train':
    used = options.resolve(used)
    from .train import train as command
  elif used.command == 'plan':
    from .planning import plan as command
  elif used.command == 'predict':
    from .answers import predict as command
  elif used.command == 'chat':
    from .answers import talk as command
  elif used.command == 'export':
    from .exporting import export as command
  elif used.command == 'report':
    from .report import report as command
  elif used.command == 'check-data':
    from .checking import check_data as command
  else:
    from .audit import audit as command
  command(used)
