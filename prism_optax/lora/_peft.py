"""Adapters from the files of Hugging Face PEFT and back into them.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors`` with,
for a linear layer ``W`` (out, in), ``lora_A.weight`` (r, in) and
``lora_B.weight`` (out, r): ``W + lora_alpha / r * lora_B @ lora_A``. Ours are
their transposes: ``lora_a`` (in, r) and ``lora_b`` (r, out).
"""

import itertools
import os
import pathlib
import re
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from prism_optax import _modules
from prism_optax._linalg._products import at_least_float32
from prism_optax._matrix_axes import with_leaves
from prism_optax._modules import Layout, LayoutLike, Module, Pair
from prism_optax.fixed_rank import Factors
from prism_optax.lora import _peft_files
from prism_optax.lora._peft_files import PeftModule, shown

NamesLike = Mapping[str, str] | Callable[[str], str] | None


class PeftAdapter(NamedTuple):
  """What :func:`load_peft` found in a folder.

  Attributes:
    params: ``{module: {'lora_a': (in, r), 'lora_b': (r, out)}}``, NumPy arrays
      in the type of the file; modules by their names in PyTorch.
    layout: The pairs with their scales, to be passed as ``layout=`` with
      ``params``.
    config: The entries of ``adapter_config.json``.
    others: Tensors that belong to no pair (``modules_to_save``, biases), by
      their names, as they are. :func:`from_peft` fills leaves of these names.
  """

  params: dict[str, dict[str, np.ndarray]]
  layout: list[Pair]
  config: dict[str, object]
  others: dict[str, np.ndarray]


def load_peft(folder: str | os.PathLike[str]) -> PeftAdapter:
  """Reads an adapter that PEFT has saved.

  Needs the package ``safetensors``. Adapters that are more than ``alpha / r *
  B A`` on the weights they were published for are refused: DoRA, those with
  biases of their own, activated by tokens, on embedding tables or on bare
  parameters, and those relative to changed weights
  (``init_lora_weights='pissa'`` and the like; PEFT converts these when it
  saves). Pattern keys are read as PEFT reads them, as
  regular expressions that are matched from the end of a name; those that could
  take for ever are refused.

  Args:
    folder: Folder of ``adapter_config.json`` and
      ``adapter_model.safetensors``.

  Returns:
    The adapter, which :func:`from_peft` puts into the tree of a JAX model. Its
    fields: ``params``, ``{module: {'lora_a': (in, r), 'lora_b': (r, out)}}`` in
    NumPy arrays of the types of the file, modules by their names in PyTorch;
    ``layout``, the pairs with their scales, to be passed as ``layout=`` with
    ``params``; ``config``, the entries of ``adapter_config.json``; ``others``,
    tensors that belong to no pair (``modules_to_save``, biases), by their
    names, which nothing else in this library reads.

  Raises:
    ValueError: With the file and what is wrong with it: the file is missing,
      cut or of another kind, a factor has no partner, or shapes do not fit each
      other or the configured rank.
    ImportError: Without ``safetensors``.

  Example:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'q': {'lora_a': jnp.ones((4, 2)), 'lora_b': jnp.ones((2, 3))}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   lora.save_peft(folder, params)
    ...   loaded = lora.load_peft(folder)
    >>> loaded.params['q']['lora_a'].shape, loaded.layout[0].layout.scale
    ((4, 2), 1.0)
  """
  modules, config, others = _peft_files.read(pathlib.Path(folder))
  params, layout = {}, []
  for name, x in modules.items():
    params[name] = {'lora_a': x.a.T.copy(), 'lora_b': x.b.T.copy()}
    axes = Layout(-1, 0, (), (), scale=x.scale)
    layout.append(Pair(f'{name}/lora_a', f'{name}/lora_b', axes))
  return PeftAdapter(params, layout, config, others)


