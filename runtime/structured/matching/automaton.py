"""The eager engine: all grammar states, as arrays that a device can hold.

outlines-core builds a regular expression's token automaton. It cannot be interrupted and aborts the process when
memory runs out, so `build` runs in a child process (child.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import outlines_core
from numpy.typing import NDArray

from runtime.structured.matching.matcher import Matcher
from runtime.structured.pattern import NO_CHARACTER, GrammarError, special_text
from runtime.text.vocabulary import Vocabulary

MAX_STATES = 4096
MAX_BYTES = 64 << 20


@dataclass(frozen=True, eq=False)
class Automaton:
    """States 0, the first, to S - 1. Tokens with the same transitions share a class, which keeps the table small.
    `next_state[state, token_class[token]]` is the state after a token, or -1 if the token is not allowed.

    EOS is in the masks of the accepting states. A transition has an EOS token only if the grammar names it."""

    eos_ids: tuple[int, ...]
    token_class: NDArray[np.int32]  # [vocab_size], one of C classes; class 0 is allowed nowhere
    next_state: NDArray[np.int16]  # [S, C]
    masks: NDArray[np.int32]  # [S, num_words]; bit i % 32 of word i // 32 is token i's
    accepting: NDArray[np.bool_]  # [S]

    @property
    def nbytes(self) -> int:
        return self.token_class.nbytes + self.next_state.nbytes + self.masks.nbytes + self.accepting.nbytes


def build(expression: str, vocabulary: Vocabulary) -> Automaton:
    """Build an automaton. Raises GrammarError at this file's or the package's limits."""
    edge = f"\\x{{{NO_CHARACTER:x}}}"
    try:
        index = outlines_core.Index(f"{edge}(?:{expression}){edge}", _vocabulary(vocabulary))
    except ValueError as e:
        raise GrammarError(f"is refused by outlines-core ({e})") from None
    transitions: dict[int, dict[int, int]] = index.get_transitions()
    start = transitions.pop(index.get_initial_state())[len(vocabulary.tokens)]
    edge_id = len(vocabulary.tokens)
    _drop_within_special(transitions, edge_id + 1)
    coreachable, accepting_states = _coreachable(transitions, edge_id)
    states = {start: 0} | {state: at for at, state in enumerate(coreachable - {start}, start=1)}
    size, num_words = len(vocabulary.tokens), vocabulary.num_words
    if len(states) > MAX_STATES or len(states) * num_words * 4 > MAX_BYTES:
        raise GrammarError(f"has {len(states)} states; the limits are {MAX_STATES} states and {MAX_BYTES} bytes")

    columns = []
    for state in states:
        targets = {token: states[to] for token, to in transitions[state].items() if to in states and token < size}
        columns.append([np.fromiter(of, np.int64, len(targets)) for of in (targets.keys(), targets.values())])
    accepting = np.array([state in accepting_states for state in states])
    token_class, num_classes = _classes(columns, size)
    next_state = np.full((len(states), num_classes), -1, np.int16)
    masks = np.zeros((len(states), num_words), np.int32)
    for at, (tokens, reached) in enumerate(columns):
        allowed = np.zeros(num_words * 32, np.bool_)
        next_state[at, token_class[tokens]] = reached
        allowed[tokens] = True
        allowed[list(vocabulary.eos_ids)] |= accepting[at]
        masks[at] = np.packbits(allowed, bitorder="little").view(np.int32)
    automaton = Automaton(vocabulary.eos_ids, token_class, next_state, masks, accepting)
    if automaton.nbytes > MAX_BYTES:
        raise GrammarError(f"has an automaton of {automaton.nbytes} bytes; the limit is {MAX_BYTES} bytes")
    return automaton


def _drop_within_special(transitions: dict[int, dict[int, int]], part_id: int) -> None:
    """Remove the states within a special token's text, which single-byte tokens reach. They are reached by the token
    `part_id`, the bytes that the reserved characters share."""
    within = {targets[part_id] for targets in transitions.values() if part_id in targets}
    for state in within:
        transitions.pop(state, None)
    for targets in transitions.values():
        for token in [token for token, to in targets.items() if to in within]:
            del targets[token]


def _coreachable(transitions: dict[int, dict[int, int]], edge: int) -> tuple[set[int], set[int]]:
    """Return the co-reachable states, from which a text can be completed, and the accepting states."""
    accepting = {state for state, targets in transitions.items() if edge in targets}
    before: dict[int, set[int]] = {}
    for state, targets in transitions.items():
        for to in {to for token, to in targets.items() if token != edge}:
            before.setdefault(to, set()).add(state)
    coreachable, todo = set(accepting), list(accepting)
    while todo:
        found = before.get(todo.pop(), set()) - coreachable
        coreachable |= found
        todo += found
    return coreachable, accepting


def _classes(columns: list[list[NDArray[Any]]], size: int) -> tuple[NDArray[np.int32], int]:
    """Return each token's class and the number of classes. Two tokens share a class if their transitions' hashes are
    equal; with 2**18 tokens, two hashes collide once in 10**8 vocabularies."""
    generator = np.random.default_rng(0)
    hashes = np.zeros(size, np.uint64)
    for tokens, reached in columns:
        marks = generator.integers(1, 1 << 63, reached.max(initial=0) + 1, dtype=np.uint64)
        hashes[tokens] += marks[reached]
    _, classes = np.unique(np.append(hashes, np.uint64(0)), return_inverse=True)
    return classes[:-1].astype(np.int32), int(classes.max()) + 1


@cache
def _vocabulary(vocabulary: Vocabulary) -> outlines_core.Vocabulary:
    """Return the package's vocabulary with two more tokens: NO_CHARACTER, for both edges of a text; and the bytes that
    the reserved characters share. Special tokens have their reserved texts.

    The package stops at the first alternative that matches, so a text ends in a character that no text has. An
    expression that begins with digits takes exponential time, so a text begins with one, too. Single-byte tokens
    can begin that character; `_coreachable` drops these states."""
    edge = chr(NO_CHARACTER).encode()
    ids: dict[bytes, list[int]] = {edge: [len(vocabulary.tokens)]}
    for i, token in enumerate(vocabulary.tokens):
        if edge not in token:
            ids.setdefault(token or special_text(i).encode(), []).append(i)
    ids.setdefault(edge[:-1], []).append(len(vocabulary.tokens) + 1)
    return outlines_core.Vocabulary(len(vocabulary.tokens) + 2, ids)


class EagerMatcher(Matcher):
    """A matcher of an automaton on the host; a device does the same with the arrays."""

    engine = "eager"

    def __init__(self, automaton: Automaton) -> None:
        super().__init__(automaton.eos_ids)
        self.automaton = automaton
        self._states = [0]  # after each token

    @property
    def state(self) -> int:
        return self._states[-1]

    @property
    def is_accepting(self) -> bool:
        return bool(self.automaton.accepting[self.state])

    def _is_complete(self) -> bool:
        return not (self.automaton.next_state[self.state] >= 0).any()

    def _fill(self, mask: NDArray[np.int32]) -> None:
        mask[:] = self.automaton.masks[self.state]

    def _step(self, token: int) -> bool:
        automaton = self.automaton
        after = int(automaton.next_state[self.state, automaton.token_class[token]])
        if after >= 0:
            self._states.append(after)
        return after >= 0

    def _back(self, num_tokens: int) -> None:
        del self._states[-num_tokens:]
