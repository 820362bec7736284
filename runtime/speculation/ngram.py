"""Draft tokens from the longest earlier match: in a request's own text, and in earlier outputs.

A request's text is its prediction, then the tokens that it begins with; it never changes. All choices for one
prompt share its index, and a step adds a bounded piece to it. Later tokens go into dictionaries per request.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from runtime.base.types import MAX_DRAFT_TOKENS, TOKEN_BYTES
from runtime.core.request_state import RequestState
from runtime.speculation.choose_k import MAX_CHOSEN_TOKENS, Drafter
from runtime.speculation.gram_chains import DEPTH, MAX_LINKS, GramChains, Longest, mixed
from runtime.speculation.past_outputs import PIECE_COST, PastOutputs

STEP_WORK = 4096  # text tokens that one step indexes, over all requests: about a millisecond
OWN_COST = 8  # work of indexing one output token, in plain Python
MAX_TEXT_TOKENS = 1 << 22  # tokens in all texts, 20 to 28 bytes each; further texts are not indexed
SIZES = (2, 5)  # n-grams that are indexed; the largest is looked up first
PAST_TOKENS = 1 << 19  # tokens of earlier outputs that an engine keeps, 12 to 16 bytes each
SHORT_PROMPT = 512  # tokens; shorter prompts go into the requests' dictionaries, which have faster look-ups
REACH = 2  # draft tokens for each token of a match


class TextIndex:
    """The n-grams of a fixed text. It is indexed from its end to its start, so a part of it has the newest."""

    def __init__(self, prediction: Sequence[int], tokens: array[int]) -> None:
        """The text is `prediction`, then `tokens`."""
        self._prediction = prediction
        self.text = array("i", bytes(TOKEN_BYTES * len(prediction))) + tokens
        self._filled = len(prediction)  # `text` holds the text from here on
        self._left = len(self.text)  # n-grams that end before this position are not indexed yet
        self.chains = GramChains(len(self.text), SIZES)
        self.num_users = 0

    def __len__(self) -> int:
        return len(self.text)

    @property
    def is_partial(self) -> bool:
        """True if a part of the text is not indexed yet."""
        return self._left > SIZES[0]

    def advance(self, most: int) -> int:
        """Index up to `most` more tokens; returns their number."""
        end, start = self._left, max(SIZES[0], self._left - most)
        if (first := max(0, start - DEPTH)) < self._filled:
            self.text[first : self._filled] = array("i", self._prediction[first : self._filled])
            self._filled = first
        self.chains.insert(np.frombuffer(self.text, np.int32), start - 1, end - 1, older=True)
        self._left = start
        return end - start


class _Lookup:
    """The index of one request. Positions count from the start of its prediction."""

    __slots__ = ("grams", "has_text", "is_complete", "key", "known", "match", "seen", "step", "text")

    def __init__(self, state: RequestState) -> None:
        self.key = id(state.request.prediction), id(state.request.token_ids)
        length = len(state.request.prediction) + len(state.request.token_ids)
        self.has_text = bool(state.request.prediction) or length > SHORT_PROMPT
        self.text: TextIndex | None = None  # index of its text; None before the first lookup, or without room
        self.seen = length if self.has_text else 1  # n-grams that end from here on are not in `grams` yet
        self.grams = [_Grams(size, self.seen) for size in SIZES]
        self.match = Longest(array("i"))
        self.known = 0  # length of the request's tokens when it was found
        self.step = 0  # the step that it was found in
        self.is_complete = False  # all tokens were indexed then


class _Grams:
    """The n-grams of one size that end after a request's text."""

    __slots__ = ("began", "last", "links", "size")

    def __init__(self, size: int, began: int) -> None:
        self.size, self.began = size, began  # tokens of an n-gram; the first end
        self.last: dict[bytes, int] = {}  # the n-grams' last ends
        self.links = array("i")  # the same n-gram's end before each end from `began` on; 0 without one

    def ends(self, gram: bytes) -> list[int]:
        """Return the newest MAX_LINKS ends of an n-gram, the newest first."""
        end, found = self.last.get(gram, 0), list[int]()
        while end and len(found) < MAX_LINKS:
            found.append(end)
            end = self.links[end - self.began]
        return found


