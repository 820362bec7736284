"""The line of one request: sizes and times, ignored fields, and why it was refused.

It never holds a prompt or an answer. docs/operations.md explains each field."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Sequence

from runtime.output.fields import shortened
from serve_app.observability.context import ChoiceStats, RequestContext

logger = logging.getLogger("ray.serve")

_MAX_ERROR_CHARS = 300
_MAX_NAMES = 16  # names of ignored fields
_MAX_NAME_CHARS = 64
_MAX_PATH_CHARS = 128
_PLAIN = re.compile(r"[\w.,:/@+#$<>*-]+", re.ASCII)


def to_serve_log(line: str) -> None:
    """Write a line to the replica's log, which `serve run` shows."""
    logger.info("%s", line)


class RequestLines:
    """Makes the line of each request and hands it to `write`."""

    def __init__(self, model: str, write: Callable[[str], None] = to_serve_log) -> None:
        self._model, self.write = model, write

    def __call__(self, request_id: str, context: RequestContext, choices: Sequence[ChoiceStats], status: int) -> None:
        """Write the line of a request that was accepted, or refused by the engines."""
        began = [choice for choice in choices if choice.first_at]
        first = min(began, key=lambda choice: choice.first_at, default=None)
        fields: dict[str, object] = {
            "finish_reason": ",".join(choice.reason for choice in choices),
            "prompt_tokens": sum(choice.request.prompt_len for choice in choices),
            "cached_tokens": sum(choice.num_cached for choice in choices),
            "output_tokens": sum(choice.num_output for choice in choices),
        }
        if num_drafts := sum(choice.num_drafts for choice in choices):
            by_position = map(sum, zip(*(choice.accepted for choice in choices), strict=True))
            fields |= {"drafts": num_drafts, "accepted": ",".join(str(n) for n in by_position if n) or "0"}
        if first is not None:
            fields |= {
                "queue_s": f"{first.queued_s:.4f}",
                "prefill_s": f"{first.prefill_s:.4f}",
                "ttft_s": f"{first.first_at - context.arrived_at:.4f}",
                "decode_s": f"{max(choice.last_at for choice in began) - first.first_at:.4f}",
            }
        self._write(request_id, context, context.model or self._model, status, fields)

    def short(self, request_id: str, context: RequestContext, status: int) -> None:
        """Write the line of any other request."""
        self._write(request_id, context, context.model, status, {})

    def _write(
        self, request_id: str, context: RequestContext, model: str, status: int, fields: dict[str, object]
    ) -> None:
        context.has_line = True
        values = {
            "id": request_id,
            "method": context.method,
            "path": quoted(context.path, _MAX_PATH_CHARS),
            "model": quoted(model, _MAX_PATH_CHARS) if model else "",
            "status": status,
            **fields,
            "total_s": f"{time.time() - context.arrived_at:.4f}",
        }
        parts = [f"{name}={value}" for name, value in values.items() if value != ""]
        if context.ignored_fields:
            names = [shortened(name, _MAX_NAME_CHARS) for name in context.ignored_fields[:_MAX_NAMES]]
            parts.append(f"ignored_fields={quoted(','.join(names), _MAX_NAMES * (_MAX_NAME_CHARS + 8))}")
        if context.error:
            parts.append(f"error={quoted(context.error, _MAX_ERROR_CHARS)}")
        self.write(f"request {' '.join(parts)}")


def quoted(text: str, max_chars: int) -> str:
    """A value as one word of ASCII, or as a JSON string: a client's text can end no line and move no cursor."""
    text = shortened(text, max_chars)
    return text if _PLAIN.fullmatch(text) else json.dumps(text).replace("\x7f", "\\u007f")
