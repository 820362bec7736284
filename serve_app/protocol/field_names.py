"""The names of a chat's fields in other APIs, whose requests are translated to chats and checked there."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from runtime.output.fields import FieldError

_AFTER_VALUES = re.compile(r""".*(?:"|(?<!\w)'|'(?!\w))""", re.DOTALL)  # a client's values stand in quotes


class FieldNames:
    """Replaces field names that begin a path or an error, and in an error's remedy."""

    def __init__(self, *names: tuple[str, str], words: Mapping[str, str] | None = None) -> None:
        """Args:
        names: pairs: a regular expression for a chat's field, and its replacement.
        words: parts of a remedy, and their replacements."""
        self._names = [(re.compile(pattern), name) for pattern, name in names]
        self._words = words or {}
        longest_first = sorted(map(re.escape, self._words), key=len, reverse=True)
        self._word = re.compile(rf"(?<![\w./])(?:{'|'.join(longest_first)})(?![\w/]|\.\w)") if words else None

    def of(self, text: str) -> str:
        """Return a path or an error about a chat's field."""
        text = self.in_remedy(text)
        for pattern, name in self._names:
            text = pattern.sub(name, text)
        return text

    def in_remedy(self, text: str) -> str:
        """Return an error that has the client's name of the field already."""
        if self._word is None or " " not in text:
            return text
        values = _AFTER_VALUES.match(text)
        at = text.find(" ") if values is None else values.end()
        return text[:at] + self._word.sub(lambda word: self._words[word[0]], text[at:])

    @contextmanager
    def in_errors(self) -> Iterator[None]:
        """Replace the names in a FieldError that the block raises."""
        try:
            yield
        except FieldError as e:
            raise FieldError(self.of(e.field), self.of(str(e))) from e
