"""A finished run in the files of other programs."""

import argparse
import dataclasses
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import safetensors.numpy
from flax import nnx

from prism_optax import lora

from . import files, finished, tasks, templates
from .models import llama_files, minilm, pretrained

Read = Callable[[str], np.ndarray]


def export(command: argparse.Namespace) -> None:
  """The command ``export``.

  Raises:
    ValueError: If the run is not finished, training never moved the adapters,
      the folder is taken, or what is read back is another model.
  """
  run = finished.find(command.run, 'classify', 'instruct')
  limit = command.max_shard_size
  whole = command.base or command.format == 'merged'
  if limit is not None and (run.options.task == 'classify' or not whole):
    raise ValueError(
      f'--max-shard-size {limit} is for all weights of a language model: '
      '--format merged, or --base.'
    )
  folder = pathlib.Path(command.output)
  if folder.exists() and any(folder.iterdir()):
    raise ValueError(f'--output {folder} is not empty: choose another folder.')
  files.require_writable(folder)
  if run.options.task == 'classify':
    model = _classifier(run, folder, command)
  else:
    model = _language_model(run, folder, command)
  (folder / 'README.md').write_text(_card(run, command.format), 'utf-8')
  print(f'{command.format}: {folder}')
  if command.check:
    print(check(run, model, folder, command.format))


def _card(run: finished.Finished, kind: str) -> str:
  """Markdown with the header that the hub reads."""
  return templates.render(
    'model_card.md',
    kind=kind,
    used=run.options,
    summary=run.summary,
    plan=run.summary.get('plan'),
    settings=run.summary['settings'],
    tags=['lora'] + ['differential-privacy'] * run.summary['private'],
  )


def check(
  run: finished.Finished, model: nnx.Module, folder: pathlib.Path, kind: str
) -> str:
  """Reads an export back, and compares the logits of eight tokens.

  Args:
    run: What was exported.
    model: Its model; loses its adapters.
    folder: The export.
    kind: Its format.

  Returns:
    The largest differences: from the export, and from no adapters at all.

  Raises:
    ValueError: If the export is nearer to no adapters than to the run.
  """
  ids = np.arange(1, 9)[None]

  @nnx.jit
  def logits(model):
    return model(ids)

  trained = np.asarray(logits(model))
  back = _classifier_back if run.options.task == 'classify' else _model_back
  found = np.asarray(logits(back(run, folder, kind)))
  state = nnx.state(model, nnx.LoRAParam)
  nnx.update(model, jax.tree.map(np.zeros_like, state))
  error, effect = (
    float(np.abs(x - trained).max()) for x in (found, logits(model))
  )
  text = (
    f'read back: logits differ by at most {error:.1e}; the adapters change '
    f'them by {effect:.1e}'
  )
  if not error < effect / 2:
    raise ValueError(f'{folder} is not the model of the run. {text}.')
  return text


def _from_peft(
  folder: pathlib.Path,
) -> tuple[dict[str, dict[str, np.ndarray]], Mapping[str, np.ndarray]]:
  """Factors by module, the scale in the second one, and all other tensors."""
  adapter = lora.load_peft(folder)
  modules = {}
  for (name, x), pair in zip(
    adapter.params.items(), adapter.layout, strict=True
  ):
    scale = 1.0 if pair.layout is None else pair.layout.scale
    modules[name] = x | {'lora_b': scale * x['lora_b']}
  return modules, adapter.others


def _model_back(
  run: finished.Finished, folder: pathlib.Path, kind: str
) -> nnx.Module:
  if kind == 'merged':
    return llama_files.load(pretrained.find(str(folder)))
  source = pretrained.find(run.options.model)
  read = merged(source.read, _from_peft(folder)[0])
  return llama_files.load(dataclasses.replace(source, read=read))


def _classifier_back(
  run: finished.Finished, folder: pathlib.Path, kind: str
) -> nnx.Module:
  model, encoder = finished.text_classifier(run)
  if kind == 'merged':
    model.encoder = minilm.load(folder)
    head = safetensors.numpy.load_file(folder / 'head.safetensors')
  else:
    modules, others = _from_peft(folder)
    modules = {name.removeprefix('bert.'): x for name, x in modules.items()}
    with tempfile.TemporaryDirectory() as scratch:
      _write_encoder(pathlib.Path(scratch), encoder, modules)
      model.encoder = minilm.load(pathlib.Path(scratch))
    head = {
      name.removeprefix('classifier.'): value for name, value in others.items()
    }
  model.kernel[...] = head['weight'].T
  model.bias[...] = head['bias']
  return model


def _write_encoder(
  folder: pathlib.Path,
  encoder: pathlib.Path,
  modules: Mapping[str, Mapping[str, Any]],
) -> None:
  """The encoder with the adapters in its weights."""
  stored = safetensors.numpy.load_file(encoder / pretrained.WEIGHTS)
  change = merged(stored.__getitem__, modules)
  _save(folder / pretrained.WEIGHTS, {name: change(name) for name in stored})
  shutil.copy(encoder / 'config.json', folder)


