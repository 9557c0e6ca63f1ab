"""Sphinx's configuration: `sphinx-build -W --keep-going -n docs build/docs`.

Builds without a network and without any extra but `docs`; what a reader's
browser loads comes from the site alone.
"""

import base64
import html
import json
import os
import pathlib
import re
import sys

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode
from sphinx.util.typing import stringify_annotation

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(
  0, str(ROOT)
)  # The package next to these pages, installed or not.

import jax  # noqa: E402

import prism_optax  # noqa: E402
from prism_optax._types import ArrayTree  # noqa: E402

project = 'prism_optax'
author = 'The prism_optax authors'
copyright = f'2026, {author}'
version = release = prism_optax.__version__

# Of the published repository, without a slash at the end; while it is empty the
# site shows no link to it, and its own copies of the source files.
REPOSITORY = ''

extensions = [
  'myst_parser',
  'sphinx.ext.autodoc',
  'sphinx.ext.autosummary',
  'sphinx.ext.napoleon',
  'sphinx.ext.viewcode',
]
exclude_patterns = ['_build']
source_suffix = {'.md': 'markdown'}

myst_enable_extensions = ['colon_fence', 'deflist', 'dollarmath', 'amsmath']
myst_heading_anchors = 4
# The code of snippets is copied with a mouse: no prompt, no line numbers.
highlight_language = 'text'

autodoc_preserve_defaults = True
# Types stand in the signature, their shapes and units in the description.
autodoc_typehints = 'signature'
maximum_signature_line_length = 80
autodoc_member_order = 'bysource'
autosummary_generate = False  # Tables only: entries are on the same page.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
# The signature of a class has the types of its fields, in short.
napoleon_attr_annotations = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = 'hide'

# Without a network there is no index of the names of other libraries.
nitpick_ignore_regex = [
  # Types of fields: a private class is described by the field's own words.
  (
    'py:class',
    r'prism_optax\.(?:.*\.)?_\w+\.\w+|ArrayTree|ArrayLike'
    r'|prism_optax\.diagnostics\.(?:FactorNoiseEnergy|ClipStatistics|Proof)',
  ),
  (
    'py:.*',
    r'(jax|jaxlib|jnp|optax|numpy|np|os|dp_accounting|typing|collections'
    r'|jax_privacy)\..*',
  ),
]

html_theme = 'furo'
html_title = f'prism_optax {version}'
html_static_path = ['_static']
html_css_files = ['site.css']
html_js_files = ['copy.js']
if REPOSITORY:
  html_theme_options = {
    'source_repository': REPOSITORY,
    'source_branch': 'main',
    'source_directory': 'docs/',
  }
html_show_sphinx = False
html_math_renderer = 'mathml'


def _mathml(as_block):
  """Formulas as MathML: browsers show it without a script from elsewhere."""

  def visit(translator, node):
    formula = latex2mathml.tex2mathml(node.astext(), as_block=as_block)
    # A norm's bars are no fences that grow with what they are raised to.
    formula = formula.replace('<mo>‖</mo>', '<mo stretchy="false">‖</mo>')
    if as_block:
      formula = f'<div class="math">{formula}</div>'
    translator.body.append(formula)
    raise nodes.SkipNode

  return visit, None


def _outputs(cell, stem, folder):
  """What a code cell has printed and drawn, as it is stored."""
  for i, output in enumerate(cell.get('outputs', ())):
    text = ''.join(output.get('text', ''))
    data = output.get('data', {})
    if 'image/png' in data:
      name = f'{stem}-{cell["id"]}-{i}.png'
      picture = base64.b64decode(''.join(data['image/png']))
      if (
        not (folder / name).exists() or (folder / name).read_bytes() != picture
      ):
        (folder / name).write_bytes(picture)
      yield f'![What this cell draws.]({name})'
    elif text := text or ''.join(data.get('text/plain', '')):
      yield f'```{{code-block}} text\n:class: output\n\n{text.rstrip()}\n```'


