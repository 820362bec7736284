"""The vocabulary of Callboard: what a request is, how it samples, what comes back.

Everything here is plain data: no torch, no I/O, no clock. All ids, lengths and positions count tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal, NamedTuple, overload

_LEAST_TEMPERATURE = 1e-5


class CallboardError(Exception):
    """A fault that a user can act on: its text is one sentence with the value at fault and what to change."""


class FinishReason(IntEnum):
    """Why a request ended. NONE means that it goes on."""

    NONE = 0
    STOP = 1  # an end-of-sequence id or a stop id was sampled
    LENGTH = 2  # max_tokens or the model's context is exhausted
    ABORT = 3  # the client went away or asked for it
    ERROR = 4  # a fault of this request alone (non-finite logits, say)
    GRAMMAR = 5  # its grammar cannot be served, or not any further


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What a client wants the output to match."""

    kind: Literal["json", "regex", "choice", "calls"]
    text: str  # a JSON Schema; a regular expression of the whole output; a JSON list of texts; see grammar.Calls
    after: str = ""  # the output begins with free text up to this mark
    may_stay_free: bool = False  # or is free text altogether, without the mark
    # Keywords of a schema that cannot be enforced are refused, or with False ignored; None refuses all but uniqueItems.
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """A GrammarSpec as the engines take it (runtime.structured.grammar): every output that it allows is what was
    asked for."""

    key: str  # hash of what it allows
    lark: str  # llguidance's form
    expression: str  # the same as one regular expression; "" if there is none of a reasonable length
    ignored: tuple[str, ...] = ()  # paths of keywords that are not enforced


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples. Defaults are OpenAI's; `temperature=0` is greedy."""

    max_tokens: int = 16  # 0 with prompt_logprobs alone: the request scores its prompt and ends
    temperature: float = 1.0  # below 1e-5 it is greedy, as with 0: logits divided by it would overflow
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    frequency_penalty: float = 0.0  # over output
    presence_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias) pairs
    min_tokens: int = 0  # no EOS and no stop id before this many output tokens
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None: the replica draws one (C4: every request has a seed)
    logprobs: int | None = None  # None: off; n: the sampled token's and the n best ones'
    prompt_logprobs: int | None = None  # None: off; n: at each prompt position, its own token's and the n best ones'
    grammar: Grammar | None = None  # None: the output is free
    # Text level: matched by the detokenizer's owner, never seen by the engine or the runners.
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        checks = (
            (self.max_tokens >= (self.prompt_logprobs is None), "max_tokens", self.max_tokens, "at least 1"),
            (0.0 <= self.temperature <= 100.0, "temperature", self.temperature, "between 0 and 100"),
            (self.top_k >= 0, "top_k", self.top_k, "at least 0 (0 is off)"),
            (0.0 < self.top_p <= 1.0, "top_p", self.top_p, "above 0 and at most 1"),
            (0.0 <= self.min_p <= 1.0, "min_p", self.min_p, "between 0 and 1"),
            (0.0 < self.repetition_penalty <= 100.0, "repetition_penalty", self.repetition_penalty, "above 0, max 100"),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", self.frequency_penalty, "between -2 and 2"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", self.presence_penalty, "between -2 and 2"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", self.min_tokens, "between 0 and max_tokens"),
            (0 <= (self.logprobs or 0) <= 20, "logprobs", self.logprobs, "between 0 and 20"),
            (0 <= (self.prompt_logprobs or 0) <= 20, "prompt_logprobs", self.prompt_logprobs, "between 0 and 20"),
        )
        for ok, name, value, want in checks:
            if not ok:
                raise CallboardError(f"{name} is {value}; it must be {want}.")
        if self.temperature < _LEAST_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)


@dataclass(slots=True)
class Request:
    """One request as a replica submits it; the engine owns it from then on.

    `token_ids` holds the prompt and, when a stream is resumed after an engine's death, the output already delivered;
    `prompt_len` tells where the output begins, so that positions, penalties and limits are those of the first try (C8).
    """

    request_id: str
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int = 0  # 63 bits; the key of this request's noise (C4)
    priority: int = 0  # lower is served first
    cache_salt: str = ""  # requests share cached blocks only under the same salt (C5)
    engine: str = ""  # the id of the one that serves it; "": none does yet


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position, in nats, of the model's raw distribution (before temperature)."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


class PromptLogprobs(NamedTuple):
    """Log-probabilities of m prompt tokens in columns: the form in which they travel, little-endian and in C order."""

    ranks: bytes  # int32 [m]
    logprobs: bytes  # float32 [m]
    top_ids: bytes  # int32 [m, n]
    top_logprobs: bytes  # float32 [m, n]

    def of(self, token_ids: Sequence[int]) -> PromptScores:
        """One entry for each of these m tokens."""
        return PromptScores(self, token_ids)


class PromptScores(Sequence[TokenLogprobs]):
    """PromptLogprobs by token: an entry is made when it is read, since all of a long prompt's take a while."""

    def __init__(self, columns: PromptLogprobs, token_ids: Sequence[int]) -> None:
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


class Verified(NamedTuple):
    """Guesses that one step verified. Those that were right are tokens `at` to `at + num_accepted` of an output."""

    at: int
    num_guessed: int
    num_accepted: int


@dataclass(slots=True)
class RequestOutput:
    """What one step added to one request."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason = FinishReason.NONE
    stop_token_id: int | None = None  # the stop id that ended it; None for EOS, which is not delivered as a stop id
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, if asked for
    num_cached: int = 0  # prompt tokens served from the prefix cache
    error: str = ""  # one sentence, with FinishReason.ERROR and GRAMMAR
    # All of them with the first output, if asked for; entry i is about prompt token i + 1.
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    queued_s: float = 0.0  # with the first token: from the engine's queue to a slot
    prefill_s: float = 0.0  # with the first token: from a slot to it
    first_sampled_at: float = 0.0  # with the first token: when it was sampled, by the engine's wall clock
    sampled_at: float = 0.0  # when the last token here was sampled, by the engine's wall clock; 0: there is none
    verified: list[Verified] | None = None  # in order, if there was something to verify


@dataclass(slots=True)
class StepOutput:
    """What one committed step added, in columns: `states[i]` gained `token_ids[i]`.

    A request's states are opaque here (scheduler.RequestState); `finished` lists those that ended, after their last
    token."""

    states: list[Any]
    token_ids: list[int]
    finished: list[tuple[Any, FinishReason]]
    logprobs: dict[int, TokenLogprobs]  # by index in the columns
    prompt_logprobs: list[tuple[Any, PromptLogprobs]]  # (state, those of prompt tokens 1, 2, ...), once a request
