"""The eager engine: a grammar worked out in full, as arrays that a device can hold.

outlines-core builds the token automaton of a regular expression. It cannot be interrupted and aborts the process when
memory runs out, so `build` belongs into a child process (child.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import outlines_core
from numpy.typing import NDArray

from runtime.core.types import CallboardError
from runtime.structured.pattern import GrammarError
from runtime.structured.vocabulary import Vocabulary

MAX_STATES = 4096
MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class Automaton:
    """States 0 (the beginning) to S - 1. Tokens that lead to the same place from everywhere share a class, so that the
    table is small: `next_state[state, token_class[token]]` is where a token leads, -1 where it is not allowed.

    EOS is in the masks of the accepting states; it has no state to lead to."""

    eos_ids: tuple[int, ...]
    token_class: NDArray[np.int32]  # [vocab_size], of C classes; class 0 is allowed nowhere
    next_state: NDArray[np.int16]  # [S, C]
    masks: NDArray[np.int32]  # [S, num_words]; bit i % 32 of word i // 32 is token i's
    accepting: NDArray[np.bool_]  # [S]

    @property
    def nbytes(self) -> int:
        return self.token_class.nbytes + self.next_state.nbytes + self.masks.nbytes + self.accepting.nbytes


def build(expression: str, vocabulary: Vocabulary) -> Automaton:
    """Raises GrammarError if the automaton is over a limit."""
    index = outlines_core.Index(expression, _vocabulary(vocabulary))
    transitions: dict[int, dict[int, int]] = index.get_transitions()
    start = index.get_initial_state()
    # States with nothing but EOS have no row in the index.
    states = {start: 0}
    for targets in transitions.values():
        for state in targets.values():
            states.setdefault(state, len(states))
    size, num_words = len(vocabulary.tokens), vocabulary.num_words
    if len(states) > MAX_STATES or len(states) * num_words * 4 > MAX_BYTES:
        raise GrammarError(f"has {len(states)} states; the limits are {MAX_STATES} states and {MAX_BYTES} bytes")

    columns: dict[int, tuple[NDArray[Any], NDArray[Any]]] = {}
    for state, targets in transitions.items():
        tokens = np.fromiter(targets.keys(), np.int64, len(targets))
        reached = np.fromiter((states[t] for t in targets.values()), np.int64, len(targets))
        kept = ~np.isin(tokens, vocabulary.eos_ids)
        columns[states[state]] = tokens[kept], reached[kept]
    token_class, num_classes = _classes(columns, size)
    next_state = np.full((len(states), num_classes), -1, np.int16)
    masks = np.zeros((len(states), num_words), np.int32)
    accepting = np.zeros(len(states), np.bool_)
    accepting[[states[state] for state in index.get_final_states() if state in states]] = True
    for at in range(len(states)):
        allowed = np.zeros(num_words * 32, np.bool_)
        if at in columns:
            tokens, reached = columns[at]
            next_state[at, token_class[tokens]] = reached
            allowed[tokens] = True
        allowed[list(vocabulary.eos_ids)] = accepting[at]
        masks[at] = np.packbits(allowed, bitorder="little").view(np.int32)
    automaton = Automaton(vocabulary.eos_ids, token_class, next_state, masks, accepting)
    if automaton.nbytes > MAX_BYTES:
        raise GrammarError(f"has an automaton of {automaton.nbytes} bytes; the limit is {MAX_BYTES} bytes")
    return automaton


def _classes(columns: dict[int, tuple[NDArray[Any], NDArray[Any]]], size: int) -> tuple[NDArray[np.int32], int]:
    """Each token's class and their number. A class is told by a hash of all that its tokens do; with 2**18 tokens, two
    have the same by chance once in 10**8 vocabularies."""
    generator = np.random.default_rng(0)
    hashes = np.zeros(size, np.uint64)
    for tokens, reached in columns.values():
        marks = generator.integers(1, 1 << 63, reached.max(initial=0) + 1, dtype=np.uint64)
        hashes[tokens] += marks[reached]
    _, classes = np.unique(np.append(hashes, np.uint64(0)), return_inverse=True)
    return classes[:-1].astype(np.int32), int(classes.max()) + 1


@cache
def _vocabulary(vocabulary: Vocabulary) -> outlines_core.Vocabulary:
    ids: dict[bytes, list[int]] = {}
    for i, token in enumerate(vocabulary.tokens):
        if token:
            ids.setdefault(token, []).append(i)
    return outlines_core.Vocabulary(vocabulary.eos_ids[0], ids)


class EagerMatcher:
    """Where one output is in an automaton, on the host: what the device does, in numpy. Methods as LazyMatcher's."""

    engine = "eager"

    def __init__(self, automaton: Automaton) -> None:
        self.automaton = automaton
        self._states = [0]  # after each token
        self._ended = 0  # EOS tokens taken

    @property
    def state(self) -> int:
        return self._states[-1]

    @property
    def is_accepting(self) -> bool:
        return bool(self.automaton.accepting[self.state])

    @property
    def is_finished(self) -> bool:
        return bool(self._ended) or not (self.automaton.next_state[self.state] >= 0).any()

    def fill(self, mask: NDArray[np.int32]) -> None:
        if self._ended:
            mask[:] = 0
            for i in self.automaton.eos_ids:
                mask.view(np.uint32)[i // 32] |= np.uint32(1 << i % 32)
        else:
            mask[:] = self.automaton.masks[self.state]

    def fill_ahead(self, masks: NDArray[np.int32], guesses: Sequence[int]) -> int:
        taken = self.allowed(guesses)
        self.fill(masks[0])
        for i in range(taken):
            self.advance(guesses[i : i + 1])
            self.fill(masks[i + 1])
        self.rollback(taken)
        return taken

    def advance(self, tokens: Sequence[int]) -> None:
        if (taken := self._walk(tokens)) < len(tokens):
            self.rollback(taken)
            raise CallboardError(f"The token {tokens[taken]} is not what this request's grammar allows there.")

    def allowed(self, tokens: Sequence[int]) -> int:
        taken = self._walk(tokens)
        self.rollback(taken)
        return taken

    def rollback(self, num_tokens: int) -> None:
        ends = min(num_tokens, self._ended)
        self._ended -= ends
        del self._states[len(self._states) - (num_tokens - ends) :]

    def _walk(self, tokens: Sequence[int]) -> int:
        """Takes tokens as long as they are allowed."""
        automaton = self.automaton
        for i, token in enumerate(tokens):
            if token in automaton.eos_ids:
                if self._ended or not self.is_accepting:
                    return i
                self._ended += 1
            elif self._ended or (after := int(automaton.next_state[self.state, automaton.token_class[token]])) < 0:
                return i
            else:
                self._states.append(after)
        return len(tokens)
