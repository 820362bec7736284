"""Reports: what a request's output has other than tokens and their log-probabilities.

A step's result, its output, a frame, a request's output and a delta each carry a list of reports. They do not depend on
the kinds. A kind is a struct here, in the union `Report`. Its StepExtra makes it (worker/extras.py), and the Extra that
names it in `reads` takes it (core/extra.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self, TypeVar, overload

import msgspec


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, in nats, of the model's raw distribution (before temperature)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first; then further ones requested by id
    sampling_logprob: float | None = None  # its log-probability where it was drawn; None if not requested


class _Kind(msgspec.Struct, array_like=True):
    """What the envelopes need of a report. By default it belongs to the end of an output."""

    is_output: ClassVar[bool] = False  # True if it takes the place of tokens
    answers: ClassVar[dict[str, Any]] = {}  # sampling parameters after it: another engine need not repeat it

    def shifted(self, num_tokens: int) -> Self:
        """Return the report for an output with `num_tokens` more tokens before it."""
        return self

    def within(self, num_tokens: int) -> Self:
        """Return the report for an output that is cut after `num_tokens` tokens."""
        return self

    def in_plan(self, step: int, num_steps: int) -> Self:
        """Return one step's report for its whole plan, which has all samples row after row."""
        return self

    def by_token(self, num_tokens: int) -> Iterator[tuple[int, Self]]:
        """Yield its part of each token, with the token's index; -1 precedes all tokens."""
        yield num_tokens - 1, self


class PromptScores(_Kind, tag=1):
    """Log-probabilities of m prompt tokens in columns: little-endian and in C order."""

    answers = {"prompt_logprobs": None}

    ranks: bytes  # int32 [m]
    logprobs: bytes  # float32 [m]
    top_ids: bytes  # int32 [m, n]
    top_logprobs: bytes  # float32 [m, n]

    def __len__(self) -> int:
        return len(self.ranks) // 4

    def of(self, token_ids: Sequence[int]) -> Sequence[TokenLogprobs]:
        """Return one entry for each of these m tokens."""
        return _Entries(self, token_ids)

    def by_token(self, num_tokens: int) -> Iterator[tuple[int, Self]]:
        yield -1, self


class Vector(_Kind, tag=2):
    """The vector of a pooled request, before its end."""

    is_output = True

    numbers: bytes  # float32, little-endian


class Experts(_Kind, tag=3):
    """Each computed token's experts, before its request ends."""

    ids: bytes  # int16 [num_tokens, layers, top_k], little-endian


class Verified(_Kind, tag=4):
    """Draft tokens that one step verified. The accepted ones are tokens `at` to `at + num_accepted` of an output."""

    at: int
    num_draft_tokens: int
    num_accepted: int

    def shifted(self, num_tokens: int) -> Verified:
        return Verified(self.at + num_tokens, self.num_draft_tokens, self.num_accepted)

    def within(self, num_tokens: int) -> Verified:
        """Count only accepted draft tokens that are in the output."""
        at = min(self.at, num_tokens)
        return Verified(at, self.num_draft_tokens, min(self.num_accepted, num_tokens - at))

    def by_token(self, num_tokens: int) -> Iterator[tuple[int, Verified]]:
        """Rejected draft tokens count for the token after the accepted ones."""
        for at in range(self.at, self.at + self.num_accepted):
            yield at, Verified(0, 1, 1)
        if num_rejected := self.num_draft_tokens - self.num_accepted:
            yield min(self.at + self.num_accepted, num_tokens - 1), Verified(0, num_rejected, 0)


class GrammarSamples(_Kind, tag=5):
    """A step's samples under grammars, by index in its `token_ids`. Only the engine reads it."""

    deferred: list[int] = []  # not sampled, because the matcher is not ready: plan their rows again
    failures: dict[int, str] = {}  # why the grammar cannot continue
    begun: tuple[int, int] = 0, 0  # outputs that began with a grammar, by its engine: lazy, eager

    def in_plan(self, step: int, num_steps: int) -> GrammarSamples:
        failures = {at * num_steps + step: why for at, why in self.failures.items()}
        return GrammarSamples([at * num_steps + step for at in self.deferred], failures, self.begun)


Report = PromptScores | Vector | Experts | Verified | GrammarSamples
_R = TypeVar("_R", bound=_Kind)


def all_of(reports: Iterable[Report], kind: type[_R]) -> Iterator[_R]:
    """Return the reports of one kind, in order."""
    return (report for report in reports if isinstance(report, kind))


def one_of(reports: Iterable[Report], kind: type[_R]) -> _R | None:
    """Return the first report of one kind, or None."""
    return next(all_of(reports, kind), None)


def prompt_entries(reports: Iterable[Report], prompt: Sequence[int]) -> Sequence[TokenLogprobs]:
    """Return the log-probabilities of a prompt's tokens after the first; empty if no report has them."""
    scores = one_of(reports, PromptScores)
    return () if scores is None else scores.of(prompt[1:])


class _Entries(Sequence[TokenLogprobs]):
    """PromptScores by token. An entry is made when it is read, because all entries of a long prompt take long."""

    def __init__(self, columns: PromptScores, token_ids: Sequence[int]) -> None:
        self._token_ids = token_ids
        self._own = memoryview(columns.logprobs).cast("f"), memoryview(columns.ranks).cast("i")
        self._top = memoryview(columns.top_ids).cast("i"), memoryview(columns.top_logprobs).cast("f")
        self._num_top = len(columns.top_ids) // max(len(columns.ranks), 1)

    def __len__(self) -> int:
        return len(self._own[0])

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> list[TokenLogprobs]: ...
    def __getitem__(self, at: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        i = range(len(self))[at]
        top = slice(i * self._num_top, (i + 1) * self._num_top)
        (logprobs, ranks), (top_ids, top_logprobs) = self._own, self._top
        entries = tuple(zip(top_ids[top], top_logprobs[top], strict=True))
        return TokenLogprobs(self._token_ids[i], logprobs[i], ranks[i], entries)
