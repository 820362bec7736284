"""The fields that all generating endpoints share, and their translation to the engine's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from runtime.base.sampling_fields import table_of
from runtime.base.types import SamplingParams
from runtime.core.requests import SEED_MASK
from runtime.output.fields import invalid, shown
from runtime.output.options import TTL_SECONDS, OutputOptions
from runtime.text.sampling_defaults import SamplingDefaults
from serve_app.protocol.dialects import Dialect
from serve_app.protocol.other_servers import UNSUPPORTED_FIELDS, UnsupportedField
from serve_app.protocol.shapes import (
    CacheOptions,
    OpenRequestModel,
    RequestModel,
    TokenId,
    VersionName,
    cache_marks,
    text_or_list_of,
)

MAX_SCORED_IDS = 64  # ids in one request: entries at each answer token, besides the best
MAX_BIASES = 1024  # biases in one request; this many in all slots make a step a few milliseconds longer
MAX_SESSION_CHARS = 1024  # length of a session's name
MAX_CHOICES = 1024  # choices in one request: its prompts times n


class StreamOptions(RequestModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # the choice's usage so far in every chunk, if include_usage is set


_FIELDS = {f.name: f for f in table_of(SamplingParams).fields}


def _limits(name: str) -> Any:
    limits: dict[str, Any] = {**_FIELDS[name].limits}
    return Field(**limits)


_OneSeed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
_Seed = Annotated[
    Annotated[_OneSeed, Tag("<number>")] | Annotated[list[_OneSeed], Field(fail_fast=True), Tag("<list>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<number>"),
]
_Samplers = Annotated[
    Annotated[str, Field(max_length=64), Tag("<text>")]
    | Annotated[list[str], Field(max_length=64, fail_fast=True), Tag("<list>")],
    text_or_list_of("names"),
]
# llama.cpp's samplers by name and by letter, with the fields that a list without the name switches off.
_OFF: dict[tuple[str, str], dict[str, float]] = {
    ("penalties", "e"): {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    ("top_k", "k"): {"top_k": 0},
    ("top_p", "p"): {"top_p": 1.0},
    ("min_p", "m"): {"min_p": 0.0},
    ("temperature", "t"): {"temperature": 1.0},
}
_StopString = Annotated[str, Field(min_length=1, max_length=1024)]
_Stop = Annotated[
    Annotated[_StopString, Tag("<text>")]
    | Annotated[list[_StopString], Field(max_length=1024, fail_fast=True), Tag("<list>")],
    text_or_list_of("texts"),
]


def _not_too_many(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:  # checked before each entry
        raise PydanticCustomError("too_long", f"it should have at most {MAX_BIASES} entries")
    return value


_LogitBias = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_not_too_many)]


class DrawFields(RequestModel):
    """The numbers that have one name and one meaning in all APIs."""

    temperature: Annotated[float, _limits("temperature")] | None = None
    top_p: Annotated[float, _limits("top_p")] | None = None
    min_p: Annotated[float, _limits("min_p")] | None = None
    frequency_penalty: Annotated[float, _limits("frequency_penalty")] | None = None
    presence_penalty: Annotated[float, _limits("presence_penalty")] | None = None


class SamplingFields(OpenRequestModel, DrawFields, OutputOptions):
    """The fields that both endpoints share; those from `top_k` on are extensions."""

    model_config = ConfigDict(extra="allow")  # OutputOptions forbid them
    dialect: ClassVar[Dialect] = Dialect()
    refused: ClassVar[dict[str, UnsupportedField]] = UNSUPPORTED_FIELDS
    computes: ClassVar[bool] = True  # False for a request that is answered without an engine

    model: str | None = None
    stop: _Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: _Seed | None = None  # one for all prompts, or one for each
    logit_bias: _LogitBias | None = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # 0 and -1: off
    repetition_penalty: Annotated[float, _limits("repetition_penalty")] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    samplers: _Samplers | None = None  # llama.cpp's: the filters that count, in this server's order
    allowed_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASES, fail_fast=True)] | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(max_length=MAX_SCORED_IDS, fail_fast=True)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=MAX_SESSION_CHARS)] | None = None  # names a session, for routing
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    min_weight_version: VersionName | None = None  # wait for these weights or newer ones
    add_special_tokens: bool | None = None  # default: around a text, not around what a template has rendered
    # kept from the end; -1 keeps what fits
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    prompt_logprobs: Annotated[int, _limits("prompt_logprobs")] | None = None
    sampling_logprobs: bool = False  # adds the distribution that tokens are drawn from to the model's own
    routed_experts: bool = False  # needs --routed-experts
    detokenize: bool = True  # False, with return_token_ids: an answer without text
    return_token_ids: bool | None = None
    return_prompt_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # applies to log-probabilities

    def max_output(self) -> int | None:
        """Return the requested tokens of output; None without a number."""
        raise NotImplementedError

    def keep_s(self) -> float | None:
        """Return the idle time for which the model should stay loaded; None for the server's own."""
        return None

    @property
    def prewarms(self) -> bool:
        """True if the prompt is only computed and cached."""
        return self.prompt_cache_options is not None and self.prompt_cache_options.prewarm

    def contents(self) -> Iterable[Any]:
        """The parts of the prompt that may have cache marks."""
        return ()

    def cache_ttl_s(self) -> float:
        """Return the time for which caches should keep the prompt; 0 for their own. The longest of several counts."""
        options, retention = self.prompt_cache_options, self.prompt_cache_retention
        default = (options or CacheOptions()).ttl
        ttls = [mark.ttl or default for mark in cache_marks(self.contents())]
        ttls += [] if options is None or options.mode == "explicit" else [default]
        ttls += [retention] if retention == "24h" else []
        return max([super().cache_ttl_s(), *(TTL_SECONDS[ttl] for ttl in ttls)])

    def num_logprobs(self) -> int | None:
        """Return the alternatives to report at each position; None without log-probabilities."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Return the alternatives to compute at each position of the prompt; None without its scores."""
        return self.prompt_logprobs

    def num_prompts(self) -> int:
        return 1

    @property
    def shows_prompt_ids(self) -> bool:
        return bool(self.return_token_ids or self.return_prompt_token_ids)

    def shows_more_than_text(self) -> bool:
        """True if every event of a stream has more than new text."""
        return bool(self.return_token_ids)

    def check(self) -> None:
        """Check rules between fields, and fields of other servers; raises FieldError."""
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "is 0, which would leave no prompt; use -1 for all that fits")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "is not available when stream is true; leave one out")
        if self.logprob_token_ids and self.num_logprobs() is None:
            raise invalid("logprob_token_ids", "is only allowed with log-probabilities; send logprobs, too")
        if self.sampling_logprobs and self.num_logprobs() is None:
            raise invalid("sampling_logprobs", "is only allowed with log-probabilities; send logprobs, too")
        if self.detokenize is False and not self.return_token_ids:
            raise invalid("detokenize", "is false, so the answer would be empty; send return_token_ids, too")
        if self.detokenize is False and self.stop:
            raise invalid("stop", "needs a text, but detokenize is false; send stop_token_ids")
        if isinstance(self.seed, list) and len(self.seed) != (num_prompts := self.num_prompts()):
            problem = f"is a list of length {len(self.seed)}, and the number of prompts is {num_prompts}"
            raise invalid("seed", f"{problem}; send one number, or one for each prompt")
        if (most := self.dialect.max_penalty) is not None:
            for name in ("frequency_penalty", "presence_penalty"):
                if abs(value := getattr(self, name) or 0.0) > most:
                    raise invalid(name, f"is {value:g}; it must be between {-most:g} and {most:g}")
        penalties = (self.repetition_penalty or 1) != 1 or self.presence_penalty or self.frequency_penalty
        check_last_n("repeat_last_n", (self.model_extra or {}).get("repeat_last_n") if penalties else None)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is only allowed when stream is true")
        if (grammar := self.requested_grammar()) is not None:
            for name, is_set in (("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
                if is_set:
                    raise invalid(name, f"cannot be combined with {grammar.field}, which sets where the output ends")
            if self.allowed_token_ids:
                problem = f"cannot be combined with {grammar.field}, which sets the allowed tokens"
                raise invalid("allowed_token_ids", problem)
        super().check()

    @cached_property
    def _bias(self) -> tuple[tuple[int, float], ...]:
        """`logit_bias` for the engine, shared by all prompts of a request; raises FieldError."""
        return tuple((_token_id_key(key), value) for key, value in (self.logit_bias or {}).items())

    def sampling_params(self, max_tokens: int, defaults: SamplingDefaults, index: int = 0) -> SamplingParams:
        """Return the engine's parameters for prompt `index`, with `max_tokens` resolved; raises FieldError."""
        if self.min_tokens > max_tokens:
            raise invalid("min_tokens", f"is {self.min_tokens}, more than the {max_tokens} tokens of output allowed")
        seed = self.seed[index] if isinstance(self.seed, list) else self.seed
        given = {name: getattr(self, name) for name in _FIELDS.keys() & type(self).model_fields.keys()}
        given |= {
            "max_tokens": max_tokens,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "logit_bias": self._bias,
            "seed": None if seed is None else seed & SEED_MASK,
            "logprobs": self.num_logprobs(),
            "prompt_logprobs": self.num_prompt_logprobs(),
        }
        for names, off in _OFF.items():
            if self.samplers is not None and not any(name in self.samplers for name in names):
                given |= off
        return defaults.params(**given)


def check_last_n(field: str, last: object) -> None:
    """Raise FieldError for penalties that look at some of the tokens only."""
    if last not in (None, -1):
        raise invalid(field, f"is {shown(last)}, but penalties look at all tokens here; leave it out")


def _token_id_key(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and (key == "0" or key[0] != "0")):
        # 050256 would be another spelling
        raise invalid(f"logit_bias.{key}", "is not a token id; keys are numbers such as 50256")
    return int(key)
