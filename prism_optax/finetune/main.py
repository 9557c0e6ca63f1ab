"""\
usage: prism-optax COMMAND [options]

  train       adapts a model to private rows, or goes on with a run
  predict     labels, or answers, the rows of a file
  chat        talks with a language model, adapted or as it was
  export      writes the result for other programs, with a model card
  report      writes one HTML page about runs
  check-data  counts what of a private file can be used
  audit       proves a lower bound of a run's epsilon, by planted records
  COMMAND --help lists the options.

  prism-optax train
      Pretrains a small vision transformer on public digits, adapts it to
      private ones, and compares PRISM, DP-AdamW and a run without privacy.
  prism-optax train --data train.jsonl --eval public.jsonl \\
      --target-epsilon 6 --delta 1e-5 --output runs/mine
      Fine-tunes all-MiniLM-L6-v2 on rows with `text` and `label`.
  prism-optax train --task instruct --model smollm2 ...
      Fine-tunes a language model on rows with `prompt` and `response`.
  prism-optax train --output runs/mine --resume
      Goes on after an interruption: the same parameters, bit for bit, as if
      there had been none.

What is private: one row of --data, under adding or removing it, with batches
drawn by Poisson sampling. What is not: the number of rows (--dataset-size is
a declared constant), the evaluation file, the options, how long a step takes
with --skip-padding, and several rows of one person together.

In --output: adapter.safetensors, metrics.jsonl, summary.json and options.json
may be published. checkpoints_secret/, which is there while the run lasts and
holds the noise key, and nonprivate_* may not.
"""

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

  used = command_line.parse(argv, __doc__ or '')
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
    from . import report_page

    report_page.report(used)
  elif used.command == 'check-data':
    from . import checking

    checking.check_data(used)
  else:
    from . import audit

    audit.audit(used)