class Ngram(Drafter):
    """Drafts the tokens that followed the longest earlier match of a request's last tokens.

    Equally long matches vote, as in SuffixDecoding (arXiv 2411.04975). A repetition may continue into its own draft
    tokens. A request's prediction counts as text before its prompt, and its output is first expected to begin like it.
    Longer matches in earlier outputs are found, too, if they have the request's adapter and cache salt."""

    first_acceptance = (0.5, 0.6, 0.8, 0.9)  # matches of 2, 4, 8, 16 or more tokens

    def __init__(self, num_past_tokens: int = 0, most: int = MAX_DRAFT_TOKENS) -> None:
        """Keep the last `num_past_tokens` tokens of outputs. A row has up to `most` draft tokens."""
        self.most = most
        self.most_chosen = most if most > MAX_DRAFT_TOKENS else MAX_CHOSEN_TOKENS
        self._lookups: dict[str, _Lookup] = {}  # lookups by request id
        # Indexes by the identities of their text's two parts. An entry keeps both parts alive.
        self._texts: dict[tuple[int, int], tuple[TextIndex, Sequence[int], Sequence[int]]] = {}
        self._past = PastOutputs(num_past_tokens)
        self._work = STEP_WORK  # work left in this step
        self._step = 0
        self.num_held = 0  # tokens in all texts
        self.num_indexed = 0  # text tokens indexed since the start
        self.num_compared = 0  # earlier places that were compared since the start

    def begin_step(self) -> None:
        self._past.advance(self._work)  # what the last step left
        self._work = STEP_WORK
        self._step += 1

    def on_weights(self) -> None:
        self._past.clear()

    def kind(self, state: RequestState) -> int | None:
        length = self._match(state).length
        return min(length.bit_length() - 2, 3) if length else None

    def guess(self, state: RequestState, most: int) -> list[int] | None:
        match = self._match(state)
        if not match.length:
            return None
        return _vote([self._after(state, match, end, min(most, REACH * match.length)) for end in match.ends])

    def forget(self, state: RequestState) -> None:
        self._past.add((state.request.adapter, state.request.cache_salt), state.tokens[state.prompt_len :])
        lookup = self._lookups.pop(state.request.request_id, None)
        if lookup is None or (text := lookup.text) is None:
            return
        text.num_users -= 1
        if not text.num_users:
            self.num_held -= len(text)
            del self._texts[lookup.key]

    def _match(self, state: RequestState) -> Longest:
        """Return the longest match, after indexing what the step has work left for."""
        num_tokens = len(state.tokens)
        lookup = self._lookups.get(state.request.request_id)
        if lookup is None:
            lookup = self._lookups[state.request.request_id] = _Lookup(state)
        elif lookup.known == num_tokens and (lookup.is_complete or lookup.step == self._step):
            return lookup.match
        match, num_new = lookup.match, num_tokens - lookup.known
        is_longest = lookup.is_complete or match.length >= DEPTH
        lookup.is_complete, lookup.step, lookup.known = self._extend(lookup, state), self._step, num_tokens
        if not (is_longest and match.length and num_new <= DEPTH and self._follow(state, match, num_new)):
            lookup.match = self._search(lookup, state)
        return lookup.match

    def _follow(self, state: RequestState, match: Longest, num_new: int) -> bool:
        """Move a match to where the last `num_new` tokens followed it. Return False if they did not.

        No other place has a longer match then: without these tokens it would have been longer than this one."""
        new = state.tokens[len(state.tokens) - num_new :].tolist()
        match.ends = [end + num_new for end in match.ends if self._after(state, match, end, num_new) == new]
        match.length += num_new
        return bool(match.ends)

    def _after(self, state: RequestState, match: Longest, end: int, most: int) -> list[int]:
        return _after(state, end, most) if match.text is None else self._past.after(match.text, end, most)

    def _search(self, lookup: _Lookup, state: RequestState) -> Longest:
        prediction, tokens = state.request.prediction, state.tokens
        tail = _before(state, len(prediction) + len(tokens), DEPTH)
        longest = Longest(tail)
        if prediction and len(tokens) == state.prompt_len:
            longest.length, longest.ends = DEPTH, [0]
            return longest
        tail_bytes = tail.tobytes()
        for grams in reversed(lookup.grams):
            size = grams.size
            if longest.length < size <= len(tail):
                ends = grams.ends(tail_bytes[-TOKEN_BYTES * size :])
                if lookup.text is not None and len(ends) < MAX_LINKS:
                    ends += lookup.text.chains.ends(size, mixed(tail, size))
                for end in ends:
                    longest.offer(size, _before(state, end, DEPTH), end)
        if longest.length < DEPTH:
            self._past.search((state.request.adapter, state.request.cache_salt), tail, longest)
        self.num_compared += longest.num_compared
        return longest

    def _extend(self, lookup: _Lookup, state: RequestState) -> bool:
        """Index what the step has work left for. Return True if nothing is left to index."""
        if lookup.text is None and lookup.has_text:
            self._begin_text(lookup, state)
        text = lookup.text
        if text is not None and text.is_partial and self._work > 0:
            count = text.advance(self._work)
            self._work -= PIECE_COST + count
            self.num_indexed += count
        self._extend_own(lookup, state)
        is_whole = not lookup.has_text or (text is not None and not text.is_partial)
        return is_whole and lookup.seen == len(state.request.prediction) + len(state.tokens)

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
        first, end = lookup.seen, len(state.request.prediction) + len(state.tokens)
        if end - first > MAX_DRAFT_TOKENS + 1:
            end = min(end, first + max(MAX_DRAFT_TOKENS + 1, self._work // OWN_COST))
            self._work -= OWN_COST * (end - first)
        # Padded before the first token: a look-up compares tokens, and so skips such an n-gram.
        count = end - first + SIZES[-1]
        text, stop = _before(state, end, count).tobytes().rjust(TOKEN_BYTES * count), TOKEN_BYTES * SIZES[-1]
        for grams in lookup.grams:
            last, links, begin = grams.last, grams.links, TOKEN_BYTES * (SIZES[-1] - grams.size)
            for at in range(first, end):
                shift = TOKEN_BYTES * (at - first)
                gram = text[begin + shift : stop + shift]
                links.append(last.get(gram, 0))
                last[gram] = at
        lookup.seen = end


def _before(state: RequestState, end: int, most: int) -> array[int]:
    """Return the `most` tokens before position `end`, or all if there are fewer."""
    prediction, at = state.request.prediction, end - len(state.request.prediction)
    if at >= most or not prediction:
        return state.tokens[max(0, at - most) : at]
    before = array("i", prediction[max(0, end - most) : end])
    return before + state.tokens[:at] if at > 0 else before


def _after(state: RequestState, at: int, most: int) -> list[int]:
    """Return `most` tokens from position `at` on, as if the request went on as it did from there."""
    prediction = state.request.prediction
    after = list(prediction[at : at + most])
    first = max(0, at - len(prediction))
    after += state.tokens[first : first + most - len(after)]
    for i in range(most - len(after)):
        after.append(after[i])
    return after


def _vote(paths: list[list[int]]) -> list[int]:
    """Return the path with the most votes, token by token. The first path wins a tie."""
    at = 0
    while len(paths) > 1:
        tokens = [other[at] for other in paths if len(other) > at]
        if not tokens:
            break
        token = max(tokens, key=tokens.count)
        paths = [other for other in paths if len(other) > at and other[at] == token]
        at += 1
    return paths[0]
