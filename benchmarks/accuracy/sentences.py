"""One private run on text: from a setting to the rows that it gets right.

The top layer of all-MiniLM-L6-v2, or a small decoder (task ``'maths'``), with
adapters on all six matrices of the top layer. Layers below it never change:
what they compute is kept on disk (``encoded_text.py``). And digits, with a
small network.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accuracy import plain_layers, problems
from benchmarks.common import methods, private
from benchmarks.common.runner import Folders
from prism_optax import accounting, lora, training
from prism_optax.contrib import heads

DELTA, MICROBATCH = 1e-5, 32
# Tokens of a row; a picture is one.
LENGTH = {
  'sst2': 20, 'clinc150': 16, 'intents': 16, 'banking77': 20, 'maths': 64,
  'digits': 1,
}  # fmt: skip
# A clip that no gradient reaches, where nothing is private.
NO_CLIP = 1e4


@dataclasses.dataclass(frozen=True)
class Setting:
  """All that a result depends on.

  Attributes:
    task: Key of ``LENGTH``.
    method: One of ``methods.METHODS``.
    rate: At the first step; it falls linearly to zero.
    epsilon: Of everything that reads private rows, at ``DELTA``; None trains
      without a clip and noise.
    seed: Of releases, start, batches and noise.
    rows: Size of the private set, the first of a fixed shuffle; 0 for all.
    steps: Number of steps.
    batch: Expected batch size.
    clip: C.
    rank: Of every adapter.
    start: ``'default'`` (A random, B zero), ``'canonical'`` (the same in the
      gauge of `lora.canonicalize`, which methods on the manifold always have),
      ``'spectral'`` (the largest singular directions) or ``'balanced'`` (both
      random, small).
    scale: alpha / r of the model.
    gauge: Condition number of the gauge in which the start is written.
    head: ``'frozen'`` at random (a task that the adapters must solve; the
      linear probe's is trained), ``'trained'`` from there, or trained from
      ``'ridge'``, a private release.
    head_share: Of the budget for this release, as a share of 1 / sigma^2.
    b1: Decay of the first moment; None for what the method usually has.
    weight_decay: Of the adapters, where ``b1`` is given.
    options: More arguments of ``prism``, as sorted pairs.
    public: Whether the reported rows are the public validation split: to be
      looked at once, at the end.
    pooled: Whether a row is the mean of its tokens.
    temperature: The factor of the logits.
  """

  task: str = 'sst2'
  method: str = 'prism'
  rate: float = 0.0
  epsilon: float | None = 3.0
  seed: int = 100
  rows: int = 0
  steps: int = 120
  batch: int = 256
  clip: float = 1.0
  rank: int = 8
  start: str = 'default'
  scale: float = 1.0
  gauge: float = 1.0
  head: str = 'frozen'
  head_share: float = 0.8
  b1: float | None = None
  weight_decay: float = 0.0
  options: tuple[tuple[str, Any], ...] = ()
  public: bool = False
  pooled: bool = False
  temperature: float = 10.0

  @property
  def is_probe(self) -> bool:
    """Whether rows are sentence vectors, without adapters."""
    return methods.parameters_of(self.method) == 'head'

  @property
  def static(self) -> 'Setting':
    """What decides on the program; all else are numbers of one program."""
    b1 = None if self.b1 is None else 0.5
    return dataclasses.replace(
      self, rate=0.0, seed=0, b1=b1, weight_decay=0.0, start='', gauge=1.0,
      public=False,
    )  # fmt: skip

  @property
  def numbers(self) -> dict[str, float]:
    return {
      'rate': self.rate,
      'b1': 0.0 if self.b1 is None else self.b1,
      'weight_decay': self.weight_decay,
    }


DEFAULTS = dataclasses.asdict(Setting())


def problem_of(setting: Setting, folders: Folders) -> problems.Problem:
  """Rows and frozen weights."""
  return problems.problem(
    setting.task, LENGTH[setting.task], setting.is_probe, folders.data,
    folders.cache, setting.public, setting.pooled,
  )  # fmt: skip


def head_of(
  make: Callable[..., heads.LinearHead],
  given: problems.Problem,
  noise_multiplier: float,
  key: jax.Array,
) -> heads.LinearHead:
  """A head from one release of the rows of a probe's problem."""
  vectors, _, labels = given.train
  parts = np.array_split(np.arange(len(labels)), 1 + len(labels) // 2000)
  return make(
    [(vectors[rows], labels[rows]) for rows in parts],
    num_classes=given.classes,
    noise_multiplier=noise_multiplier,
    dataset_size=len(labels),
    prng_key=key,
  )


def ridge(
  given: problems.Problem,
  noise_multiplier: float,
  key: jax.Array,
  temperature: float = Setting.temperature,
) -> heads.LinearHead:
  """Such a head by ridge regression."""
  make = functools.partial(heads.ridge, logit_scale=temperature)
  return head_of(make, given, noise_multiplier, key)


@functools.lru_cache(maxsize=16)
def private_head(
  task: str,
  pooled: bool,
  epsilon: float,
  share: float,
  seed: int,
  temperature: float,
  folders: Folders,
) -> heads.LinearHead:
  """A head whose release has a share of the budget."""
  alone = accounting.calibrate_noise_multiplier(epsilon, DELTA, 1.0, 1)
  probe = Setting(task, 'linear probe', pooled=pooled)
  return ridge(
    problem_of(probe, folders),
    alone / share**0.5,
    jax.random.fold_in(jax.random.key(seed), 3),
    temperature,
  )


def released(setting: Setting, folders: Folders) -> heads.LinearHead | None:
  """The head that is released of the private rows before the training."""
  if setting.head != 'ridge':
    return None
  return private_head(
    setting.task, setting.pooled, setting.epsilon, setting.head_share,
    setting.seed, setting.temperature, folders,
  )  # fmt: skip


def start(
  setting: Setting, given: problems.Problem, head: heads.LinearHead | None
) -> tuple[Any, Any]:
  """``(params, frozen)`` before training, from the seed."""
  keys = jax.random.split(jax.random.key(setting.seed), 3)
  layers = given.frozen['layers']
  kernels = [
    {
      name: {'kernel': module['kernel']}
      for name, module in layer.items()
      if name in plain_layers.MODULES
    }
    for layer in layers
  ]
  kind = methods.parameters_of(setting.method)
  adapters: list[dict] = [{} for _ in layers]
  if kind == 'matrices':
    adapters = kernels
  elif kind != 'head':
    adapters, kernels = _adapters(setting, kernels, keys[1:])
    layers = [
      {name: {**x, **modules.get(name, {})} for name, x in layer.items()}
      for layer, modules in zip(layers, kernels, strict=True)
    ]
  frozen: dict[str, Any] = {**given.frozen, 'layers': layers}
  if kind == 'lora_b':
    frozen['lora_a'] = _only(adapters, 'lora_a')
    adapters = _only(adapters, 'lora_b')
  params: dict[str, Any] = {'layers': adapters}
  if given.classes:
    shape = given.width, given.classes
    kernel = jax.nn.initializers.orthogonal()(keys[0], shape)
    kernel = kernel if head is None else head.kernel
    first = {'kernel': kernel, 'bias': jnp.zeros(given.classes)}
    if setting.head == 'frozen' and kind != 'head':
      frozen['head'] = first
    else:
      params['head'] = first
  if methods.is_tangent(setting.method) or setting.start == 'canonical':
    params = lora.canonicalize(params, layout=lora.Layout(scale=setting.scale))
  return params, frozen


def _only(adapters: list[dict], factor: str) -> list[dict]:
  return [
    {name: {factor: pair[factor]} for name, pair in layer.items()}
    for layer in adapters
  ]


def _adapters(
  setting: Setting, kernels: list[dict], keys: jax.Array
) -> tuple[list[dict], list[dict]]:
  """Adapters at the start, and kernels from which they are taken out."""
  layout = lora.Layout(scale=setting.scale)
  adapters: list[dict] = [{} for _ in kernels]
  for layer, modules in enumerate(kernels):
    for i, (name, x) in enumerate(sorted(modules.items())):
      rows, columns = x['kernel'].shape
      key = jax.random.fold_in(keys[0], 100 * layer + i)
      a = jax.random.normal(key, (rows, setting.rank)) * rows**-0.5
      b = jnp.zeros((setting.rank, columns))
      adapters[layer][name] = {'lora_a': a, 'lora_b': b}
  if setting.start == 'spectral':
    adapters, kernels = lora.spectral_residual(
      adapters, kernels, keys[1], layout=layout
    )
  elif setting.start == 'balanced':
    adapters = lora.initialize(
      adapters, keys[1], method='balanced', size=0.1, layout=layout
    )
  return in_gauge(adapters, setting.gauge, keys[1]), kernels


def in_gauge(
  adapters: list[dict], condition: float, key: jax.Array
) -> list[dict]:
  """The same Z from factors A K, K^-1 B, with K of this condition number."""
  if condition == 1:
    return adapters
  out = []
  for layer in adapters:
    turned = {}
    for i, (name, pair) in enumerate(sorted(layer.items())):
      rank = pair['lora_a'].shape[1]
      basis = jax.random.normal(jax.random.fold_in(key, i), (rank, rank))
      basis = np.linalg.qr(basis)[0]
      size = np.geomspace(condition**-0.5, condition**0.5, rank)
      turned[name] = {
        'lora_a': pair['lora_a'] @ (basis * size) @ basis.T,
        'lora_b': (basis / size) @ basis.T @ pair['lora_b'],
      }
    out.append(turned)
  return out


def losses_of(setting: Setting, given: problems.Problem) -> Callable[..., Any]:
  """``losses(params, frozen, *rows)``, loss and score of each row."""
  numbers = {'scale': setting.scale}
  if given.classes:
    numbers['temperature'] = setting.temperature

  def losses(params, frozen, *rows):
    if 'lora_a' in frozen:
      layers = [
        {name: pair | layer[name] for name, pair in fixed.items()}
        for layer, fixed in zip(params['layers'], frozen['lora_a'], strict=True)
      ]
      params = {**params, 'layers': layers}
    return given.row_losses(params, frozen, *rows, **numbers)

  return losses


def loss_of(setting: Setting, given: problems.Problem) -> Callable[..., Any]:
  """``loss(params, frozen, *example)``."""
  losses = losses_of(setting, given)

  def loss(params, frozen, *example):
    rows = jax.tree.map(lambda x: x[None], example)
    return losses(params, frozen, *rows)[0][0]

  return loss


def training_of(
  setting: Setting,
  given: problems.Problem,
  params: Any,
  head: heads.LinearHead | None,
  numbers: private.Numbers,
  key: Any,
  noise_multiplier: float | None = None,
) -> training.PrivateTraining:
  """The private training; without a noise multiplier it is calibrated."""
  clip = NO_CLIP if setting.epsilon is None else setting.clip
  sigma = noise_multiplier or 0.0
  b1, decay = (numbers[k] for k in ('b1', 'weight_decay'))
  options = dict(setting.options)
  if methods.is_tangent(setting.method) and setting.scale != 1:
    options['layout'] = lora.Layout(scale=setting.scale)
  if setting.method == 'dp-muon':
    clip = clip / methods.sensitivity_of_groups(params)
  return training.make_private(
    loss_of(setting, given),
    params,
    optimizer=methods.optimizer(
      setting.method,
      lambda t: numbers['rate'] * (1 - t / setting.steps),
      stddev=sigma * clip / setting.batch,
      b1=None if setting.b1 is None else b1,
      decay=decay,
      **options,
    ),
    l2_clip_norm=clip,
    expected_batch_size=setting.batch,
    dataset_size=setting.rows or len(given.train[0]),
    steps=setting.steps,
    delta=DELTA,
    execution=training.Execution(microbatch_size=MICROBATCH),
    prior_releases=[] if head is None else [head],
    prng_key=key,
    **(
      {'target_epsilon': setting.epsilon}
      if noise_multiplier is None
      else {'noise_multiplier': noise_multiplier}
    ),
  )


@functools.lru_cache(maxsize=8)
def program(
  setting: Setting, folders: Folders, sigma: float
) -> private.Program:
  """The program of runs with this :attr:`Setting.static`."""
  given, head = problem_of(setting, folders), released(setting, folders)
  params, _ = start(dataclasses.replace(setting, start='default'), given, None)
  return private.Program(
    lambda numbers, key: training_of(
      setting, given, params, head, numbers, key, sigma
    )
  )


@functools.lru_cache(maxsize=64)
def _noise_multiplier(setting: Setting, folders: Folders) -> float:
  given, head = problem_of(setting, folders), released(setting, folders)
  params, _ = start(dataclasses.replace(setting, start='default'), given, None)
  return training_of(
    setting, given, params, head, setting.numbers, 0
  ).noise_multiplier


def noise_multiplier(setting: Setting, folders: Folders) -> float:
  """Of a training, beside what was released before."""
  # Sizes and releases decide, not what is trained.
  plain = dataclasses.replace(setting.static, method='prism', options=())
  return _noise_multiplier(plain, folders)


def train(
  setting: Setting, folders: Folders, sigma: float
) -> tuple[Any, Any, Any]:
  """``(params, optimizer's state, frozen)`` after all steps."""
  given = problem_of(setting, folders)
  params, frozen = start(setting, given, released(setting, folders))
  rows = setting.rows or len(given.train[0])
  data = tuple(x[:rows] for x in given.train)  # They may stay on disk.
  run = program(setting.static, folders, sigma)
  # The program is made with the head of another seed, which the training
  # compares with its parameters; batches do not depend on them.
  plain, _ = start(setting, given, None)
  batches = run.batches(plain, data, setting.numbers, setting.seed)
  params, state = run.train(
    params, frozen, batches, setting.numbers, setting.seed
  )
  return params, state, frozen


def execute(
  setting: Setting, folders: Folders, *, smoke: bool = False
) -> dict[str, Any]:
  """Trains and scores.

  Returns:
    ``'noise multiplier'``; ``'tuning accuracy'`` and ``'test accuracy'``, of
    rows that choose and of rows that are reported; ``'scores'`` of the latter,
    see :func:`packed`.
  """
  given, sigma = problem_of(setting, folders), 0.0
  if setting.epsilon is not None:
    sigma = 1.0 if smoke else noise_multiplier(setting, folders)
  params, _, frozen = train(setting, folders, sigma)
  losses = jax.jit(losses_of(setting, given))

  def scores(part: problems.Rows) -> Iterator[np.ndarray]:
    for rows in problems.chunks_of(part):
      yield np.asarray(losses(params, frozen, *rows)[1])
      if smoke:
        break

  tuning, test = (
    np.concatenate(list(scores(part))) for part in (given.tuning, given.test)
  )
  return {
    'noise multiplier': sigma,
    'tuning accuracy': float(tuning.mean()),
    'test accuracy': float(test.mean()),
    'scores': packed(test),
  }


def packed(scores: np.ndarray) -> str:
  """Right or wrong in bits, shares of tokens in float16; the number of rows."""
  is_bits = np.isin(scores, (0, 1)).all()
  stored = np.packbits(scores > 0.5) if is_bits else scores.astype(np.float16)
  return (
    f'{len(scores)} {"bits" if is_bits else "floats"} {stored.tobytes().hex()}'
  )


def unpacked(text: str) -> np.ndarray:
  """What :func:`packed` was given."""
  rows, kind, stored = text.split(' ')
  found = bytes.fromhex(stored)
  if kind == 'floats':
    return np.frombuffer(found, np.float16).astype(float)
  bits = np.unpackbits(np.frombuffer(found, np.uint8))
  return bits[: int(rows)].astype(float)
