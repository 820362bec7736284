"""Which engine serves a grammar: the lazy one at once, the eager one once it is used often and has come out small."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.core.types import CallboardError, Grammar
from runtime.structured.automaton import Automaton, EagerMatcher, build
from runtime.structured.child import Child
from runtime.structured.lazy import LazyEngine, LazyMatcher
from runtime.structured.matcher import Matcher
from runtime.structured.pattern import GrammarError
from runtime.structured.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

EAGER_AFTER = 2  # uses
_MEMORY = 4 << 30  # address space of a build
_START_S = 60.0  # at most, for a child to start and to read the vocabulary


@dataclass(slots=True)
class _Entry:
    prototype: LazyMatcher
    uses: int = 0
    automaton: Automaton | None = None


class Engines:
    """Matchers for one vocabulary. Any thread may call it; what is built eagerly, a child builds in the background.

    Grammars are kept by what they allow: at most `max_entries`, whose automata have `max_bytes` in all."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        eager_after: int = EAGER_AFTER,
        deadline_s: float = 5.0,
        max_entries: int = 256,
        max_bytes: int = 256 << 20,
    ) -> None:
        """The eager engine gets a grammar at its use number `eager_after`; 0: never."""
        self.vocabulary = vocabulary
        self._lazy = LazyEngine(vocabulary)
        self._eager_after, self._deadline_s = eager_after, deadline_s
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._builder = ThreadPoolExecutor(1, "automaton")
        self._child: Child | None = None
        self.num_served = {"lazy": 0, "eager": 0}  # requests, by engine

    def matcher(self, grammar: Grammar) -> Matcher:
        """For one output, at its beginning: 10 us for a known grammar, else about 1 ms. Raises CallboardError if the
        grammar is too complex."""
        with self._lock:
            entry = self._entries.get(grammar.key)
            known = entry is not None and (entry.automaton is not None or entry.prototype.may_be_copied)
        if entry is None or not known:
            prototype = self._lazy.matcher(grammar.lark)
        with self._lock:
            entry = self._entries.setdefault(grammar.key, entry or _Entry(prototype))
            self._entries.move_to_end(grammar.key)
            if not known:
                entry.prototype = prototype
            entry.uses += 1
            if grammar.expression and entry.uses == self._eager_after:
                self._builder.submit(self._build, grammar, entry)
            self._trim()
            found: Matcher = EagerMatcher(entry.automaton) if entry.automaton else entry.prototype.copy()
            self.num_served[found.engine] += 1
        return found

    def fill(
        self, matchers: Sequence[LazyMatcher], masks: NDArray[np.int32], numbers: Sequence[int]
    ) -> list[CallboardError | None]:
        """As LazyEngine.fill."""
        return self._lazy.fill(matchers, masks, numbers)

    def close(self) -> None:
        """End the background work."""
        self._builder.shutdown(wait=False, cancel_futures=True)
        if self._child is not None:
            self._child.kill()

    def _build(self, grammar: Grammar, entry: _Entry) -> None:
        try:
            if self._child is None or not self._child.is_alive:
                self._child = Child(_MEMORY, niceness=10)
                self._child.run(_START_S, load, self.vocabulary)
            automaton = self._child.run(self._deadline_s, build_loaded, grammar.expression)
        except GrammarError as e:
            logger.info("the lazy engine keeps a grammar: it %s", e)
            return
        with self._lock:
            entry.automaton = automaton
            self._trim()

    def _trim(self) -> None:
        held = sum(e.automaton.nbytes for e in self._entries.values() if e.automaton is not None)
        while len(self._entries) > self._max_entries or (held > self._max_bytes and len(self._entries) > 1):
            _, gone = self._entries.popitem(last=False)
            held -= gone.automaton.nbytes if gone.automaton is not None else 0


# ---- in the child ----------------------------------------------------------------------------------------------------

_loaded: list[Vocabulary] = []


def load(vocabulary: Vocabulary) -> None:
    """Before the first build: what all of them need."""
    _loaded[:] = [vocabulary]
    build("a", vocabulary)


def build_loaded(expression: str) -> Automaton:
    return build(expression, _loaded[0])