def _write_notebooks():
  """The notebooks as pages, with the outputs that they are stored with."""
  folder = ROOT / 'docs' / 'notebooks'
  folder.mkdir(exist_ok=True)
  for page in folder.glob('*.md'):
    if not (ROOT / 'notebooks' / f'{page.stem}.ipynb').exists():
      page.unlink()
  for path in sorted((ROOT / 'notebooks').glob('*.ipynb')):
    parts = []
    for cell in json.loads(path.read_text('utf-8'))['cells']:
      text = ''.join(cell['source'])
      if cell['cell_type'] == 'code':
        # Commands to the notebook itself are no Python to be coloured.
        language = 'text' if '\n%' in f'\n{text}' else 'python'
        text = f'```{language}\n{text}\n```'
      parts += [text, *_outputs(cell, path.stem, folder)]
    page = '\n\n'.join(parts) + '\n'
    target = folder / f'{path.stem}.md'
    # An old page as it is, if it is the same: it is not built again.
    if not target.exists() or target.read_text('utf-8') != page:
      target.write_text(page, 'utf-8')


# Files at the top level that are pages here, by another name.
PAGES = {
  'CHANGELOG.md': 'changelog.md',
  'CONTRIBUTING.md': 'contributing.md',
  'README.md': 'index.md',
  'SECURITY.md': 'security.md',
}
_UP = re.compile(rf'\]\((?:\.\./)+({"|".join(PAGES)})((?:#[^)]*)?)\)')
_NOTEBOOK = re.compile(r'\]\((?:\.\./)+notebooks/(\w+)\.ipynb\)')


def _links_to_the_root(app, docname, content):
  """Links of a page to a file at the top level, or a notebook: pages here."""
  del app
  up = '../' * docname.count('/')
  text = _UP.sub(
    lambda match: f']({up}{PAGES[match[1]]}{match[2]})', content[0]
  )
  content[0] = _NOTEBOOK.sub(rf']({up}notebooks/\1.md)', text)


def _links_from_the_root(app, path, docname, content):
  """Links in a file outside of docs/, for the page that includes it."""
  docname = app.env.docname  # MyST gives the name without its folder.
  folder = pathlib.PurePath(path).parent
  if folder.parts[:1] != ('..',):
    return
  up = '../' * docname.count('/')

  def rewritten(match):
    link = match[1]
    if link.startswith('docs/'):
      target = link.removeprefix('docs/')
    else:
      target = PAGES.get(link, (folder / link).as_posix())
    return f']({up}{target})'

  content[0] = re.sub(
    r'\]\((?!https?:|#|mailto:)([^)\s]+)\)', rewritten, content[0]
  )


def _short_types(app, what, name, obj, options, signature, returned):
  """Trees and arrays by their names, and not by all that they may be."""
  del app, what, name, obj, options

  def short(text):
    for mode in ('smart', 'fully-qualified-except-typing'):
      tree = stringify_annotation(ArrayTree, mode)
      for found in (tree.replace('ArrayTree', tree), tree):  # With its own.
        text = text and text.replace(found, 'ArrayTree')
      array = stringify_annotation(jax.typing.ArrayLike, mode)
      text = text and text.replace(array, 'ArrayLike')
    return text

  return short(signature), short(returned)


def _stars(app, what, name, obj, options, lines):
  """Shapes such as (*stack, in, r) are no emphasis that has not ended."""
  del app, what, name, obj, options

  def escaped(match):
    return re.sub(r'(?<![\\\w*])\*(?=\w)', r'\\*', match[0])

  pieces = re.split(r'(``.+?``)', '\n'.join(lines), flags=re.S)
  for i, piece in enumerate(pieces):
    if i % 2:  # Literal: a backslash would be seen.
      pieces[i] = piece.replace('\\*', '*')
    else:  # Except for the lines of an example.
      pieces[i] = re.sub(r'^(?! *(>>>|\.\.\.)).*$', escaped, piece, flags=re.M)
  lines[:] = ''.join(pieces).split('\n')


