"""Makes matchers: lazy ones at once, eager ones once their automaton has paid and is small."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.background import in_background
from runtime.base.types import CallboardError, Grammar, ThinkingBudget
from runtime.child import ChildPool, Overrun
from runtime.structured.matching.automaton import Automaton, EagerMatcher, build
from runtime.structured.matching.automaton_policy import AutomatonPolicy
from runtime.structured.matching.channel_thinking import ChannelThinkingMatcher
from runtime.structured.matching.lazy import LazyEngine, LazyMatcher
from runtime.structured.matching.matcher import Matcher
from runtime.structured.matching.thinking import ThinkingMatcher
from runtime.structured.pattern import GrammarError
from runtime.text.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_MEMORY = 4 << 30  # bytes of a build's address space
_PROTOTYPE_BYTES, _BYTES_PER_BYTE = 256 << 10, 8  # a matcher's size: fixed, and for each byte of its grammar


@dataclass(slots=True)
class _Entry:
    prototype: LazyMatcher
    prototype_bytes: int  # estimate
    host_s: float = 0.0  # seconds that the host spent on masks
    is_tried: bool = False  # an automaton's build has begun
    automaton: Automaton | None = None

    @property
    def is_ready(self) -> bool:
        """True if a matcher takes microseconds."""
        return self.automaton is not None or self.prototype.may_be_copied

    @property
    def nbytes(self) -> int:
        return self.prototype_bytes + (0 if self.automaton is None else self.automaton.nbytes)


class MatcherFactory:
    """Makes matchers for one vocabulary, in any thread. A child process builds automata in the background.

    It keeps at most `max_entries` grammars. Their matchers and automata take at most `max_bytes`."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        policy: AutomatonPolicy | None = None,
        deadline_s: float = 5.0,
        max_entries: int = 256,
        max_bytes: int = 256 << 20,
    ) -> None:
        """Without a policy, no automaton is built."""
        self.vocabulary, self.policy = vocabulary, policy
        self._lazy = LazyEngine(vocabulary)
        self._deadline_s = deadline_s
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._lock = threading.Lock()
        self._builder = ThreadPoolExecutor(1, "automaton")
        self._child = ChildPool(1, _MEMORY, 10, load, vocabulary)

    def is_ready(self, grammar: Grammar | None) -> bool:
        """Return True if `matcher` takes microseconds: the grammar is known, or there is none."""
        with self._lock:
            return grammar is None or ((entry := self._entries.get(grammar.key)) is not None and entry.is_ready)

    def matcher(self, grammar: Grammar | None, thinking: ThinkingBudget | None = None, alone: bool = False) -> Matcher:
        """Return a matcher at the beginning of an output that has a grammar, a reasoning budget, or both.

        A ready grammar takes 10 us, another one 1 to some 30 ms. With `alone`, no other output shares its lexer. Raises
        CallboardError if the grammar is too complex."""
        inner = None if grammar is None else self._matcher(grammar, alone)
        if thinking is not None:
            kind = ThinkingMatcher if thinking.channel_ids is None else ChannelThinkingMatcher
            return kind(thinking, self.vocabulary, inner)
        assert inner is not None
        return inner

    def _matcher(self, grammar: Grammar, alone: bool) -> Matcher:
        if alone:
            return self._lazy.matcher(grammar.lark)
        with self._lock:
            entry = self._entries.get(grammar.key)
            is_ready = entry is not None and entry.is_ready
        if entry is None or not is_ready:
            prototype = self._lazy.matcher(grammar.lark)
        with self._lock:
            num_entries = len(self._entries)
            entry = self._entries.setdefault(
                grammar.key, entry or _Entry(prototype, _PROTOTYPE_BYTES + _BYTES_PER_BYTE * len(grammar.lark))
            )
            self._entries.move_to_end(grammar.key)
            if not is_ready:
                entry.prototype = prototype
            if self.policy is not None and grammar.expression and not entry.is_tried:
                entry.is_tried = self.policy.pays(entry.host_s, grammar.expression)
                if entry.is_tried:
                    in_background(self._builder.submit(self._build, grammar, entry, self.policy), "an automaton")
            if len(self._entries) > num_entries:
                self._trim()
            return EagerMatcher(entry.automaton) if entry.automaton else entry.prototype.copy()

    def fill(
        self, matchers: Sequence[LazyMatcher], masks: NDArray[np.int32], numbers: Sequence[int]
    ) -> list[CallboardError | None]:
        """See LazyEngine.fill."""
        return self._lazy.fill(matchers, masks, numbers)

    def spent(self, grammar: Grammar, seconds: float) -> None:
        """Note the time that the host spent on masks of an output that has ended."""
        with self._lock:
            if (entry := self._entries.get(grammar.key)) is not None:
                entry.host_s += seconds

    def close(self) -> None:
        """End the background work."""
        self._builder.shutdown(wait=False, cancel_futures=True)
        self._child.close()

    def _build(self, grammar: Grammar, entry: _Entry, policy: AutomatonPolicy) -> None:
        try:
            automaton, seconds = self._child.run(self._deadline_s, build_loaded, grammar.expression)
        except (GrammarError, Overrun) as e:
            logger.info("the lazy engine keeps a grammar: it %s", e)
            return
        with self._lock:
            policy.built(grammar.expression, seconds)
            entry.automaton = automaton
            self._trim()

    def _trim(self) -> None:
        held = sum(entry.nbytes for entry in self._entries.values())
        while len(self._entries) > self._max_entries or (held > self._max_bytes and len(self._entries) > 1):
            held -= self._entries.popitem(last=False)[1].nbytes


# ---- in the child ----------------------------------------------------------------------------------------------------

_loaded: list[Vocabulary] = []


def load(vocabulary: Vocabulary) -> None:
    """Keep the vocabulary of all builds, and do the work that only the first build needs."""
    _loaded[:] = [vocabulary]
    build("a", vocabulary)


def build_loaded(expression: str) -> tuple[Automaton, float]:
    """Return the automaton, and the CPU seconds of its build."""
    start = time.process_time()
    automaton = build(expression, _loaded[0])
    return automaton, time.process_time() - start
