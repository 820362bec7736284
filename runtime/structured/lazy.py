"""The lazy engine: llguidance works a grammar out as far as an output goes, on the host.

A matcher is ready in about a millisecond at any vocabulary. What a mask may cost is bounded by fuel, not by a clock, so
that it is the same everywhere: at most some 15 ms, in grammars that mean harm.
"""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np
from numpy.typing import NDArray

from runtime.core.types import CallboardError
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
# own, less the two characters that "." does not mean.
_SLICES = [r"[\x20\x0A\x0D\x09]+", *(rf"[^\"\\\x00-\x1F\x7F\x{{2028}}\x{{2029}}]{n}" for n in ("{1,10}", "{1,30}", "+"))]


class LazyEngine:
    """Makes matchers for one vocabulary. Setting it up takes about a second for 128k tokens; threads may share it."""

    name = "lazy"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)), eos_token=list(vocabulary.eos_ids), slices=_SLICES
        )

    def matcher(self, lark: str) -> LazyMatcher:
        """At the beginning of an output; raises CallboardError if a limit is in the way of the grammar."""
        matcher = LazyMatcher(llguidance.LLMatcher(self._tokenizer, lark, log_level=0, limits=LIMITS))
        matcher.check()
        return matcher


class LazyMatcher:
    """Where one output is in its grammar. One thread at a time; the GIL is free while a mask is computed."""

    engine = "lazy"

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> LazyMatcher:
        """An output of its own from here on."""
        return LazyMatcher(self._matcher.deep_copy())

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but EOS may follow, or it has come."""
        return self._matcher.is_stopped()

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Bit i % 32 of word i // 32 tells whether token i may come next: `mask` [num_words], in one piece.

        Raises CallboardError if the grammar has run out of fuel; it is of no use then."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self.check()

    def fill_ahead(self, masks: NDArray[np.int32], guesses: Sequence[int]) -> int:
        """The masks before each guess and after the last, as far as the grammar allows them: `masks`
        [len(guesses) + 1, num_words]. Returns how many guesses it allows; masks after those are left as they are."""
        taken = 0
        self.fill(masks[0])
        while taken < len(guesses) and self.allowed(guesses[taken : taken + 1]):
            self.advance(guesses[taken : taken + 1])
            taken += 1
            self.fill(masks[taken])
        self.rollback(taken)
        return taken

    def advance(self, tokens: Sequence[int]) -> None:
        """Raises CallboardError if one of them is not allowed; none is taken then."""
        if (taken := self._matcher.try_consume_tokens(list(tokens))) < len(tokens):
            self.rollback(taken)
            self.check()
            raise CallboardError(f"The token {tokens[taken]} is not what this request's grammar allows there.")

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of them, from the first on, the grammar allows in a row."""
        return self._matcher.validate_tokens(list(tokens))

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self.check()

    def check(self) -> None:
        """Raises CallboardError if the grammar cannot go on."""
        matcher = self._matcher
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            reason = matcher.get_error().partition("\n")[0][:200] or str(matcher.stop_reason())
            raise CallboardError(f"This request's grammar is too complex to go on here ({reason}).")


class _Tokens:
    """A vocabulary as llguidance asks for it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = vocabulary.tokens
        self.eos_token_id = vocabulary.eos_ids[0]
        self.bos_token_id = None
        self.special_token_ids = [i for i, token in enumerate(vocabulary.tokens) if not token]

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError  # only a grammar that forces tokens asks how a text is cut
