"""Messages to the text that a model was trained to see, and that to ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox

from .pretrained import Pretrained, content

Message = Mapping[str, str]
# For models without a template of their own, such as base models.
PLAIN = (
  "{% for m in messages %}{{ m['role'] | capitalize }}: {{ m['content'] }}\n"
  '{% if m["role"] == "assistant" %}{{ eos_token }}{% endif %}{% endfor %}'
  '{% if add_generation_prompt %}Assistant: {% endif %}'
)


class Chat:
  """The chat template and the tokenizer of a model.

  Args:
    source: The model. Its template is a program in Jinja: it is run in a
      sandbox, as ``transformers`` does, but without the date, which some
      templates put into every prompt: an answer should not depend on it.

  Raises:
    ValueError: If the template is no Jinja.
  """

  def __init__(self, source: Pretrained):
    self._tokenizer = source.tokenizer
    self.stops = source.stops
    options = source.tokenizer_config
    self._special = {
      name: content(options.get(name)) for name in ('bos_token', 'eos_token')
    }
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.globals['raise_exception'] = _refuse
    text = _template(options.get('chat_template'))
    try:
      self._template = environment.from_string(text)
    except jinja2.TemplateError as error:
      raise ValueError(f'{source.where}: chat template: {error}.') from error

  def text(self, messages: Sequence[Message], *, answer_next: bool) -> str:
    """The text of a conversation.

    Args:
      messages: Objects with ``role`` and ``content``.
      answer_next: Whether the beginning of an answer stands at the end.

    Raises:
      ValueError: If the template refuses the messages.
    """
    try:
      return self._template.render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=answer_next,
        tools=None,
        documents=None,
        **self._special,
      )
    # A template is a program: it calls methods of strings and lists, with what
    # the private rows hold, and raises whatever those raise.
    except Exception as error:
      raise ValueError(f'The chat template says: {error}.') from error

  def prompt(self, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation and of the beginning of an answer.

    Raises:
      ValueError: As :meth:`text` and :meth:`encode`.
    """
    return self.encode(self.text(messages, answer_next=True))

  def prompt_and_answer(self, messages: Sequence[Message]) -> tuple[str, str]:
    """The text up to the last message, and the rest with its end mark.

    Raises:
      ValueError: If there is no answer at the end, or the template refuses.
    """
    if not messages or messages[-1]['role'] != 'assistant':
      raise ValueError('Expected the last message to be of the assistant.')
    prompt = self.text(messages[:-1], answer_next=True)
    whole = self.text(messages, answer_next=False)
    if whole.startswith(prompt):
      return prompt, whole[len(prompt) :]
    # A template that changes what came before: it leaves thoughts out, say.
    return prompt, messages[-1]['content'] + self._special['eos_token']

  def encode(self, text: str) -> list[int]:
    """Ids of a text in which the template has put all special tokens.

    Raises:
      ValueError: If the tokenizer has no token for a part of it.
    """
    # A lone surrogate, legal in JSON, cannot be encoded and would raise.
    clean = text.encode('utf-8', 'replace').decode('utf-8')
    try:
      return self._tokenizer.encode(clean, add_special_tokens=False).ids
    # The library in Rust raises Exception itself, of no class of its own.
    except Exception as error:
      raise ValueError(f'The tokenizer says: {error}.') from error

  def decode(self, ids: Sequence[int]) -> str:
    return self._tokenizer.decode(list(ids))  # But for special tokens.


def _template(stored: Any) -> str:
  """One template, or the one named `default` of several."""
  if isinstance(stored, list):
    named = {entry['name']: entry['template'] for entry in stored}
    stored = named.get('default')
  return stored if isinstance(stored, str) else PLAIN


def _refuse(message: str) -> None:
  raise jinja2.TemplateError(message)
