"""What the documentation claims, beside the results that it claims them from.

    python -m tests.docs.claims [--write]

Prints what is wrong; ``--write`` renews the tables. See ``check``.
"""

import sys

from tests.docs.claims.check import PAGES, ROOT, problems, renewed, stale


def main() -> None:
  found = []
  for path in PAGES:
    text = path.read_text('utf-8')
    name = path.relative_to(ROOT)
    if '--write' in sys.argv[1:] and renewed(text) != text:
      path.write_text(renewed(text), 'utf-8')
      print('renewed', name)
    found += [f'{name}: {problem}' for problem in problems(path)]
  sys.exit('\n'.join([*found, *stale()]) or None)


if __name__ == '__main__':
  main()
