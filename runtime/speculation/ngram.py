"""Prompt lookup: draft tokens from a request's own text, with indexes of bounded cost.

A request's text is its prediction, then the tokens that it begins with; it never changes. All choices for one
prompt share its index, and a step adds a bounded piece to it. Later tokens go into a dictionary per request.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from operator import mul

import numpy as np

from runtime.base.arrays import Int32s
from runtime.base.types import MAX_DRAFT_TOKENS
from runtime.core.request_state import RequestState
from runtime.speculation.choose_k import Drafter

STEP_WORK = 4096  # text tokens that one step indexes, over all requests: about a millisecond
OWN_COST = 8  # work of indexing one output token, in plain Python
TEXT_COST = 512  # fixed work for a piece of text, besides its tokens
MAX_TEXT_TOKENS = 1 << 22  # tokens in all texts, 20 to 36 bytes each; further texts are not indexed
_LONG, _SHORT = 4, 2  # sizes of n-grams: the long one is looked up first
_FEW = 32  # up to this many n-grams are inserted faster by plain Python than by numpy
SHORT_PROMPT = 512  # tokens; shorter prompts go into the requests' dictionaries, which have faster lookups
_MASK = (1 << 64) - 1
# Odd and random at each start, so that clients cannot choose tokens that collide.
_FACTORS = [secrets.randbits(64) | 1 for _ in range(_LONG)]


class TextIndex:
    """Hash tables from each n-gram of a fixed text to the position where it ends for the last time, one per size.

    The text is indexed from its end to its start, so an incomplete index also finds the last position."""

    def __init__(self, prediction: Sequence[int], tokens: array[int]) -> None:
        """The text is `prediction`, then `tokens`."""
        self._prediction = prediction
        self._text = array("i", bytes(4 * len(prediction))) + tokens
        self._filled = len(prediction)  # `_text` holds the text from here on
        self._left = len(self._text)  # n-grams that end before this position are not indexed yet
        self._bits = (2 * len(self._text)).bit_length()  # half the slots or more stay empty
        self._tables = {size: np.zeros(1 << self._bits, np.int32) for size in (_LONG, _SHORT)}  # 0 if a slot is empty
        self.num_users = 0

    def __len__(self) -> int:
        return len(self._text)

    @property
    def is_partial(self) -> bool:
        """True if a part of the text is not indexed yet."""
        return self._left > _SHORT

    def advance(self, most: int) -> int:
        """Index up to `most` more tokens; returns their number."""
        end, start = self._left, max(_SHORT, self._left - most)
        if (first := max(0, start - _LONG)) < self._filled:
            self._text[first : self._filled] = array("i", self._prediction[first : self._filled])
            self._filled = first
        text = np.frombuffer(self._text, np.int32)
        for size, table in self._tables.items():
            self._insert(table, text, np.arange(max(start, size), end, dtype=np.int32), size)
        self._left = start
        return end - start

    def _insert(self, table: Int32s, text: Int32s, ends: Int32s, size: int) -> None:
        """Insert n-grams by their `ends` with linear probing. `ends` rise, and lie before all ends in the table."""
        mixed = np.zeros(len(ends), np.uint64)
        for at, factor in zip(range(size, 0, -1), _FACTORS, strict=False):
            mixed += text[ends - at].astype(np.uint64) * np.uint64(factor)
        slots = (mixed >> np.uint64(64 - self._bits)).astype(np.int64)
        while len(ends) > _FEW:
            empty = table[slots] == 0
            table[slots[empty]] = ends[empty]  # numpy keeps the last of several ends for one slot
            found = table[slots]
            differs = text[found - 1] != text[ends - 1]
            for at in range(2, size + 1):
                differs |= text[found - at] != text[ends - at]
            ends, slots = ends[differs], (slots[differs] + 1) & (len(table) - 1)
        for end, slot in zip(reversed(ends.tolist()), reversed(slots.tolist()), strict=True):
            at = self._probe(table, slot, self._text[end - size : end])
            table[at] = table[at] or end

    def find(self, gram: array[int]) -> int:
        """Return where these tokens end for the last time in the indexed part of the text; 0 if nowhere."""
        if (table := self._tables.get(len(gram))) is None:
            return 0  # the request is shorter than an n-gram
        slot = (sum(map(mul, gram, _FACTORS)) & _MASK) >> (64 - self._bits)
        return int(table.item(self._probe(table, slot, gram)))

    def _probe(self, table: Int32s, slot: int, gram: array[int]) -> int:
        """Return the first slot from `slot` on that has the n-gram or is empty."""
        size, text, last = len(gram), self._text, len(table) - 1
        while (end := table.item(slot)) and text[end - size : end] != gram:
            slot = (slot + 1) & last
        return slot


class _Lookup:
    """The index of one request. Positions count from the start of its prediction."""

    __slots__ = ("ends", "has_text", "key", "seen", "text")

    def __init__(self, state: RequestState) -> None:
        self.key = id(state.request.prediction), id(state.request.token_ids)
        length = len(state.request.prediction) + len(state.request.token_ids)
        self.has_text = bool(state.request.prediction) or length > SHORT_PROMPT
        self.text: TextIndex | None = None  # index of its text; None before the first lookup, or without room
        self.ends: dict[bytes, int] = {}  # last ends of n-grams that end after the text
        self.seen = length if self.has_text else 1  # n-grams that end from here on are not in `ends` yet


class Ngram(Drafter):
    """Prompt lookup: drafts the tokens that followed the last earlier occurrence of the request's last tokens.

    Source: https://github.com/apoorvumang/prompt-lookup-decoding. A repetition may continue into its own draft tokens.
    A request's prediction counts as text before its prompt. The first draft tokens of an output are its prediction."""

    def __init__(self) -> None:
        self._lookups: dict[str, _Lookup] = {}  # lookups by request id
        # Indexes by the identities of their text's two parts. An entry keeps both parts alive.
        self._texts: dict[tuple[int, int], tuple[TextIndex, Sequence[int], Sequence[int]]] = {}
        self._work = STEP_WORK  # work left in this step
        self.num_held = 0  # tokens in all texts
        self.num_indexed = 0  # text tokens indexed since the start

    def begin_step(self) -> None:
        self._work = STEP_WORK

    def guess(self, state: RequestState, most: int) -> list[int]:
        tokens, prediction = state.tokens, state.request.prediction
        if prediction and len(tokens) == state.request.prompt_len:
            return list(prediction[:most])
        lookup = self._lookups.get(state.request.request_id)
        if lookup is None:
            lookup = self._lookups[state.request.request_id] = _Lookup(state)
        if lookup.text is None and lookup.has_text:
            self._begin_text(lookup, state)
        if lookup.text is not None and lookup.text.is_partial and self._work > 0:
            count = lookup.text.advance(self._work)
            self._work -= TEXT_COST + count
            self.num_indexed += count
        self._extend_own(lookup, state)
        after = _find(lookup, state)
        if not after:
            return []
        guesses, at = list(prediction[after : after + most]), max(0, after - len(prediction))
        guesses += tokens[at : at + most - len(guesses)]
        for i in range(most - len(guesses)):
            guesses.append(guesses[i])
        return guesses

    def forget(self, state: RequestState) -> None:
        lookup = self._lookups.pop(state.request.request_id, None)
        if lookup is None or (text := lookup.text) is None:
            return
        text.num_users -= 1
        if not text.num_users:
            self.num_held -= len(text)
            del self._texts[lookup.key]

    def _begin_text(self, lookup: _Lookup, state: RequestState) -> None:
        """Give a request its text's index: another choice's, or a new one if there is room."""
        prediction, began = state.request.prediction, state.request.token_ids
        held = self._texts.get(lookup.key)
        if held is None:
            length = len(prediction) + len(began)
            if self._work <= 0 or self.num_held + length > MAX_TEXT_TOKENS:
                return
            held = self._texts[lookup.key] = TextIndex(prediction, state.tokens[: len(began)]), prediction, began
            self.num_held += length
        lookup.text = held[0]
        lookup.text.num_users += 1

    def _extend_own(self, lookup: _Lookup, state: RequestState) -> None:
        """Index the tokens after the text, except the n-gram at the end, which nothing follows yet.

        Tokens that accumulated while drafting did not pay count as work of the step."""
        offset, ends, tokens = len(state.request.prediction), lookup.ends, state.tokens
        start = lookup.seen - offset
        end = len(tokens)
        if end - start > MAX_DRAFT_TOKENS + 1:
            end = min(end, start + max(MAX_DRAFT_TOKENS + 1, self._work // OWN_COST))
            self._work -= OWN_COST * (end - start)
        for at in range(start, end):
            if at >= _LONG:
                ends[tokens[at - _LONG : at].tobytes()] = ends[tokens[at - _SHORT : at].tobytes()] = at + offset
            else:
                for size in (_LONG, _SHORT):
                    ends[_gram(state, at, size).tobytes()] = at + offset
        lookup.seen = end + offset


def _gram(state: RequestState, end: int, size: int) -> array[int]:
    """Return the `size` tokens before position `end`, continued into the request's prediction; fewer at its start."""
    if end >= size:
        return state.tokens[end - size : end]
    return array("i", state.request.prediction[end - size :]) + state.tokens[:end]


def _find(lookup: _Lookup, state: RequestState) -> int:
    """Return the position after the last earlier occurrence of the request's last tokens; 0 if there is none."""
    end, text = len(state.tokens), lookup.text
    long, short = _gram(state, end, _LONG), _gram(state, end, _SHORT)
    if after := lookup.ends.get(long.tobytes()):
        return after
    shared = 0 if text is None else text.find(short)
    if text is not None and shared and (after := text.find(long)):
        return after
    return lookup.ends.get(short.tobytes()) or shared
