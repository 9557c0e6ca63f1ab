"""The program ``prism-optax``: its commands, and how it ends."""

import sys
from collections.abc import Sequence


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
    print(
      f'error: {package} is missing: pip install "prism-optax[finetune]"',
      file=sys.stderr,
    )
    return 2
  except (ValueError, OSError) as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  return 0


def run(argv: Sequence[str]) -> None:
  """Runs a command; JAX is imported after the options have been read."""
  from . import command_line, options

  used = command_line.parse(argv)
  if used.command == 'train':
    resolved = options.resolve(used)
    from . import train

    train.train(resolved)
  elif used.command == 'plan':
    from . import planning

    planning.plan(used)
  elif used.command in ('predict', 'chat'):
    from . import answers

    (answers.predict if used.command == 'predict' else answers.talk)(used)
  elif used.command == 'export':
    from . import exporting

    exporting.export(used)
  elif used.command == 'report':
    from . import report

    report.report(used)
  elif used.command == 'check-data':
    from . import checking

    checking.check_data(used)
  else:
    from . import audit

    audit.audit(used)
