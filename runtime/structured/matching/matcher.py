"""The interface between a step and a grammar, for every engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from runtime.base.types import CallboardError


class Matcher(ABC):
    """One output's position in its grammar. One thread at a time uses it, and none after a CallboardError.

    EOS is a token like any other: it is allowed where the output may end, and only EOS may follow it. A grammar may
    also have one of the EOS tokens as its own last token."""

    engine: ClassVar[str]

    def __init__(self, eos_ids: tuple[int, ...]) -> None:
        self._eos_ids = eos_ids
        self._num_ended = 0  # EOS tokens taken

    @property
    @abstractmethod
    def is_accepting(self) -> bool:
        """True if the output may end here."""

    @property
    def has_ended(self) -> bool:
        """True if EOS was taken."""
        return self._num_ended > 0

    @property
    def is_finished(self) -> bool:
        """True if nothing but EOS may follow."""
        return self._num_ended > 0 or self._is_complete()

    def fill(self, mask: NDArray[np.int32]) -> None:
        """Set bit i % 32 of word i // 32 in `mask` [num_words], which is contiguous, if token i may come next.

        Raises CallboardError at a limit."""
        if not self._num_ended:
            self._fill(mask)
            return
        mask[:] = 0
        for i in self._eos_ids:
            mask.view(np.uint32)[i // 32] |= np.uint32(1 << i % 32)

    def fill_ahead(self, masks: NDArray[np.int32], guesses: Sequence[int]) -> int:
        """Fill the masks before each guess and after the last one: `masks` [len(guesses) + 1, num_words].

        Return the number of guesses that the grammar allows in a row; masks after these stay as they are."""
        taken = 0
        self.fill(masks[0])
        for guess in guesses:
            if not self._walk((guess,)):
                if not int(masks[taken, guess // 32]) >> guess % 32 & 1:
                    break
                self.advance((guess,))  # raises: a limit rejected a token of the mask
            taken += 1
            self.fill(masks[taken])
        self.rollback(taken)
        return taken

    def advance(self, tokens: Sequence[int]) -> None:
        """Take tokens. Raises CallboardError if one of them is not allowed, and at a limit."""
        taken = self._walk(tokens)
        if taken < len(tokens):
            self._check_limit()
            raise CallboardError(f"The token {tokens[taken]} is not allowed there by this request's grammar.")

    def allowed(self, tokens: Sequence[int]) -> int:
        """Return the number of tokens, from the first on, that the grammar allows in a row."""
        taken = self._walk(tokens)
        self.rollback(taken)
        return taken

    def rollback(self, num_tokens: int) -> None:
        """Undo the last tokens."""
        ends = min(num_tokens, self._num_ended)
        self._num_ended -= ends
        if num_tokens > ends:
            self._back(num_tokens - ends)

    def _walk(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the first that is not allowed, and return their number."""
        for i, token in enumerate(tokens):
            if token in self._eos_ids and (self._num_ended or self.is_accepting):
                self._num_ended += 1
            elif self._num_ended or not self._step(token):
                return i
        return len(tokens)

    def _check_limit(self) -> None:
        """Raise CallboardError if a limit, not the grammar, rejected the last token."""
        return

    @abstractmethod
    def _is_complete(self) -> bool: ...

    @abstractmethod
    def _fill(self, mask: NDArray[np.int32]) -> None: ...

    @abstractmethod
    def _step(self, token: int) -> bool: ...

    @abstractmethod
    def _back(self, num_tokens: int) -> None: ...
