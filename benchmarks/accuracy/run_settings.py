"""The description of one run of the utility benchmark."""

import dataclasses
import hashlib
import json
from typing import Any


@dataclasses.dataclass(frozen=True)
class Run:
  """All that a result depends on.

  Attributes:
    method: Key of ``methods.METHODS``.
    rate: Peak learning rate; it falls linearly to zero.
    epsilon: What the run may spend at delta 1e-5; None trains without clip and
      noise.
    seed: Seed of initial factors, batches and noise.
    task: Key of ``problems.TASKS``, or ``'maths'``: next tokens of gsm8k and
      mawps.
    rows: Size of the private set, the first of a fixed shuffle; 0 for all.
    steps: Number of updates.
    batch: Expected batch size.
    clip: C, the largest norm of one example's gradient.
    rank: Rank of every adapter.
    initialization: ``'default'`` (A random, B zero), ``'spectral'`` (the
      largest singular directions, taken out of the frozen weights) or
      ``'balanced'`` (both random, small).
    scale: alpha / r of the model.
    gauge: Condition number of the gauge in which the start is written.
    head: ``'frozen'`` at random (a task that the adapters must solve; the
      linear probe's is trained), or ``'trained'`` beside the adapters.
    temperature: Factor of a classifier's logits.
    top_layers: Number of layers that carry adapters.
    length: Tokens of a row.
    options: More arguments of ``prism``, as sorted pairs.
    public_test: Whether the rows that are reported are the public validation
      split: to be looked at once, at the end.
  """

  method: str
  rate: float
  epsilon: float | None
  seed: int
  task: str = 'sst2'
  rows: int = 0
  steps: int = 120
  batch: int = 256
  clip: float = 1.0
  rank: int = 8
  initialization: str = 'default'
  scale: float = 1.0
  gauge: float = 1.0
  head: str = 'frozen'
  temperature: float = 10.0
  top_layers: int = 1
  length: int = 20
  options: tuple[tuple[str, Any], ...] = ()
  public_test: bool = False

  @property
  def name(self) -> str:
    """The name of the file of its result, another one for each run."""
    fields = dataclasses.asdict(self)
    if not self.public_test:  # It came later: the names of files stay.
      del fields['public_test']
    text = json.dumps(fields, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
