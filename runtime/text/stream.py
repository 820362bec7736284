"""Token ids in, text out, a piece at a time and exactly once.

Sent text cannot be withdrawn, so two kinds of text wait: the bytes of an incomplete character, and the longest tail
that may begin a stop string. A token's cost depends only on its own length. Bytes go through an incremental UTF-8
decoder, and characters through an Aho-Corasick automaton (CACM 18(6), 1975) over all stop strings. The
automaton's state is the tail that waits."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Sequence

from runtime.base.types import CallboardError
from runtime.text.pieces import strip_spaces
from runtime.text.tokenizer import Tokenizer


class TextStream:
    """The text of one request's output.

    The concatenated results of `push` and `finish` equal what `Tokenizer.decode` returns for all ids, cut at the first
    stop string. The first complete stop string counts; among those with the same end, the longest one. So the result
    does not depend on how tokens are grouped into pushes.

    `prompt_tail_ids`, the last few ids of the prompt, make the output a continuation: a leading space stays, and a
    character that the prompt began is completed. Without them the output is an independent text. `kept_special_ids` are
    the special tokens that are shown to the reader. `before_special` is a character that precedes each of them, and
    that no other text has then.

    A stop string that spells a special token is also found where the text does not show this token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] | StopStrings = (),
        include_stop_str: bool = False,
        skip_special_tokens: bool = True,
        prompt_tail_ids: Iterable[int] = (),
        kept_special_ids: frozenset[int] = frozenset(),
        before_special: str = "",
    ) -> None:
        self.stopped: str | None = None  # the stop string that ended the text
        self.num_chars = 0  # decoded so far, including text that a stop string cut off
        self._pieces = tokenizer.pieces
        self._skipped = tokenizer.special_ids - kept_special_ids if skip_special_tokens else frozenset()
        self._kept, self._before_special = kept_special_ids, before_special
        self._at_start = True  # no token has been decoded yet
        self._leading_spaces = self._pieces.leading_spaces  # still to be dropped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        for token_id in prompt_tail_ids:
            self._decode(token_id)
        self._stops = stop if isinstance(stop, StopStrings) else StopStrings(stop) if stop else None
        self._state = 0
        self._special: _SpecialStops | None = None
        if self._stops is not None and (self._skipped or before_special):
            spelled = {stop for stop in self._stops.matches if stop and tokenizer.control_tokens.are_in(stop)}
            self._special = _SpecialStops(sorted(spelled), tokenizer) if spelled else None
        self._include_stop_str = include_stop_str
        self._held = ""  # decoded, not returned: it may begin a stop string

    def push(self, token_ids: Iterable[int]) -> tuple[str, list[int]]:
        """Add tokens. Returns the text that is now safe to send, and `num_chars` after each used token.

        Tokens after the one that completed a stop string are not used. From then on the text is empty."""
        text, ends = self._held, []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            new = self._decode(token_id)
            self.num_chars += len(new)
            ends.append(self.num_chars)
            text = self._append(text, new) if self._special is None else self._append_special(text, token_id, new)
        return self._release(text), ends

    def finish(self) -> str:
        """Return the rest after the last token. An incomplete character becomes U+FFFD."""
        if self.stopped is not None:
            return ""
        new = self._utf8.decode(b"", final=True)
        text = self._append(self._held, new) if self._special is None else self._append_special(self._held, -1, new)
        self._held = ""
        return text

    def _decode(self, token_id: int) -> str:
        """Return the characters that a token completes."""
        if token_id in self._skipped or not (piece := self._pieces[token_id]):
            return ""
        if self._at_start:
            piece = self._pieces.first(token_id)
            self._at_start = False
        if self._leading_spaces:
            stripped = strip_spaces(piece, self._leading_spaces)
            self._leading_spaces = 0 if stripped else self._leading_spaces - len(piece)
            piece = stripped
        if not self._before_special:
            return self._utf8.decode(piece)
        if token_id in self._kept:
            return self._utf8.decode(b"", final=True) + self._before_special + piece.decode()
        return self._utf8.decode(piece).replace(self._before_special, "\ufffd")

    def _append(self, text: str, new: str) -> str:
        """Return `text` + `new`, cut at a stop string."""
        if self._stops is None:
            return text + new
        for at, char in enumerate(new, start=1):
            self._state = self._stops.step(self._state, char)
            if (match := self._stops.matches[self._state]) is not None:
                self.stopped = match
                text += new[:at]
                return text if self._include_stop_str else text[: -len(match)]
        return text + new

    def _append_special(self, text: str, token_id: int, new: str) -> str:
        """Do the same where a stop string may spell the token or its neighbours."""
        special, num_before = self._special, 0
        assert special is not None
        assert self._stops is not None
        is_shown = token_id not in self._skipped
        for char in new if is_shown else special.text_of(token_id):
            match = spelled = None
            if is_shown:
                text += char
                self._state = self._stops.step(self._state, char)
                match = self._stops.matches[self._state]
            if char == self._before_special:
                num_before = 1  # it belongs to the token
            else:
                spelled, num_before = special.add(char, is_shown, num_before), 0
            if match is not None or spelled is not None:
                by_spelling = len(spelled or "") > len(match or "")
                self.stopped = spelled if by_spelling else match
                cut = special.num_shown_of(len(spelled)) if by_spelling and spelled else len(match or "")
                return text if self._include_stop_str else text[: len(text) - cut]
        return text

    def _release(self, text: str) -> str:
        if self._stops is None or self._include_stop_str or self.stopped is not None:
            self._held = ""
            return text
        num_held = self._stops.depths[self._state]
        if self._special is not None:
            num_held = max(num_held, self._special.num_shown_of(self._special.depth))
        safe = len(text) - num_held
        self._held = text[safe:]
        return text[:safe]


