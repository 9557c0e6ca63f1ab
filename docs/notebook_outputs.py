"""Runs the notebooks and stores them with what they print and draw.

    python docs/notebook_outputs.py [quickstart gauge_invariance ...]

Without names all of them, some minutes each. Needs nbclient and ipykernel:
nothing else here does, the pages are built from the stored outputs. Kept of the
outputs are plain text and PNG pictures; what goes to the standard error (the
bars of downloads, warnings with the paths of this machine) is not.
"""

import argparse
import json
import os
import pathlib
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
FOLDER = ROOT / 'notebooks'


def _kept(output: dict) -> dict | None:
  """One output as it is stored, or None for one that is not."""
  kind = output['output_type']
  if kind == 'stream':
    return dict(output) if output['name'] == 'stdout' else None
  data = {
    mime: output['data'][mime]
    for mime in ('image/png', 'text/plain')
    if mime in output['data']
  }
  if 'image/png' in data:  # The text is the figure's address in memory.
    data.pop('text/plain', None)
  out = {'data': data, 'metadata': {}, 'output_type': kind}
  if kind == 'execute_result':
    out['execution_count'] = None
  return out


def run(path: pathlib.Path) -> None:
  """Runs one notebook in an empty folder and writes it back."""
  import nbclient
  import nbformat

  stored = json.loads(path.read_text('utf-8'))
  notebook = nbformat.read(path, as_version=4)
  for cell in notebook.cells:
    # Nothing is installed: that cell is for a machine that has nothing.
    lines = cell.source.split('\n')
    cell.source = '\n'.join(x for x in lines if not x.startswith('%pip'))
  os.environ['PYTHONPATH'] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get('PYTHONPATH')])]
  )
  with tempfile.TemporaryDirectory() as folder:
    client = nbclient.NotebookClient(
      notebook, timeout=1800, resources={'metadata': {'path': folder}}
    )
    client.execute()
  for cell, run_cell in zip(stored['cells'], notebook.cells, strict=True):
    if cell['cell_type'] != 'code':
      continue
    outputs = [_kept(output) for output in run_cell.outputs]
    cell['outputs'] = []
    for output in filter(None, outputs):
      last = cell['outputs'][-1] if cell['outputs'] else {}
      if last.get('output_type') == output['output_type'] == 'stream':
        last['text'] += output['text']
      else:
        cell['outputs'].append(output)
    for output in cell['outputs']:
      if 'text' in output:
        output['text'] = output['text'].splitlines(keepends=True)
  path.write_text(
    json.dumps(stored, indent=1, ensure_ascii=False) + '\n', 'utf-8'
  )


def main():
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('names', nargs='*', help='without .ipynb')
  names = parser.parse_args().names
  for path in sorted(FOLDER.glob('*.ipynb')):
    if not names or path.stem in names:
      run(path)
      print(f'{path.name}: {path.stat().st_size / 1024:.0f} kB', flush=True)


if __name__ == '__main__':
  main()
