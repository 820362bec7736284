"""An output's reasoning budget: a matcher around the grammar's matcher.

Once the budget is spent, only the mark that ends reasoning may follow."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.base.types import ThinkingBudget
from runtime.structured.matching.matcher import Matcher
from runtime.text.tool_calls.parser import MAX_SPACES
from runtime.text.vocabulary import Vocabulary


class _Phase(Enum):
    UNDECIDED = auto()  # the output may still begin with reasoning
    OPEN = auto()
    CLOSING = auto()  # the budget is spent, and the output has some tokens of the mark
    CLOSED = auto()  # reasoning has ended, or the output has none


class _State(NamedTuple):
    phase: _Phase
    num_tokens: int = 0  # reasoning tokens; tokens of the mark in the phase CLOSING
    text: bytes = b""  # the output's end, which may begin a mark


class ThinkingMatcher(Matcher):
    """Allows the tokens of `inner`, or all without it, but no more reasoning tokens than the budget.

    Tokens between the two marks count. If `inner` requires the rest of a character's bytes, these come before the
    mark."""

    engine = "thinking"

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, inner: Matcher | None) -> None:
        super().__init__(vocabulary.eos_ids)
        self.inner = inner
        self._budget, self._tokens = budget, vocabulary.tokens
        self._open, self._close = (mark.encode() for mark in budget.marks)
        self._states = [_State(_Phase.OPEN if budget.is_open else _Phase.UNDECIDED)]  # before and after each token

    @property
    def is_closed(self) -> bool:
        """True if `inner` alone decides what follows."""
        return self._states[-1].phase is _Phase.CLOSED

    @property
    def is_accepting(self) -> bool:
        return self._forced() is None and (self.inner is None or self.inner.is_accepting)

    def _forced(self) -> int | None:
        """Return the token that must come next; None if reasoning requires none."""
        phase, num_tokens, _ = self._states[-1]
        if phase is _Phase.CLOSING:
            return self._budget.close_ids[num_tokens]
        first = self._budget.close_ids[0]
        is_spent = phase is _Phase.OPEN and num_tokens >= self._budget.num_tokens
        return first if is_spent and (self.inner is None or self.inner.allowed((first,))) else None

    def _is_complete(self) -> bool:
        return self._forced() is None and self.inner is not None and self.inner.is_finished

    def _fill(self, mask: NDArray[np.int32]) -> None:
        if (forced := self._forced()) is not None:
            mask[:] = 0
            mask.view(np.uint32)[forced // 32] = np.uint32(1 << forced % 32)
        elif self.inner is None:
            mask[:] = -1
        else:
            self.inner.fill(mask)

    def _step(self, token: int) -> bool:
        forced = self._forced()
        if forced not in (None, token) or (self.inner is not None and not self.inner._walk((token,))):
            return False
        self._states.append(self._after(token, forced is not None))
        return True

    def _after(self, token: int, is_forced: bool) -> _State:
        phase, num_tokens, before = self._states[-1]
        if phase is _Phase.CLOSED:
            return self._states[-1]
        text = before + self._tokens[token]
        if phase is _Phase.UNDECIDED:
            begun = text.lstrip()
            if token == self._budget.open_id or begun.startswith(self._open):
                return _State(_Phase.OPEN, 0, begun.removeprefix(self._open))
            may_begin = self._open.startswith(begun) and len(text) - len(begun) <= MAX_SPACES
            return _State(_Phase.UNDECIDED, 0, text) if may_begin else _State(_Phase.CLOSED)
        if self._budget.close_ids == (token,) or self._close in text:
            return _State(_Phase.CLOSED)
        if is_forced:  # a token of the mark, but not its last
            return _State(_Phase.CLOSING, num_tokens + 1 if phase is _Phase.CLOSING else 1, text)
        return _State(_Phase.OPEN, num_tokens + 1, text[1 - len(self._close) :])

    def _back(self, num_tokens: int) -> None:
        del self._states[-num_tokens:]
        if self.inner is not None:
            self.inner.rollback(num_tokens)

    def _check_limit(self) -> None:
        if self.inner is not None:
            self.inner._check_limit()
