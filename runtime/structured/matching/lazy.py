"""The lazy engine: llguidance, which computes a grammar's states on the host as an output reaches them.

A matcher is ready in about a millisecond at any vocabulary; the largest grammars take some 30. Fuel, not a clock,
bounds a mask's cost, so every machine has the same limit: some 15 ms in hostile grammars."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import llguidance
import numpy as np
from numpy.typing import NDArray

from runtime.base.types import CallboardError
from runtime.structured.matching.matcher import Matcher
from runtime.text.vocabulary import Vocabulary

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=50_000,  # 2.5 ms
    max_items_in_row=8_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,
)
_MAX_COPIES = 1000  # copies of a matcher; each adds to the lexer states that all share

# Slices of the vocabulary; most tokens are texts within strings. A mask takes a slice at once where all of it is
# allowed. These are llguidance's default slices without reserved characters and ends of lines.
_NOT_IN_STRING = r"\"\\\x00-\x1F\x7F\x{2028}\x{2029}\x{10FFC0}-\x{10FFFF}"
_SPACES, _IN_STRING = r"[\x20\x0A\x0D\x09]+", f"[^{_NOT_IN_STRING}]"
_SLICES = [_SPACES, _IN_STRING + "{1,10}", _IN_STRING + "{1,30}", _IN_STRING + "+"]
# Free text without channel marks has all tokens without "<".
_SLICES_OF_CHANNELS = [
    _SPACES,
    *(f"[^<{_NOT_IN_STRING}]{times}" for times in ("{1,10}", "{1,30}", "+")),
    _IN_STRING + "+",
]


class SharedLimit(CallboardError):
    """The lexer that a matcher shares with its copies reached a limit; a matcher with its own lexer may go on."""


class LazyEngine:
    """Makes matchers for one vocabulary, in any thread. Its set-up takes about a second for 128k tokens."""

    name = "lazy"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._executor = llguidance.LLExecutor(num_threads=min(8, os.cpu_count() or 1))
        self._end = _End.of(vocabulary)
        slices = _SLICES_OF_CHANNELS if vocabulary.has_channels else _SLICES
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(self._end.engine_ids), slices=slices
        )

    def fill(
        self, matchers: Sequence[LazyMatcher], masks: NDArray[np.int32], numbers: Sequence[int]
    ) -> list[CallboardError | None]:
        """Call `matchers[i].fill(masks[numbers[i]])` for all i on several threads; return the error of each, or None.

        `masks` [n, num_words] is contiguous."""
        open_, ended = [], []
        for matcher, number in zip(matchers, numbers, strict=True):
            if matcher.has_ended:
                ended.append((matcher, number))
            else:
                open_.append((matcher.inner, number))
        if open_:
            self._executor.unsafe_compute_mask_ptr(open_, masks.ctypes.data, masks.shape[1] * 4, len(masks))
            for _, number in open_:
                self._end.show(masks[number])
        for matcher, number in ended:
            matcher.fill(masks[number])
        return [matcher.error() for matcher in matchers]

    def matcher(self, lark: str) -> LazyMatcher:
        """Return a matcher at the beginning of an output. Raises CallboardError if the grammar reaches a limit."""
        inner = llguidance.LLMatcher(self._tokenizer, lark, log_level=0, limits=LIMITS)
        return LazyMatcher(self.vocabulary.eos_ids, inner, _Lexer(), self._end)


@dataclass(frozen=True, slots=True)
class _End:
    """The tokens that end an output for llguidance.

    llguidance never takes its own EOS tokens as a part of a grammar. So another special token stands for the end, if
    the vocabulary has one to spare. Masks show the EOS tokens in its place."""

    eos_ids: tuple[int, ...]
    engine_ids: tuple[int, ...]

    @classmethod
    def of(cls, vocabulary: Vocabulary) -> _End:
        ids = range(len(vocabulary.tokens) - 1, -1, -1)
        spare = next((i for i in ids if not vocabulary.tokens[i] and i not in vocabulary.eos_ids), None)
        return cls(vocabulary.eos_ids, vocabulary.eos_ids if spare is None else (spare,))

    def show(self, mask: NDArray[np.int32]) -> None:
        """Replace the end of llguidance in a mask by the EOS tokens."""
        words, (end, *_) = mask.view(np.uint32), self.engine_ids
        if end not in self.eos_ids and int(words[end // 32]) >> end % 32 & 1:
            words[end // 32] &= ~np.uint32(1 << end % 32)
            for i in self.eos_ids:
                words[i // 32] |= np.uint32(1 << i % 32)


@dataclass(slots=True)
class _Lexer:
    """The state that a matcher's copies share in llguidance: the computed states of its terminals.

    A lexer that reached a limit fails all copies, wherever they are in the grammar."""

    num_copies: int = 0
    has_failed: bool = False


class LazyMatcher(Matcher):
    """A matcher of llguidance, which releases the GIL while it is made and while it computes a mask.

    Its copies share its lexer and may bring it to a limit. It then raises SharedLimit; a matcher with its own lexer may
    go on from the same position."""

    engine = "lazy"

    def __init__(self, eos_ids: tuple[int, ...], inner: llguidance.LLMatcher, lexer: _Lexer, end: _End) -> None:
        super().__init__(eos_ids)
        self.inner, self._lexer, self._end = inner, lexer, end
        self._has_gone_back = False  # True from a rollback to the next mask
        self._check()

    @property
    def may_be_copied(self) -> bool:
        """True while the lexer works and has few copies: its states grow with each."""
        return not self._lexer.has_failed and self._lexer.num_copies < _MAX_COPIES

    def copy(self) -> LazyMatcher:
        """Return a matcher at the same position for another output; the two share their lexer."""
        self._lexer.num_copies += 1
        copy = LazyMatcher(self._eos_ids, self.inner.deep_copy(), self._lexer, self._end)
        copy._has_gone_back = self._has_gone_back
        return copy

    @property
    def is_accepting(self) -> bool:
        return self.inner.is_accepting()

    def _is_complete(self) -> bool:
        return self.inner.is_stopped()

    def _fill(self, mask: NDArray[np.int32]) -> None:
        self._has_gone_back = False
        self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        self._end.show(mask)

    def _step(self, token: int) -> bool:
        if self._has_gone_back:
            # Workaround for llguidance 1.9: its lexer keeps the lookahead after a rollback; computing a mask resets it.
            self._has_gone_back = False
            self.inner.compute_bitmask()
        return bool(self.inner.try_consume_tokens([token]))

    def _back(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)
        self._has_gone_back = True
        self._check()

    def _check_limit(self) -> None:
        self.inner.compute_bitmask()  # a lexer at its limit rejects tokens silently; computing a mask sets its error
        self._check()

    def error(self) -> CallboardError | None:
        """Return why the matcher cannot be used any more; None if it can."""
        inner = self.inner
        if not (inner.is_error() or (inner.is_stopped() and not inner.is_accepting())):
            return None
        self._lexer.has_failed = True
        reason = inner.get_error().partition("\n")[0][:200] or str(inner.stop_reason())
        kind = SharedLimit if self._lexer.num_copies > 1 else CallboardError
        return kind(f"This request's grammar is too complex to go on here ({reason}); ask for a simpler one.")

    def _check(self) -> None:
        if (error := self.error()) is not None:
            raise error


class _Tokens:
    """A vocabulary in the form that llguidance reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        # llguidance distinguishes special tokens by their bytes, although no output has them.
        self.tokens = [token or b"<special %d>" % i for i, token in enumerate(vocabulary.tokens)]
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [i for i, token in enumerate(vocabulary.tokens) if not token]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError  # llguidance tokenizes a text only for grammars that force tokens
