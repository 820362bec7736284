"""Errors of an application's build, each shown as one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import click
from pydantic import ValidationError
from ray.serve.exceptions import RayServeException

from runtime.base.types import CallboardError
from runtime.output.fields import fault_of, path_of


class BuildError(CallboardError, RayServeException):
    """The application cannot be built. `serve status` shows this error without a traceback, and Serve tries once."""


@contextmanager
def build_errors() -> Iterator[None]:
    """Raise errors of the block as ClickException within `serve run`, and as BuildError elsewhere."""
    try:
        yield
    except (CallboardError, ValidationError) as e:
        sentence = str(e)
        if isinstance(e, ValidationError):
            first = e.errors(include_url=False)[0]
            path = path_of(first) or "args"
            sentence = str(fault_of(path, first))
            if first["type"] == "extra_forbidden":
                sentence = f"args has {path!r}, which is not a setting; `callboard serve --help=all` explains all."
        if click.get_current_context(silent=True) is None:
            raise BuildError(sentence) from e
        raise click.ClickException(sentence) from e