def _front_door(app, env, node, contnode):
  """What the package hands on from `transforms` is documented in one place.

  A docstring names it without a module, or with either of the two.
  """
  domain = env.domains['py']
  module, _, name = node['reftarget'].rpartition('.')
  if module not in ('', 'prism_optax', 'prism_optax.transforms'):
    return None
  for target in (f'prism_optax.{name}', f'prism_optax.transforms.{name}'):
    if target in domain.objects:
      return domain.resolve_xref(
        env,
        node['refdoc'],
        app.builder,
        node['reftype'],
        target,
        node,
        contnode,
      )
  return None


class _Names(SphinxPostTransform):
  """Leads `lora.merge` in a sentence to its place in the reference.

  Pages name it in code, without a role, because the repository shows them too.
  """

  default_priority = 5

  def run(self, **kwargs):
    del kwargs
    objects = self.env.domains['py'].objects
    for node in list(self.document.findall(nodes.literal)):
      inside = nodes.reference, nodes.title, addnodes.pending_xref
      name = node.astext().removeprefix('prism_optax.')
      found = objects.get(f'prism_optax.{name}')
      if (
        not found
        or '.' not in node.astext()
        or isinstance(node.parent, inside)
        or found.docname == self.env.docname
      ):
        continue
      node.replace_self(
        make_refnode(
          self.app.builder,
          self.env.docname,
          found.docname,
          found.node_id,
          node.deepcopy(),
        )
      )


def _path_in_the_repository(path):
  """'benchmarks/x.py' for a path relative to the folder of the pages."""
  return pathlib.PurePath(os.path.normpath(f'docs/{path}'))


class _Sources(SphinxPostTransform):
  """Links to source files show them; Sphinx would download them."""

  default_priority = 5

  def run(self, **kwargs):
    del kwargs
    page = self.env.docname
    for node in list(self.document.findall(addnodes.download_reference)):
      relative, _ = self.env.relfn2path(node['reftarget'], page)
      path = _path_in_the_repository(relative)
      if REPOSITORY:
        uri = f'{REPOSITORY}/blob/main/{path}'
      elif path.suffix == '.py':
        uri = self.app.builder.get_relative_uri(
          page, f'source/{path.with_suffix("")}'
        )
      else:
        continue
      link = nodes.reference('', '', *node.children, refuri=uri, internal=True)
      node.replace_self(link)


def _source_pages(app):
  """A page for each source file to which a page links."""
  if REPOSITORY or app.builder.format != 'html':
    return
  for file in sorted(app.env.dlfiles):
    path = _path_in_the_repository(file)
    if path.suffix == '.py':
      text = (ROOT / path).read_text('utf-8')
      code = app.builder.highlighter.highlight_block(text, 'python')
      title = html.escape(str(path))
      yield (
        f'source/{path.with_suffix("")}',
        {'title': title, 'body': f'<h1>{title}</h1>\n{code}'},
        'page.html',
      )


def _places_to_break(app, pagename, templatename, context, doctree):
  """Long names in code may break after a dot, a slash or an underscore."""
  del app, pagename, templatename, doctree

  def breakable(match):
    name = re.sub(r'(?<=[\w)])([./_:]+)(?=[A-Za-z])', r'\1<wbr>', match[1])
    return f'<span class="pre">{name}</span>'

  for part in ('body', 'toc'):
    if part in context:
      context[part] = re.sub(
        r'<span class="pre">([^<]*)</span>', breakable, context[part]
      )


def setup(app):
  _write_notebooks()
  app.add_html_math_renderer('mathml', _mathml(False), _mathml(True))
  app.connect('autodoc-process-docstring', _stars)
  app.connect('autodoc-process-signature', _short_types)
  app.connect('missing-reference', _front_door)
  app.connect('source-read', _links_to_the_root)
  app.connect('include-read', _links_from_the_root)
  app.connect('html-collect-pages', _source_pages)
  app.connect('html-page-context', _places_to_break)
  app.add_post_transform(_Names)
  app.add_post_transform(_Sources)
