"""The lazy engine: llguidance works a grammar out as far as an output goes, on the host.

A matcher is ready in about a millisecond at any vocabulary. What a mask may cost is bounded by fuel, not by a clock, so
that it is the same everywhere: at most some 15 ms, in grammars that mean harm.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from runtime.core.types import CallboardError
from runtime.structured.matcher import Matcher
from runtime.structured.vocabulary import Vocabulary

LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,  # 20 ms
    step_lexer_fuel=200_000,  # 15 ms
    step_max_items=50_000,  # 2.5 ms
    max_items_in_row=8_000,
    max_lexer_states=50_000,  # 1 to 2 kB each
    max_grammar_size=500_000,
    verbose_errors=False,
)
# Texts within strings that most tokens are: where all of them fit, a mask takes them at once. These are llguidance's
# own, less the characters that "." does not mean, and the one that is never written.
_IN_STRING = r"[^\"\\\x00-\x1F\x7F\x{2028}\x{2029}\x{10FFFF}]"
_SLICES = [r"[\x20\x0A\x0D\x09]+", _IN_STRING + "{1,10}", _IN_STRING + "{1,30}", _IN_STRING + "+"]


class LazyEngine:
    """Makes matchers for one vocabulary. Setting it up takes about a second for 128k tokens; threads may share it."""

    name = "lazy"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._executor = llguidance.LLExecutor(num_threads=min(8, os.cpu_count() or 1))
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.eos_ids), slices=_SLICES
        )

    def fill(
        self, matchers: Sequence[LazyMatcher], masks: NDArray[np.int32], numbers: Sequence[int]
    ) -> list[CallboardError | None]:
        """`matchers[i].fill(masks[numbers[i]])` of all, in one call on several threads: for each what it would raise.
        `masks` [n, num_words], in one piece."""
        open_ = []
        for matcher, number in zip(matchers, numbers, strict=True):
            if matcher.has_ended:
                matcher.fill(masks[number])
            else:
                open_.append((matcher.inner, number))
        if open_:
            self._executor.unsafe_compute_mask_ptr(open_, masks.ctypes.data, masks.shape[1] * 4, len(masks))
        return [matcher.error() for matcher in matchers]

    def matcher(self, lark: str) -> LazyMatcher:
        """At the beginning of an output; raises CallboardError if a limit is in the way of the grammar."""
        matcher = llguidance.LLMatcher(self._tokenizer, lark, log_level=0, limits=LIMITS)
        return LazyMatcher(matcher, self.vocabulary.eos_ids)


class LazyMatcher(Matcher):
    """A matcher over llguidance's, which gives the GIL up while it computes a mask."""

    engine = "lazy"

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: tuple[int, ...]) -> None:
        super().__init__(eos_ids)
        self.inner = matcher
        self._check()

    def copy(self) -> LazyMatcher:
        """An output of its own from here on; the two share what has been worked out of the grammar."""
        return LazyMatcher(self.inner.deep_copy(), self._eos_ids)

    @property
    def is_accepting(self) -> bool:
        return self.inner.is_accepting()

    def _is_complete(self) -> bool:
        return self.inner.is_stopped()

    def _fill(self, mask: NDArray[np.int32]) -> None:
        self.inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def _step(self, token: int) -> bool:
        if self.inner.try_consume_tokens([token]):
            return True
        self._check()
        return False

    def _back(self, num_tokens: int) -> None:
        self.inner.rollback(num_tokens)
        self._check()

    def error(self) -> CallboardError | None:
        """Why it is of no use any more."""
        inner = self.inner
        if not (inner.is_error() or (inner.is_stopped() and not inner.is_accepting())):
            return None
        reason = inner.get_error().partition("\n")[0][:200] or str(inner.stop_reason())
        return CallboardError(f"This request's grammar is too complex to go on here ({reason}).")

    def _check(self) -> None:
        if (error := self.error()) is not None:
            raise error


class _Tokens:
    """A vocabulary as llguidance asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [i for i, token in enumerate(vocabulary.tokens) if not token]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError  # only a grammar that forces tokens asks how a text is cut
