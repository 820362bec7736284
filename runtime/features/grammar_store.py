"""Grammars on one connection: each text travels once, and messages name it by its key.

    GrammarSender                                             GrammarStore
    update([a, b])  --- GrammarUpdate(added a, b) --------->  holds a, b
                    --- messages that name a or b ---------->  a or b with its text
    update([c])     --- GrammarUpdate(added c, removed a) --->  holds b, c

The sender alone decides what the store holds. It adds what a message names before that message, and removes the texts
that were named longest ago, beyond a limit in bytes. Both ends begin empty with each connection, so new links and
processes start in agreement. A message's reader keeps the grammar itself, so that a later removal
does not concern it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from runtime.base.types import CallboardError, Grammar, GrammarUpdate, Request, SamplingParams

MAX_STORE_BYTES = 16 << 20  # texts that one connection's store keeps between messages


class GrammarSender:
    """The keys that the store at the other end of a connection holds."""

    def __init__(self, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sizes: OrderedDict[str, int] = OrderedDict()  # sizes by key, the one named longest ago first
        self.num_bytes = 0  # bytes of all texts there

    def update(self, grammars: Iterable[Grammar]) -> GrammarUpdate | None:
        """The update to send before a message that names `grammars`; None if there is nothing to change."""
        sizes, named, added = self._sizes, dict[str, None](), list[Grammar]()
        for grammar in grammars:
            named[grammar.key] = None
            if grammar.key in sizes:
                sizes.move_to_end(grammar.key)
                continue
            sizes[grammar.key] = grammar.num_bytes
            self.num_bytes += grammar.num_bytes
            added.append(grammar)
        removed = []
        while self.num_bytes > self._max_bytes and len(sizes) > len(named):
            key, size = sizes.popitem(last=False)
            self.num_bytes -= size
            removed.append(key)
        return GrammarUpdate(added, removed) if added or removed else None


class GrammarStore:
    """The grammars that have come on a connection and were not removed."""

    def __init__(self) -> None:
        self.grammars: dict[str, Grammar] = {}  # grammars by key

    def apply(self, update: GrammarUpdate) -> None:
        """Take over what the sender has sent before its next message."""
        for key in update.removed:
            self.grammars.pop(key, None)
        self.grammars.update((grammar.key, grammar) for grammar in update.added)

    def whole(self, params: SamplingParams) -> SamplingParams:
        """`params` with the text of the grammar that they name. Raises CallboardError if the text was not sent."""
        if params.grammar is None:
            return params
        if (grammar := self.grammars.get(params.grammar.key)) is None:
            raise CallboardError(f"A message names the grammar {params.grammar.key!r}, which was not sent before it.")
        return params.with_grammar(grammar)

    def whole_request(self, request: Request) -> Request:
        """`request` with the text of its grammar. Raises CallboardError if the text was not sent."""
        return request if request.params.grammar is None else replace(request, params=self.whole(request.params))


def by_key(params: SamplingParams) -> SamplingParams:
    """`params` as they travel: their grammar is its key alone."""
    return params if params.grammar is None else params.with_grammar(Grammar(params.grammar.key, "", ""))


def request_by_key(request: Request) -> Request:
    """`request` as it travels: its grammar is its key alone."""
    return request if request.params.grammar is None else replace(request, params=by_key(request.params))
