"""A finished run in the files of other programs."""

import argparse
import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from prism_optax import lora

from . import adapters, files, finished, tasks, templates
from .models import llama_files, minilm, pretrained

HEAD = 'head.safetensors'  # Of a classifier, beside its merged encoder.
FORMAT = {'format': 'pt'}  # As transformers expects its files.
Read = Callable[[str], np.ndarray]
Modules = Mapping[str, Mapping[str, Any]]


def export(command: argparse.Namespace) -> None:
  """The command ``export``.

  Raises:
    ValueError: If the run is not finished, training never moved the adapters,
      the folder is taken, or what is read back is another model.
  """
  run = finished.find(command.run, 'classify', 'instruct')
  limit, kind = command.max_shard_size, command.format
  if limit is not None and kind != 'merged' and not command.base:
    raise ValueError(
      f'--max-shard-size {limit} is for whole models: --format merged, --base.'
    )
  folder = pathlib.Path(command.output)
  files.require_new(folder)
  model, source = finished.model(run, moved=True)
  params, head = nnx.state(model, nnx.LoRAParam), {}
  if run.options.task == 'classify':
    modules = minilm.adapters(params['encoder'])
    head = {'kernel': model.kernel[...], 'bias': model.bias[...]}
    facts = {'labels': run.options.labels, 'temperature': model.temperature}
    facts['max_length'] = run.options.max_length
    files.write_json(folder / 'head.json', facts)
  else:
    modules = llama_files.adapters(params, model.config)
  if kind == 'merged':
    write_model(folder, source, merged(source.read, modules), limit)
    if head:
      stored = {'weight': head['kernel'].T, 'bias': head['bias']}
      adapters.write(folder / HEAD, stored, FORMAT)
  else:
    write_adapter(folder, source, modules, head)
    if command.base:
      write_model(folder / 'base', source, source.read, limit)
  files.write(folder / 'README.md', _card(run, kind))
  print(f'{kind}: {folder}')
  if command.check:
    print(check(model, _read_back(run, source, folder), folder))


def _card(run: finished.Finished, kind: str) -> str:
  """Markdown with the header that the hub reads."""
  facts = {'used': run.options, 'summary': run.summary}
  return templates.render('model_card.md', kind=kind, **facts)


def check(model: Any, back: Any, folder: pathlib.Path) -> str:
  """Compares the logits of eight tokens.

  Args:
    model: Of the run; loses its adapters.
    back: What was read back.
    folder: Where from.

  Returns:
    The largest differences: from what was read back, and from no adapters.

  Raises:
    ValueError: If it is nearer to no adapters than to the run.
  """

  @nnx.jit
  def logits(model):
    return model(np.arange(1, 9)[None])

  trained, found = logits(model), logits(back)
  state = nnx.state(model, nnx.LoRAParam)
  nnx.update(model, jax.tree.map(np.zeros_like, state))
  error, effect = (np.abs(x - trained).max() for x in (found, logits(model)))
  text = (
    f'read back: logits differ by at most {error:.1e}; the adapters change '
    f'them by {effect:.1e}'
  )
  if not error < effect / 2:
    raise ValueError(f'{folder} is not the model of the run. {text}.')
  return text


def _read_back(
  run: finished.Finished, source: pretrained.Pretrained, folder: pathlib.Path
) -> Any:
  """The model of an export: its own adapters add nothing to its weights."""
  head: Mapping[str, Any] = {}
  if (folder / 'adapter_config.json').exists():
    adapter, modules = lora.load_peft(folder), {}
    for (name, factors), pair in zip(
      adapter.params.items(), adapter.layout, strict=True
    ):
      scale = 1.0 if pair.layout is None else pair.layout.scale
      scaled = factors | {'lora_b': scale * factors['lora_b']}
      modules[name.removeprefix('bert.')] = scaled
    head = {x.removeprefix('classifier.'): y for x, y in adapter.others.items()}
    source = dataclasses.replace(source, read=merged(source.read, modules))
  else:
    source = pretrained.find(str(folder))
    if (folder / HEAD).exists():
      head = safetensors.numpy.load_file(folder / HEAD)
  plain = {'weights_dtype': 'float32'}
  used = argparse.Namespace(**vars(run.options) | plain)
  model = tasks.network(used, source)
  if head:
    model.kernel[...], model.bias[...] = head['weight'].T, head['bias']
  return model


def merged(read: Read, modules: Modules) -> Read:
  """Reads weights with the adapters added to them.

  Args:
    read: A tensor by its name, ``(out, in)``.
    modules: ``lora_a`` (in, r) and ``lora_b`` (r, out) of each adapted module.

  Returns:
    A function like ``read``, in the type of what it reads.
  """

  def changed(name: str) -> np.ndarray:
    value, module = read(name), modules.get(name.removesuffix('.weight'))
    if module is None:
      return value
    a, b = (np.asarray(module[key], np.float32) for key in ('lora_a', 'lora_b'))
    return (value.astype(np.float32) + (a @ b).T).astype(value.dtype)

  return changed


def write_model(
  folder: pathlib.Path,
  source: pretrained.Pretrained,
  read: Read,
  limit: str | None = None,
) -> None:
  """A whole model in the layout of the hub.

  Args:
    folder: Made if it does not exist.
    source: Configuration, tokenizer and names.
    read: The weights.
    limit: Most bytes of weights in a file, such as ``'2GB'``, of which no more
      are in memory at once; a larger tensor has a file of its own. None for one
      file.
  """
  import huggingface_hub  # Slow to import, and only needed here.

  sizes = {name: source.read(name).nbytes for name in sorted(source.names)}
  parts = huggingface_hub.split_state_dict_into_shards_factory(
    sizes,
    get_storage_size=int,
    filename_pattern='model{suffix}.safetensors',
    max_shard_size=limit or sum(sizes.values()),
  )
  for file, names in parts.filename_to_tensors.items():
    tensors = {name: read(name) for name in names}
    adapters.write(folder / file, tensors, FORMAT)
    kind = tensors[names[0]].dtype.name
  if parts.is_sharded:
    index = {'metadata': parts.metadata, 'weight_map': parts.tensor_to_filename}
    files.write_json(folder / pretrained.INDEX, index)
  config = {**source.config, 'torch_dtype': kind}
  files.write_json(folder / 'config.json', config)
  if source.stops:
    stops = {'eos_token_id': list(source.stops)}
    files.write_json(folder / 'generation_config.json', stops)
  _write_tokenizer(folder, source)


def write_adapter(
  folder: pathlib.Path,
  source: pretrained.Pretrained,
  modules: Modules,
  head: Mapping[str, Any],
) -> None:
  """The adapter as PEFT has it, and the head that was trained beside it.

  An encoder and a head are one model for PEFT, see the card: ``bert`` and
  ``classifier`` as in ``BertForSequenceClassification``, whose pooling is
  another one.
  """
  if head:
    named = {f'bert.{name}': factors for name, factors in modules.items()}
    modules = named | {'classifier': head}
  lora.save_peft(
    folder,
    modules,
    config={
      # Not SEQ_CLS: PEFT would take it for the model with the other pooling.
      'task_type': None if head else 'CAUSAL_LM',
      'base_model_name_or_path': source.name,
      'inference_mode': True,
    },
  )
  _write_tokenizer(folder, source)


def _write_tokenizer(
  folder: pathlib.Path, source: pretrained.Pretrained
) -> None:
  source.tokenizer.save(str(folder / 'tokenizer.json'))
  entries = dict(source.tokenizer_config)
  files.write_json(folder / 'tokenizer_config.json', entries)
