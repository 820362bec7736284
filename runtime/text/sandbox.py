"""Chat templates as `transformers` runs them, in Jinja's immutable sandbox. A child process runs this code (chat.py).

A template comes with the weights and is untrusted. The sandbox isolates it from the rest of the process. The process's
limits (child.py) bound its memory and time. It is interrupted after `max_seconds` of CPU time, and the process is
killed if the interrupt has no effect."""

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

from runtime.base.types import CallboardError

MAX_SOURCE_CHARS = 256 << 10


class MissingValue(CallboardError):
    """A template failed on a value that it expects."""


def check(source: str, names: dict[str, str], max_seconds: float) -> None:
    """Raise CallboardError if `source` is not a valid template. `names` are visible to it."""
    try:
        if len(source) > MAX_SOURCE_CHARS:
            raise OverflowError(f"it has {len(source)} characters, above {MAX_SOURCE_CHARS}")
        with _interrupted_after(max_seconds):  # constant expressions are computed here
            _template(source, tuple(names.items()))
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as e:
        raise CallboardError(f"The model's chat template has an error in line {e.lineno}: {_sentence(e)}.") from None
    except Exception as e:  # any error from Python's compiler
        raise CallboardError(f"The model's chat template cannot be compiled: {_sentence(e)}.") from None


def render(source: str, names: dict[str, str], values: dict[str, Any], max_seconds: float, max_chars: int) -> str:
    """Render a template with `values`. Raises CallboardError if it fails or exceeds a limit."""
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
    except (TypeError, jinja2.UndefinedError) as e:
        raise MissingValue(f"The model's chat template cannot use these messages: {_sentence(e)}.") from None
    except Exception as e:  # a template is a program, which can raise any error
        raise CallboardError(f"The model's chat template cannot use these messages: {_sentence(e)}.") from None
    return "".join(prompt)


@contextlib.contextmanager
def _interrupted_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError within the body after this process has spent `seconds` of CPU time in it."""

    def interrupt(*_: object) -> NoReturn:
        raise TimeoutError(f"it ran for over {seconds:g} seconds")

    signal.signal(signal.SIGPROF, interrupt)
    signal.setitimer(signal.ITIMER_PROF, seconds, seconds)  # repeats, in case a filter swallows the error
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
    """Accepts `{% generation %}` around the assistant's text, a mark for training without output."""

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
    # Jinja's own filter escapes HTML, unlike models' training data.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(ImmutableSandboxedEnvironment):
    """Lets lists grow, as Kimi's templates need. The values of a rendering are this process's own copies."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) or (type(obj) is list and attr in ("append", "pop"))


_ENVIRONMENT = _Environment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
)
_ENVIRONMENT.filters["tojson"] = _tojson
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
