"""Chat templates: a model's own Jinja program that turns messages into its prompt.

A template comes with the weights, from anyone, so it runs in Jinja's immutable sandbox, with the names and filters that
`transformers` gives it (its chat_template_utils.py is the de facto specification).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.core.types import CallboardError
from runtime.text.tokenizer import Tokenizer

MAX_PROMPT_CHARS = 4 << 20

# Marks the end of the message that is to be continued. Its trailing space tells whether the template trims messages.
_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """One model's chat template, compiled once. Threads may share it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises CallboardError if `source` is not a valid template; `special_tokens` are visible to it by name."""
        try:
            self._template = _ENVIRONMENT.from_string(source, globals=dict(special_tokens))
        except jinja2.TemplateSyntaxError as e:
            raise CallboardError(f"The model's chat template has an error in line {e.lineno}: {e.message}.") from e

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ChatTemplate:
        """The template that came with a tokenizer; raises CallboardError if none did."""
        if tokenizer.chat_template is None:
            raise CallboardError("This model has no chat template; use /v1/completions with a plain prompt instead.")
        return cls(tokenizer.chat_template, tokenizer.special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation; encode it with `add_special_tokens=False`, it has them.

        `messages`, `tools` and `kwargs` are plain JSON values, since the sandbox guards no others.
        `continue_final_message` ends the prompt within the last message, in place of a new turn.
        Raises CallboardError with the template's own words if it refuses the messages, and if the prompt is over
        4 Mi characters."""
        if continue_final_message:
            add_generation_prompt = False
            messages = _with_end_marked(messages)
        prompt: list[str] = []
        num_chars = 0
        try:
            for part in self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **kwargs
            ):
                num_chars += len(part)
                if num_chars > MAX_PROMPT_CHARS:
                    raise CallboardError(f"The prompt is over {MAX_PROMPT_CHARS} characters; shorten the messages.")
                prompt.append(part)
        except CallboardError:
            raise
        except Exception as e:  # a template is a program: what it meets in the messages can raise anything
            raise CallboardError(f"The model's chat template cannot use these messages: {_sentence(e)}.") from e
        text = "".join(prompt)
        return _cut_at_mark(text) if continue_final_message else text


def _with_end_marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    match messages:
        case [*before, {"content": str(text)} as last]:
            return [*before, {**last, "content": text + _CONTINUE_MARK}]
        case [*before, {"content": [*parts, {"text": str(text)} as part]} as last]:
            return [*before, {**last, "content": [*parts, {**part, "text": text + _CONTINUE_MARK}]}]
    raise CallboardError("continue_final_message is set, but the last message has no text to continue.")


def _cut_at_mark(prompt: str) -> str:
    at = prompt.rfind(_CONTINUE_MARK.strip())
    if at < 0:
        raise CallboardError("The model's chat template leaves out the last message, so it cannot be continued.")
    trimmed = not prompt.startswith(_CONTINUE_MARK, at)
    return prompt[:at].rstrip() if trimmed else prompt[:at]


def _sentence(error: Exception) -> str:
    return str(error).strip().rstrip(".") or type(error).__name__


class _GenerationBlock(jinja2.ext.Extension):
    """Accepts `{% generation %}` around the assistant's words, a mark for training; it adds nothing to the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which models never saw.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment


_ENVIRONMENT = _environment()