def from_peft(
  adapter: PeftAdapter,
  params: optax.Params,
  *,
  names: NamesLike = None,
  layout: LayoutLike = None,
) -> optax.Params:
  """Puts a loaded adapter into a tree of trainable parameters.

  Args:
    adapter: The result of :func:`load_peft`.
    params: Tree of trainable arrays with LoRA pairs: the shapes to fill. Other
      leaves are filled where the file has their tensor, see :func:`save_peft`,
      and pass where it has none.
    names: The name in PyTorch of each module (its name here, see
      :func:`describe_pairs`): a mapping or a function. A module that stacks
      layers needs one ``{}`` for each stack axis, which the index replaces:
      ``{'layers/q': 'model.layers.{}.self_attn.q_proj'}``. The last ``/lora``
      of a name, which ``nnx.LoRALinear`` adds, may be left out. None for the
      same name with dots for slashes, without that ``lora``.
    layout: See :func:`describe_pairs`. If its scale differs from the scale in
      the file, the factors are multiplied, so that ``scale * left @ right.mT``
      is the matrix of the file.

  Returns:
    A tree like ``params``, same shapes and types. Axes of heads are split from
    the features of PyTorch in order, as in ``reshape``.

  Raises:
    ValueError: If modules of one are not in the other, or ranks, features or
      shapes differ.

  Example:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'q': {'lora_a': jnp.ones((4, 2)), 'lora_b': jnp.ones((2, 3))}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   lora.save_peft(folder, params, layout=lora.Layout(scale=4.0))
    ...   loaded = lora.load_peft(folder)
    >>> new = lora.from_peft(loaded, params)  # The factors take the scale of 4.
    >>> float(new['q']['lora_a'][0, 0])
    2.0
  """
  theirs = _modules.find_modules(adapter.params, adapter.layout)
  scales = {x.name: x.scale for x in theirs}
  used: dict[str, list[str]] = {}

  def filled(module: Module, _: Factors) -> Factors:
    paths = used[module.name] = _torch_names(module, names)
    absent = [path for path in paths if path not in adapter.params]
    if absent:
      raise ValueError(
        f'The adapter has no module {absent[0]!r} for {module.name!r}; it has'
        f' {shown(list(adapter.params))}. Say which:'
        f' names={{{module.name!r}: ...}}.'
      )
    left, right = [], []
    for path in paths:
      a, b = (adapter.params[path][name] for name in ('lora_a', 'lora_b'))
      expected = (module.n, module.rank), (module.rank, module.m)
      if (a.shape, b.shape) != expected:
        raise ValueError(
          f'Expected lora_a and lora_b of shapes {expected} in {path!r} for'
          f' {module.name!r}, got {(a.shape, b.shape)}. Make params of the rank'
          ' of the adapter; lora.truncate lowers it afterwards.'
        )
      root = (scales[path] / module.scale) ** 0.5
      left.append(root * at_least_float32(b.T))
      right.append(root * at_least_float32(a))
    return Factors(jnp.stack(left), jnp.stack(right))

  new = _modules.map_factors(filled, params, layout)
  missed = set(adapter.params).difference(*used.values())
  if missed:
    raise ValueError(
      f'No module of params takes {shown(sorted(missed))} of the adapter; the'
      f' modules are {shown(list(used))}.'
    )
  leaf_names, leaves = _modules.named_leaves(new)
  modules = _modules.find_modules(new, layout)
  for i in _modules.other_leaves(modules, len(leaves)):
    whole = _whole_tensor(leaf_names[i], leaves[i].ndim, names)
    tensor = None if whole is None else adapter.others.get('.'.join(whole[:2]))
    if whole is None or tensor is None:
      continue
    value = tensor.T if whole.transposed else tensor
    if value.shape != leaves[i].shape:
      raise ValueError(
        f'Expected {".".join(whole[:2])!r} to have the shape'
        f' {leaves[i].shape} of {leaf_names[i]!r}, got {value.shape}.'
      )
    leaves[i] = jnp.asarray(value, leaves[i].dtype)
  return with_leaves(new, leaves)


def save_peft(
  folder: str | os.PathLike[str],
  params: optax.Params,
  *,
  names: NamesLike = None,
  config: Mapping[str, object] | None = None,
  layout: LayoutLike = None,
) -> None:
  """Writes adapters as PEFT reads them.

  ``peft.PeftModel.from_pretrained(model, folder)`` then computes the same
  function as this model. Needs the package ``safetensors``. Factors are written
  in their own types; ``lora_alpha`` is scale times rank; modules that differ in
  rank or alpha from the most common ones are named in ``rank_pattern`` and
  ``alpha_pattern``. Both files are written in full and then put in place.

  Leaves that are no factors, such as a classification head, are written as
  modules that were trained as a whole, ``modules_to_save``:

  =====================  =====================================================
  ``head/kernel``        ``head.weight``, transposed: (in, out) to (out, in)
  ``norm/scale``         ``norm.weight``; likewise ``embedding`` and ``weight``
  ``head/bias``          ``head.bias``
  any other leaf         ValueError: PyTorch has no name for it
  bias of an adapter     ValueError: in PEFT a module has an adapter or is
                         trained as a whole
  untrained adapters     ValueError: if one factor of every module is zero,
                         training never moved them
  =====================  =====================================================

  After :func:`spectral_residual` save ``difference(trained, initial)``, because
  PEFT adds an adapter to the ORIGINAL weights. For adapters that were trained
  privately this is post-processing.

  Args:
    folder: Folder of the two files; it is made if it does not exist.
    params: Tree with LoRA pairs, and other leaves as in the table.
    names: The name in PyTorch of each module, see :func:`from_peft`; also of
      other leaves, ``{'head': 'classifier'}``.
    config: More entries of ``adapter_config.json``, such as ``task_type``,
      ``base_model_name_or_path``, ``fan_in_fan_out`` (True for the Conv1D of
      GPT-2); or all entries that :func:`load_peft` found. Entries that follow
      from ``params`` replace these.
    layout: See :func:`describe_pairs`. Its scale counts.

  Raises:
    ValueError: As in the table, if two modules get one name, or if a stacked
      module has no name with ``{}``.
    ImportError: Without ``safetensors``.

  Example:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> from prism_optax import lora
    >>> params = {'model': {'q_proj': {
    ...   'lora_a': jnp.ones((4, 2)), 'lora_b': jnp.ones((2, 3))}}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   lora.save_peft(folder, params, layout=lora.Layout(scale=8.0))
    ...   loaded = lora.load_peft(folder)
    >>> list(loaded.params), loaded.config['r'], loaded.config['lora_alpha']
    (['model.q_proj'], 2, 16)
  """
  modules = _modules.find_modules(params, layout)
  leaf_names, leaves = _modules.named_leaves(params)
  found: dict[str, PeftModule] = {}
  for module in modules:
    left, right = module.read(leaves, np.asarray)
    paths = _torch_names(module, names)
    for path, b, a in zip(paths, left, right, strict=True):
      if path in found:
        raise ValueError(f'Two modules are named {path!r} in PyTorch.')
      found[path] = PeftModule(a.T, b, module.scale)
  if not any(np.any(x.a) and np.any(x.b) for x in found.values()):
    raise ValueError(
      'One factor is zero in every module of params, so that the adapters'
      ' change nothing: training never moved them, or these are not the'
      ' parameters after training.'
    )
  whole: dict[str, np.ndarray] = {}
  heads = set()
  for i in _modules.other_leaves(modules, len(leaves)):
    tensor = _whole_tensor(leaf_names[i], leaves[i].ndim, names)
    if tensor is None or tensor.module in found:
      raise ValueError(
        f'PEFT has no place for {leaf_names[i]!r} {leaves[i].shape}: beside'
        ' adapters it keeps modules without one, whose leaves are a kernel (in,'
        ' out), a weight, scale, embedding or bias. Take it out of the tree,'
        ' and save it elsewhere.'
      )
    key = f'{tensor.module}.{tensor.end}'
    if key in whole:
      raise ValueError(f'Two leaves are named {key!r} in PyTorch.')
    value = np.asarray(leaves[i])
    whole[key] = value.T if tensor.transposed else value
    heads.add(tensor.module)
  entries = {**(config or {}), **_config(found, sorted(heads))}
  _peft_files.write(pathlib.Path(folder), found, entries, whole)


