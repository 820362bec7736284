"""The names of a chat's fields in other APIs, whose requests are translated to chats and checked there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from runtime.output.fields import FieldError


class FieldNames:
    """Replaces names of fields at the start of a path or of an error."""

    def __init__(self, *names: tuple[str, str]) -> None:
        """`names` are pairs of a regular expression for a chat's field and its replacement."""
        self._names = [(re.compile(pattern), name) for pattern, name in names]

    def of(self, text: str) -> str:
        for pattern, name in self._names:
            text = pattern.sub(name, text)
        return text

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Replace the names in a FieldError that the block raises."""
        try:
            yield
        except FieldError as e:
            raise FieldError(self.of(e.field), self.of(str(e))) from e