class _SpecialStops:
    """Stop strings that spell special tokens, found in a text with its hidden tokens."""

    def __init__(self, stops: Sequence[str], tokenizer: Tokenizer) -> None:
        self._stops, self._tokenizer, self._state = StopStrings(stops), tokenizer, 0
        self._num_shown = 0
        self._starts: deque[int] = deque(maxlen=max(map(len, stops)))  # shown characters before each recent character

    @property
    def depth(self) -> int:
        """The length of the tail that may begin a stop string."""
        return self._stops.depths[self._state]

    def text_of(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def add(self, char: str, is_shown: bool, num_before: int) -> str | None:
        """Add a character after `num_before` shown ones outside the text. Returns the stop string that ends here."""
        self._starts.append(self._num_shown)
        self._num_shown += num_before + is_shown
        self._state = self._stops.step(self._state, char)
        return self._stops.matches[self._state]

    def num_shown_of(self, num_chars: int) -> int:
        """Return how many of the last characters are shown."""
        return self._num_shown - self._starts[-num_chars] if num_chars else 0


class NoText:
    """Takes the place of a TextStream for a request without `detokenize`."""

    stopped: None = None
    num_chars = 0

    def push(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        return "", [0] * len(token_ids)

    def finish(self) -> str:
        return ""


NO_TEXT = NoText()


class StopStrings:
    """An Aho-Corasick automaton. A state is the longest tail that begins a stop string; state 0 is the empty tail.

    Construction takes one or two microseconds for each character of the stop strings. The automaton never changes, so
    streams with equal stop strings share one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = [0]  # length of each state's tail
        self.matches: list[str | None] = [None]  # the longest stop string that ends here
        self._children: list[dict[str, int]] = [{}]
        self._fallbacks = [0]  # state of the next shorter tail
        for stop in stops:
            if not stop:
                raise CallboardError("stop holds an empty string, which would end every text; leave it out.")
            state = 0
            for char in stop:
                if char not in self._children[state]:
                    self._children[state][char] = len(self.depths)
                    self.depths.append(self.depths[state] + 1)
                    self.matches.append(None)
                    self._children.append({})
                    self._fallbacks.append(0)
                state = self._children[state][char]
            self.matches[state] = stop
        # Shorter tails first: a state's fallback is complete before the state needs it.
        for state in sorted(range(len(self.depths)), key=self.depths.__getitem__):
            for char, child in self._children[state].items():
                if state:
                    self._fallbacks[child] = self.step(self._fallbacks[state], char)
                self.matches[child] = self.matches[child] or self.matches[self._fallbacks[child]]

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character, in amortised constant time."""
        while state and char not in self._children[state]:
            state = self._fallbacks[state]
        return self._children[state].get(char, 0)
