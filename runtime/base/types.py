"""The vocabulary of Callboard: requests, sampling parameters and outputs.

Everything here is plain data: no torch, no I/O, no clock. All ids, lengths and positions count tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

import msgspec

from runtime.base.errors import CallboardError as CallboardError
from runtime.base.images import Image, ImageSpan
from runtime.base.plain_values import INT64
from runtime.base.reports import Report
from runtime.base.reports import TokenLogprobs as TokenLogprobs
from runtime.base.sampling_fields import Effect, sampling, table_of

_LEAST_TEMPERATURE = 1e-5
TOKEN_BYTES = 4  # a token's bytes in a message
MAX_DRAFT_TOKENS = 8  # draft tokens a row
MAX_MATCHED_TOKENS = 15  # the same for a long match of n-grams, by a model without recurrent states
NOT_FINITE = "The model gave logits that are not finite for this request."  # sent with FinishReason.ERROR


class FinishReason(IntEnum):
    """Why a request ended. NONE means that it continues."""

    NONE = 0
    STOP = 1  # an end-of-sequence id or a stop id was sampled
    LENGTH = 2  # max_tokens or the model's context is exhausted
    ABORT = 3  # aborted by its client, by its client's loss, or by a pause
    ERROR = 4  # a fault in only this request, for example non-finite logits
    GRAMMAR = 5  # its grammar cannot be served, or cannot continue


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A form that a client wants the output to match."""

    kind: Literal["json", "regex", "choice", "calls", "grammar", "tags", "without", "channels"]
    # In the kinds' order: a JSON Schema; a regular expression for the whole output; a JSON list of texts.
    # See grammar.Calls. A grammar in EBNF or Lark's form. See tags.Tags. A JSON list of forbidden texts.
    # See channels.Channels.
    text: str
    after: str = ""  # the output begins with free text up to this mark
    special: tuple[tuple[str, int], ...] = ()  # the free text's marks, and `after`, that are special tokens; their ids
    may_stay_free: bool = False  # the whole output may be free text, without the mark
    # True refuses a schema's keywords that cannot be enforced. False ignores them. None refuses all but uniqueItems.
    strict: bool | None = None
    opens: str = ""  # the free text begins with this mark, or is left out; empty if the output is within it


