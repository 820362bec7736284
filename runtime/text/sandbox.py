"""Chat templates as `transformers` runs them, in Jinja's immutable sandbox: what a process of its own calls (chat.py).

A template comes with the weights, from anyone. The sandbox keeps it from what lies outside, the limits of its process
(child.py) from taking memory or time: of the CPU it has `max_seconds`, after which it is interrupted, and the process
is killed if it cannot be.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.spec.types import CallboardError

MAX_SOURCE_CHARS = 256 << 10


def check(source: str, names: dict[str, str], max_seconds: float) -> None:
    """Raises CallboardError if `source` is not a template that can be run; `names` are visible to it."""
    try:
        if len(source) > MAX_SOURCE_CHARS:
            raise OverflowError(f"it has {len(source)} characters, above {MAX_SOURCE_CHARS}")
        with _interrupted_after(max_seconds):  # what is constant is computed already
            _template(source, tuple(names.items()))
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as e:
        raise CallboardError(f"The model's chat template has an error in line {e.lineno}: {_sentence(e)}.") from None
    except Exception as e:  # whatever Python makes of a program that it cannot take
        raise CallboardError(f"The model's chat template cannot be compiled: {_sentence(e)}.") from None


def render(source: str, names: dict[str, str], values: dict[str, Any], max_seconds: float, max_chars: int) -> str:
    """The text that a template makes of `values`; raises CallboardError if it makes none, or goes over a limit."""
    prompt: list[str] = []
    num_chars = 0
    try:
        with _interrupted_after(max_seconds):
            for part in _template(source, tuple(names.items())).generate(values):
                num_chars += len(part)
                if num_chars > max_chars:
                    raise CallboardError(f"The prompt is over {max_chars} characters; shorten the messages.")
                prompt.append(part)
    except (CallboardError, MemoryError):
        raise
    except Exception as e:  # a template is a program: what it meets in the messages can raise anything
        raise CallboardError(f"The model's chat template cannot use these messages: {_sentence(e)}.") from None
    return "".join(prompt)


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raises TimeoutError within its body once this process has spent so many seconds of CPU time in it."""

    def interrupt(*_: object) -> NoReturn:
        raise TimeoutError(f"it ran for over {seconds:g} seconds")

    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)  # again and again, if a filter swallows the error
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@lru_cache(16)
def _template(source: str, names: tuple[tuple[str, str], ...]) -> jinja2.Template:
    return _ENVIRONMENT.from_string(source, dict(names))


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


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
