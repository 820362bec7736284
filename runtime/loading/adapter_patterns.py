"""rank_pattern and alpha_pattern in an adapter's config: numbers for modules with a matching name.

peft matches a pattern as a regular expression against a module's name, or its end after a dot. Here a pattern has
one of these forms, which match in time linear in the name:

    q_proj                              a name's last part
    layers.3.self_attn.q_proj           a name's last parts
    ^model.layers.3.self_attn.q_proj    a whole name
    .*\\.3\\.self_attn\\..*               parts with any text between them; dots are escaped"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from runtime.base.types import CallboardError

_MOST_WILD = 64  # patterns with .* in one field; each is tried for each module
_SHOWN = 100  # characters of a pattern in an error
_TOKEN = re.compile(r"(\.\*)|(\\\.)|(\.)|([A-Za-z0-9_-]+)")
_ACCEPTED = (
    "a pattern is a module's name or the end of one (layers.3.mlp.up_proj), ^ before a whole name, or such parts with "
    r".* between them and \. for a dot"
)


class _Wild(NamedTuple):
    """A pattern cut at each .*: a name must contain the pieces in this order."""

    order: int
    is_whole: bool
    pieces: list[str]
    value: Any

    def fits(self, name: str) -> bool:
        first, *middle, last = self.pieces
        starts = [0] if self.is_whole or not first else _starts(name)
        at = next((start + len(first) for start in starts if name.startswith(first, start)), -1)
        for piece in middle:
            if at >= 0 and (at := name.find(piece, at)) >= 0:
                at += len(piece)
        return 0 <= at <= len(name) - len(last) and name.endswith(last)


class Patterns:
    """The patterns of one field. The first one that matches a name decides."""

    def __init__(self, patterns: Any, field: str) -> None:
        """`field` names it in errors. Raises CallboardError if a pattern is not accepted."""
        self._ends: dict[str, tuple[int, Any]] = {}  # order and value, by name or a name's end
        self._names: dict[str, tuple[int, Any]] = {}  # order and value of whole names
        self._wild: list[_Wild] = []
        if not isinstance(patterns, dict | None):
            raise CallboardError(f"{field} is a {type(patterns).__name__}; it must be an object of numbers by pattern.")
        for order, (pattern, value) in enumerate((patterns or {}).items()):
            self._add(order, pattern, value, field)
        if len(self._wild) > _MOST_WILD:
            raise CallboardError(f"{field} has {len(self._wild)} patterns with .*; at most {_MOST_WILD} are accepted.")

    def _add(self, order: int, pattern: str, value: Any, field: str) -> None:
        is_whole, text = pattern.startswith("^"), pattern.removeprefix("^").removesuffix("$")
        tokens = _TOKEN.findall(text)
        has_wild = any(wild for wild, *_ in tokens)
        if "".join(map("".join, tokens)) != text or not text or (has_wild and any(dot for _, _, dot, _ in tokens)):
            shown = repr(pattern[:_SHOWN]) + "..." * (len(pattern) > _SHOWN)
            raise CallboardError(f"{field} has {shown}, which is not accepted; {_ACCEPTED}.")
        pieces = [""]
        for wild, escaped, dot, letters in tokens:
            if wild:
                pieces.append("")
            else:
                pieces[-1] += "." if escaped or dot else letters
        if has_wild:
            self._wild.append(_Wild(order, is_whole, pieces, value))
        else:
            (self._names if is_whole else self._ends).setdefault(pieces[0], (order, value))

    def value(self, name: str, default: Any) -> Any:
        """Return the number of a module."""
        found = [self._ends[end] for end in (name[at:] for at in _starts(name)) if end in self._ends]
        found += [self._names[name]] if name in self._names else []
        found += [(wild.order, wild.value) for wild in self._wild if wild.fits(name)]
        return min(found, key=lambda item: item[0], default=(0, default))[1]


def _starts(name: str) -> Iterator[int]:
    """Yield where a name starts, and each of its parts after a dot."""
    at = 0
    while True:
        yield at
        if not (at := name.find(".", at) + 1):
            return