@dataclass(frozen=True, slots=True)
class Grammar:
    """A GrammarSpec in the engines' form (runtime.structured.grammar). It allows only outputs that match the spec."""

    key: str  # hash of its allowed outputs
    lark: str  # llguidance's form
    expression: str  # the same as one regular expression; empty if that would be too long
    ignored: tuple[str, ...] = ()  # keyword paths that are not enforced

    @property
    def named(self) -> Grammar:
        """The grammar without its texts."""
        return Grammar(self.key, "", "")

    @property
    def num_bytes(self) -> int:
        """Bytes of its texts."""
        texts = self.lark, self.expression, *self.ignored
        return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """The most tokens of an output's reasoning, and the marks around it as tokens."""

    num_tokens: int
    close_ids: tuple[int, ...]  # the tokens, in order, that end reasoning
    open_id: int | None  # begins reasoning; None if its mark is text
    is_open: bool  # the prompt ends within reasoning
    # The ids of <|channel|>, <|message|> and <|end|> if the model has channels; None for marks around reasoning.
    channel_ids: tuple[int, int, int] | None = None
    marks: tuple[str, str] = ("<think>", "</think>")  # marks as text


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling, as a table (sampling_fields.py). Defaults are OpenAI's; `temperature=0` is greedy.

    Columns 1, 2, 9 and 12 in a slot's row are kernels/sampling/sample.py's."""

    # 0 only with prompt_logprobs: the request scores its prompt and ends
    max_tokens: int = sampling(16, Effect.LENGTH, 0)
    # Below 1e-5 it is greedy, as with 0: logits divided by it would overflow.
    temperature: float = sampling(1.0, Effect.DRAW, 0.0, 100.0, neutral=0.0, column=0, gguf="temp")
    top_k: int = sampling(0, Effect.FILTER, 0, (1 << 31) - 1, column=3, gguf="top_k")
    top_p: float = sampling(1.0, Effect.FILTER, 0.0, 1.0, column=4, gguf="top_p")  # 0 is greedy
    min_p: float = sampling(0.0, Effect.FILTER, 0.0, 1.0, column=5, gguf="min_p")
    # It counts prompt and output.
    repetition_penalty: float = sampling(1.0, Effect.PENALTY, above=0.0, high=100.0, column=6, gguf="penalty_repeat")
    frequency_penalty: float = sampling(0.0, Effect.PENALTY, -100.0, 100.0, column=7)  # counts output
    presence_penalty: float = sampling(0.0, Effect.PENALTY, -100.0, 100.0, column=8)  # counts output
    logit_bias: tuple[tuple[int, float], ...] = sampling((), Effect.BIAS)  # (token id, bias) pairs
    allowed_token_ids: tuple[int, ...] = sampling((), Effect.BIAS)  # only these are sampled; empty for all
    min_tokens: int = sampling(0, Effect.HOLD, 0)  # no EOS and no stop id before this many output tokens
    stop_token_ids: tuple[int, ...] = sampling((), Effect.LENGTH)
    ignore_eos: bool = sampling(False, Effect.LENGTH)
    # If None the front draws one; engines read Request.seed (C4).
    seed: int | None = sampling(None, Effect.TEXT, *INT64)
    logprobs: int | None = sampling(None, Effect.REPORT, 0, 20)  # n reports the sampled token and the n best
    logprob_token_ids: tuple[int, ...] = sampling((), Effect.REPORT)  # also reported if `logprobs` is set
    # With `logprobs`, also report each token's log-probability under the distribution that it was drawn from.
    sampling_logprobs: bool = sampling(False, Effect.REPORT)
    # At each position in the prompt, and in an output that the request brings, n reports its own token and the n best.
    prompt_logprobs: int | None = sampling(None, Effect.REPORT, 0, 20)
    routed_experts: bool = sampling(False, Effect.REPORT)  # report each computed token's experts, for mixtures
    grammar: Grammar | None = sampling(None, Effect.GRAMMAR)  # noqa: RUF009
    thinking: ThinkingBudget | None = sampling(None, Effect.GRAMMAR)  # noqa: RUF009
    # The output is the prompt's vector (pooling.py); max_tokens is 1, and that token is dropped.
    pooled: bool = sampling(False, Effect.LENGTH)
    stop: tuple[str, ...] = sampling((), Effect.TEXT)  # matched by the process that makes the text
    include_stop_str_in_output: bool = sampling(False, Effect.TEXT)
    skip_special_tokens: bool = sampling(True, Effect.TEXT)
    detokenize: bool = sampling(True, Effect.TEXT)  # False gives token ids without a text, and takes no stop strings

    @property
    def list_bytes(self) -> int:
        """Approximate bytes of its lists in a message, without its grammar."""
        num_ids = len(self.allowed_token_ids) + len(self.stop_token_ids) + len(self.logprob_token_ids)
        return 5 * num_ids + 14 * len(self.logit_bias) + 4 * sum(map(len, self.stop))

    @property
    def reports_prompt(self) -> bool:
        """True if each token of the prompt is computed for a report, without cached blocks."""
        return self.prompt_logprobs is not None or self.routed_experts

    def without(self, effects: Set[Effect]) -> SamplingParams:
        """Return a copy in which the parameters with these effects are neutral."""
        return replace(self, **{f.name: f.neutral for f in table_of(type(self)).fields if f.effect in effects})

    def with_keyed(self, change: Callable[[Any], Any]) -> SamplingParams:
        """Return a copy in which `change` replaces the grammar. It skips the checks that `self` has passed."""
        if self.grammar is None:
            return self
        copy = object.__new__(SamplingParams)
        for name in self.__slots__:
            object.__setattr__(copy, name, getattr(self, name))
        object.__setattr__(copy, "grammar", change(self.grammar))
        return copy

    def __post_init__(self) -> None:
        table_of(type(self)).check(self)
        if not self.max_tokens and self.prompt_logprobs is None:
            raise CallboardError("max_tokens is 0; it must be at least 1.")
        if self.pooled and self.max_tokens != 1:
            raise CallboardError(f"max_tokens is {self.max_tokens}; it must be 1 for a prompt that is pooled.")
        if self.sampling_logprobs and self.logprobs is None:
            raise CallboardError("sampling_logprobs is True without logprobs; send logprobs, 0 or more.")
        if self.stop and not self.detokenize:
            raise CallboardError("stop needs a text, but detokenize is False; send stop_token_ids.")
        if self.min_tokens > self.max_tokens:
            raise CallboardError(f"min_tokens is {self.min_tokens}; it must be between 0 and max_tokens.")
        if self.temperature < _LEAST_TEMPERATURE or not self.top_p:  # only the most likely token remains
            object.__setattr__(self, "temperature", 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as a front submits it. `requests.requests_of` resolves its seed.

    `token_ids` holds the prompt. If a stream is resumed after an engine's death, the delivered output follows there.
    `prompt_len` marks where the output begins, so positions, penalties and limits are as in the first try (C8).

    A trainer scores an output in the same form: `prompt_logprobs` covers all tokens that the request brings. Each is
    computed as when it was sampled, so its log-probability has the same bits in deterministic mode."""

    request_id: str
    token_ids: list[int]
    prompt_len: int
    params: SamplingParams
    seed: int = 0  # 63 bits; the key of this request's noise (C4)
    priority: int = 0  # lower is served first
    cache_salt: str = ""  # requests share cached blocks only under the same salt (C5)
    adapter: str = ""  # its adapter's digest; empty for none
    prediction: tuple[int, ...] = ()  # the output that the client expects; n-gram lookup drafts from it
    min_weight_version: str = ""  # it waits for an engine with these weights or newer ones; empty for any
    images: tuple[ImageSpan, ...] = ()  # in the prompt, by position
    cache_ttl_s: float = field(default=0.0, compare=False)  # seconds until the tier may evict its blocks; 0 for no hint
    session: str = field(default="", compare=False)  # one session's requests go to one engine if costs allow it
    keeps_output: bool = field(default=False, compare=False)  # the engine keeps its tokens if its reader leaves
    resumes: bool = field(default=False, compare=False)  # it continues with the tokens that were kept under its id

    @property
    def num_tokens(self) -> int:
        """Tokens in its prompt and its prediction."""
        return len(self.token_ids) + len(self.prediction)

    @property
    def own_bytes(self) -> int:
        """Approximate bytes in a message, without its grammar and its images."""
        return TOKEN_BYTES * self.num_tokens + self.params.list_bytes

    @property
    def keyed(self) -> dict[str, Grammar | Image]:
        """Its grammar and its images, by key."""
        values: dict[str, Grammar | Image] = {span.image.key: span.image for span in self.images}
        if (grammar := self.params.grammar) is not None:
            values[grammar.key] = grammar
        return values

    @property
    def named(self) -> Request:
        """The request as it travels: its grammar and its images are their keys alone."""
        return self.with_keyed(lambda value: value.named)

    def with_keyed(self, change: Callable[[Any], Any]) -> Request:
        """Return a copy in which `change` replaces the grammar and each image."""
        if self.params.grammar is None and not self.images:
            return self
        images = tuple(msgspec.structs.replace(span, image=change(span.image)) for span in self.images)
        return replace(self, params=self.params.with_keyed(change), images=images)


