"""``python -m prism_optax.finetune``, the same as ``prism-optax``."""

import sys

from prism_optax.finetune.main import main

if __name__ == '__main__':
  sys.exit(main())
