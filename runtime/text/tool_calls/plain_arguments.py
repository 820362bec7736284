"""Arguments that a model writes one by one and not as JSON, given as an object all the same."""

from __future__ import annotations

from runtime.text.tool_calls.name_first import NameFirstParser
from runtime.text.tool_calls.written_values import json_text, types_of


class PlainArgumentsParser(NameFirstParser):
    """Each format reads what stands before an argument (`_key`) and the argument itself."""

    _before_key = "{"
    _types: frozenset[str] = frozenset()  # that this argument may have; none: unknown

    def _begun_arguments(self, final: bool) -> bool:
        self._before_key = "{"
        self._state = self._key
        return True

    def _key(self, final: bool) -> bool:
        """Before an argument, or the end of the call."""
        raise NotImplementedError

    def _give_key(self, key: str) -> None:
        self._give(f'{self._before_key}"{json_text(key)}": ')
        self._before_key = ", "
        self._types = types_of((self._functions or {}).get(self._name), key)

    def _give_end(self) -> None:
        self._give("{}" if self._before_key == "{" else "}")