@dataclass(slots=True)
class RequestOutput:
    """Tokens that one step added to one request, with their log-probabilities and times."""

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason = FinishReason.NONE
    stop_token_id: int | None = None  # the stop id that ended it; None for EOS, which is not delivered as a stop id
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # one per token id, if requested
    num_cached: int = 0  # prompt tokens served from the prefix cache
    num_expected: int | None = None  # cached tokens that the router expected; None if it did not choose the engine
    error: str = ""  # one sentence, with FinishReason.ERROR and GRAMMAR
    queued_s: float = 0.0  # time from the engine's queue to a slot; set with the first token
    prefill_s: float = 0.0  # time from a slot to the first token; set with it
    first_sampled_at: float = 0.0  # the first token's sampling time by the engine's wall clock; set with it
    sampled_at: float = 0.0  # sampling time of the last token here by the engine's wall clock; 0 without tokens
    reports: Sequence[Report] = ()  # in order
    # (output token index, weight version from there on), rising; empty without weight_updates
    weight_versions: Sequence[tuple[int, str]] = ()


@dataclass(slots=True)
class StepOutput:
    """Tokens that one committed step added, in columns: `states[i]` gained `token_ids[i]`.

    The states (RequestState) are opaque here. `finished` lists the requests that ended, after their last token."""

    states: list[Any]
    token_ids: list[int]
    finished: list[tuple[Any, FinishReason]]
    logprobs: dict[int, TokenLogprobs]  # by index in the columns
    reports: list[tuple[Any, Report]]  # (state, report), in order