def _language_model(
  run: finished.Finished, folder: pathlib.Path, command: argparse.Namespace
) -> nnx.Module:
  model, source = finished.language_model(run, moved=True)
  folder.mkdir(parents=True, exist_ok=True)
  modules = llama_files.adapters(
    nnx.state(model, nnx.LoRAParam),
    model.config,
    tasks.lora_of(run.options),
  )
  if command.format == 'merged':
    write_model(
      folder, source, merged(source.read, modules), command.max_shard_size
    )
    return model
  _write_peft(folder, modules, source.name, 'CAUSAL_LM')
  _write_tokenizer(folder, source)
  if command.base:
    write_model(folder / 'base', source, source.read, command.max_shard_size)
  return model


def _classifier(
  run: finished.Finished, folder: pathlib.Path, command: argparse.Namespace
) -> nnx.Module:
  """The encoder and the head, as PEFT has them or the hub.

  PEFT gets both as one model, see the card: an encoder ``bert`` and a head
  ``classifier``, as in ``BertForSequenceClassification``, whose pooling is
  another one. Merged, the encoder is a model by itself.
  """
  model, encoder = finished.text_classifier(run, moved=True)
  folder.mkdir(parents=True, exist_ok=True)
  modules: dict[str, dict[str, jax.Array]] = {}
  names = minilm.stored_names(len(model.encoder.layers))
  for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.LoRAParam)):
    _, *module, _, factor = path
    modules.setdefault(names[tuple(module)], {})[str(factor)] = leaf[...]
  if command.format == 'merged':
    _write_encoder(folder, encoder, modules)
    head = {
      'weight': np.ascontiguousarray(np.asarray(model.kernel[...]).T),
      'bias': np.asarray(model.bias[...]),
    }
    _save(folder / 'head.safetensors', head)
  else:
    _write_peft(
      folder,
      {f'bert.{name}': factors for name, factors in modules.items()}
      | {'classifier': {'kernel': model.kernel[...], 'bias': model.bias[...]}},
      run.options.base['model'],
      # Not SEQ_CLS: PEFT would take it for the model with the other pooling.
      None,
    )
    if command.base:
      shutil.copytree(encoder, folder / 'base')
  labels = {
    'labels': run.options.labels,
    'temperature': model.temperature,
    'max_length': run.options.max_length,
  }
  files.write_json(folder / 'head.json', labels)
  shutil.copy(encoder / 'tokenizer.json', folder)
  return model


def merged(read: Read, modules: Mapping[str, Mapping[str, Any]]) -> Read:
  """Reads weights with the adapters added to them.

  Args:
    read: A tensor by its name, ``(out, in)``.
    modules: ``lora_a`` (in, r) and ``lora_b`` (r, out) of each adapted module.

  Returns:
    A function like ``read``, in the type of what it reads.
  """

  def changed(name: str) -> np.ndarray:
    value = read(name)
    module = modules.get(name.removesuffix('.weight'))
    if module is None or not name.endswith('.weight'):
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
  """A whole language model in the layout of the hub.

  Args:
    folder: Made if it does not exist.
    source: Configuration, tokenizer and names.
    read: The weights.
    limit: Most bytes of weights in a file, such as ``'2GB'``, of which no more
      are in memory at once; a larger tensor has a file of its own. None for one
      file.
  """
  import huggingface_hub  # Slow to import, and only needed here.

  folder.mkdir(parents=True, exist_ok=True)
  sizes = {name: source.read(name).nbytes for name in sorted(source.names)}
  parts = huggingface_hub.split_state_dict_into_shards_factory(
    sizes,
    get_storage_size=int,
    filename_pattern='model{suffix}.safetensors',
    max_shard_size=limit or sum(sizes.values()),
  )
  for file, names in parts.filename_to_tensors.items():
    tensors = {name: np.ascontiguousarray(read(name)) for name in names}
    _save(folder / file, tensors)
  if parts.is_sharded:
    index = {
      'metadata': parts.metadata,
      'weight_map': parts.tensor_to_filename,
    }
    files.write_json(folder / pretrained.INDEX, index)
  kind = read(names[0]).dtype.name
  files.write_json(
    folder / 'config.json', {**source.config, 'torch_dtype': kind}
  )
  files.write_json(
    folder / 'generation_config.json', {'eos_token_id': list(source.stops)}
  )
  _write_tokenizer(folder, source)


def _write_peft(
  folder: pathlib.Path,
  modules: Mapping[str, Mapping[str, jax.Array]],
  base: str,
  task_type: str | None,
) -> None:
  """The adapter, and modules that were trained as a whole beside it."""
  lora.save_peft(
    folder,
    modules,
    config={
      'task_type': task_type,
      'base_model_name_or_path': base,
      'inference_mode': True,
    },
  )


def _write_tokenizer(
  folder: pathlib.Path, source: pretrained.Pretrained
) -> None:
  source.tokenizer.save(str(folder / 'tokenizer.json'))
  files.write_json(
    folder / 'tokenizer_config.json', dict(source.tokenizer_config)
  )


def _save(path: pathlib.Path, tensors: Mapping[str, np.ndarray]) -> None:
  with files.replacing(path) as temporary:
    safetensors.numpy.save_file(dict(tensors), temporary, {'format': 'pt'})