class _Whole(NamedTuple):
  """Where a leaf that is no factor stands in PyTorch."""

  module: str
  end: str
  transposed: bool


# How Flax calls the leaves of a module, and PyTorch.
_ENDS = {
  'kernel': 'weight', 'scale': 'weight', 'embedding': 'weight',
  'weight': 'weight', 'bias': 'bias',
}  # fmt: skip


def _whole_tensor(name: str, ndim: int, names: NamesLike) -> _Whole | None:
  """The place of the leaf, or None if PyTorch has no name for it."""
  match = re.fullmatch(rf'(.+)[/.]({"|".join(_ENDS)})', name)
  if match is None or (match[2] == 'kernel' and ndim != 2):
    return None
  return _Whole(
    _torch_name(match[1], names), _ENDS[match[2]], match[2] == 'kernel'
  )


def _config(
  modules: Mapping[str, PeftModule], heads: list[str]
) -> dict[str, object]:
  """The entries of ``adapter_config.json`` that follow from the modules."""
  ranks = {name: x.a.shape[0] for name, x in modules.items()}
  alphas = {name: _whole(x.scale * ranks[name]) for name, x in modules.items()}
  rank, alpha = (statistics.mode(x.values()) for x in (ranks, alphas))
  # Matched from the end of a name, unless the key starts with a caret.
  pattern = _peft_files.exactly
  return {
    'peft_type': 'LORA',
    'r': rank,
    'lora_alpha': alpha,
    'target_modules': sorted(ranks),
    'rank_pattern': {pattern(k): v for k, v in ranks.items() if v != rank},
    'alpha_pattern': {pattern(k): v for k, v in alphas.items() if v != alpha},
    'bias': 'none',
    'use_rslora': False,
    'use_dora': False,
    'init_lora_weights': True,
    'modules_to_save': heads or None,
    'layers_to_transform': None,
    'layers_pattern': None,
    'exclude_modules': None,
  }


def _whole(value: float) -> float | int:
  return int(value) if float(value).is_integer() else value


def _torch_name(name: str, names: NamesLike) -> str:
  if callable(names):
    return names(name)
  layer, given = name.removesuffix('/lora'), names or {}
  usual = layer.replace('/', '.').removeprefix(_peft_files.PREFIX)
  return given.get(name, given.get(layer, usual))


def _torch_names(module: Module, names: NamesLike) -> list[str]:
  """One name for each of the stacked modules, in their order."""
  name = _torch_name(module.name, names)
  if name.count('{}') != len(module.stack):
    raise ValueError(
      f'Expected {len(module.stack)} times {{}} in the PyTorch name of'
      f' {module.name!r} with stack {module.stack}, got {name!r}. Say what it'
      f" is: names={{{module.name!r}: 'model.layers.{{}}...'}}."
    )
  indices = itertools.product(*(range(size) for size in module.stack))
  return [name.format(*index) for index in indices]
