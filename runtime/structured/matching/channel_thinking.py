"""The reasoning budget in channels: a matcher that counts tokens in analysis messages.

Once the budget is spent, the message ends, and no other message is an analysis."""

from __future__ import annotations

from enum import Enum, auto
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runtime.base.types import ThinkingBudget
from runtime.structured.matching.matcher import Matcher
from runtime.structured.matching.thinking import ThinkingMatcher
from runtime.text.vocabulary import Vocabulary

_CHANNEL = b"analysis"


class _Place(Enum):
    OUTSIDE = auto()  # a header or another message
    NAME = auto()  # a channel's name
    ANALYSIS = auto()  # an analysis message's text


class _State(NamedTuple):
    place: _Place
    num_tokens: int = 0  # reasoning tokens so far
    name: bytes = b""  # the channel's name, or its beginning


class ChannelThinkingMatcher(ThinkingMatcher):
    """Allows the tokens of `inner`, or all without it, but no more reasoning tokens than the budget."""

    def __init__(self, budget: ThinkingBudget, vocabulary: Vocabulary, inner: Matcher | None) -> None:
        super().__init__(budget, vocabulary, inner)
        assert budget.channel_ids is not None, "the budget is one of channels"
        self._channel_id, self._message_id, self._end_id = budget.channel_ids
        self._vocabulary = vocabulary
        self._places = [_State(_Place.ANALYSIS if budget.is_open else _Place.OUTSIDE)]  # before and after each token

    @property
    def is_closed(self) -> bool:
        """False, since another analysis message may follow."""
        return False

    def _is_spent(self) -> bool:
        return self._places[-1].num_tokens >= self._budget.num_tokens

    def _forced(self) -> int | None:
        if self._places[-1].place is not _Place.ANALYSIS or not self._is_spent():
            return None
        return self._end_id if self.inner is None or self.inner.allowed((self._end_id,)) else None

    def _begins_analysis(self, token: int) -> bool:
        """Return True if the token would begin the name of one more analysis channel."""
        place, _, name = self._places[-1]
        begins = place is _Place.NAME and not name and self._tokens[token][:1] == _CHANNEL[:1]
        return begins and self._is_spent()

    def _fill(self, mask: NDArray[np.int32]) -> None:
        super()._fill(mask)
        place, _, name = self._places[-1]
        if place is _Place.NAME and not name and self._is_spent():
            mask &= ~_beginning(self._vocabulary)

    def _step(self, token: int) -> bool:
        forced = self._forced()
        if forced not in (None, token) or self._begins_analysis(token):
            return False
        if self.inner is not None and not self.inner._walk((token,)):
            return False
        self._places.append(self._next(token))
        return True

    def _next(self, token: int) -> _State:
        place, num_tokens, name = self._places[-1]
        if token == self._channel_id:
            return _State(_Place.NAME, num_tokens)
        if token == self._message_id:
            is_analysis = place is _Place.NAME and name == _CHANNEL
            return _State(_Place.ANALYSIS if is_analysis else _Place.OUTSIDE, num_tokens)
        if place is _Place.NAME:
            return _State(place, num_tokens, name + self._tokens[token])
        if place is _Place.ANALYSIS and token != self._end_id:
            return _State(place, num_tokens + 1)
        return _State(_Place.OUTSIDE, num_tokens)

    def _back(self, num_tokens: int) -> None:
        del self._places[-num_tokens:]
        if self.inner is not None:
            self.inner.rollback(num_tokens)


@cache
def _beginning(vocabulary: Vocabulary) -> NDArray[np.int32]:
    """Return the mask of the tokens that begin as the channel's name does."""
    begins = np.zeros(vocabulary.num_words * 32, np.bool_)
    begins[: len(vocabulary.tokens)] = [token[:1] == _CHANNEL[:1] for token in vocabulary.tokens]
    return np.packbits(begins, bitorder="little").view(np.int32)
