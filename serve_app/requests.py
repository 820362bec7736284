"""OpenAI's request shapes, and their translation to the engine's own.

What a field may hold is said once, here. A field that would change the answer but is not supported is refused; other
unknown fields are ignored.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from runtime.core.types import SamplingParams
from serve_app.errors import ApiError, echoed, invalid

MAX_CHOICES = 1024  # of one request: its prompts times n
_SEED_MASK = (1 << 63) - 1


def _refused(*harmless: Any) -> AfterValidator:
    """Allows a field that is not supported only the values that ask for nothing."""

    def check(value: Any) -> Any:
        if value not in harmless:
            raise PydanticCustomError("not_supported", "this field is not supported yet; leave it out")
        return value

    return AfterValidator(check)


def _text_or_list(value: Any) -> str | None:
    """The union tag of a text or a list of things; tags start with "<" and are left out of field paths."""
    return "<text>" if isinstance(value, str) else "<list>" if isinstance(value, list) else None


def _prompt_shape(value: Any) -> str | None:
    match value:
        case str():
            return "<text>"
        case [str(), *_]:
            return "<texts>"
        case [list(), *_]:
            return "<token id lists>"
        case [*_]:
            return "<token ids>"
    return None


class _Model(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, allow_inf_nan=False)


_T = TypeVar("_T")


class StreamOptions(_Model):
    include_usage: bool = False


_Seed = Annotated[int, Field(ge=-(1 << 63), le=(1 << 63) - 1)]
_TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_TokenIds = Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]  # a long list of faults would cost minutes
_StopString = Annotated[str, Field(min_length=1, max_length=1024)]
_Stop = Annotated[
    Annotated[_StopString, Tag("<text>")] | Annotated[list[_StopString], Field(max_length=16), Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="stop_shape",
        custom_error_message="it should be a text or a list of texts",
    ),
]
_Bias = Annotated[float, Field(ge=-100, le=100)]


class _Sampling(_Model):
    """The fields that both endpoints share; those from `top_k` on are extensions."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: _Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: _Seed | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, _Bias] | None = None
    user: str | None = None

    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    stop_token_ids: list[_TokenId] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: str = ""

    tools: Annotated[Any, _refused(None, [])] = None
    functions: Annotated[Any, _refused(None, [])] = None
    response_format: Annotated[Any, _refused(None, {"type": "text"})] = None
    structured_outputs: Annotated[Any, _refused(None)] = None
    guided_json: Annotated[Any, _refused(None)] = None
    guided_regex: Annotated[Any, _refused(None)] = None
    guided_choice: Annotated[Any, _refused(None)] = None
    guided_grammar: Annotated[Any, _refused(None)] = None
    prompt_logprobs: Annotated[Any, _refused(None)] = None
    use_beam_search: Annotated[Any, _refused(None, False)] = None

    def max_output(self) -> int | None:
        """Tokens of output asked for; None if the request does not say."""
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """Alternatives to report at each position; None if no log-probabilities are asked for."""
        raise NotImplementedError

    def check(self) -> None:
        """Rules between fields; raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is only allowed when stream is true")

    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """The engine's parameters, with `max_tokens` resolved; raises ApiError naming the field at fault."""
        if self.min_tokens > max_tokens:
            raise invalid("min_tokens", f"is {self.min_tokens}, more than the {max_tokens} tokens of output allowed")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_or(self.temperature, 1.0),
            top_k=max(_or(self.top_k, 0), 0),
            top_p=_or(self.top_p, 1.0),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            logit_bias=tuple((_token_id_key(k), v) for k, v in (self.logit_bias or {}).items()),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            seed=None if self.seed is None else self.seed & _SEED_MASK,
            logprobs=self.num_logprobs(),
            stop=stop,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


_Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(fail_fast=True), Tag("<texts>")]
    | Annotated[_TokenIds, Tag("<token ids>")]
    | Annotated[list[_TokenIds], Field(fail_fast=True), Tag("<token id lists>")],
    Discriminator(
        _prompt_shape,
        custom_error_type="prompt_shape",
        custom_error_message="it should be a text, a list of texts, a list of token ids or a list of such lists",
    ),
]


class CompletionRequest(_Sampling):
    """POST /v1/completions."""

    prompt: _Prompt
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Annotated[Any, _refused(None, "")] = None

    def max_output(self) -> int | None:
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != _or(self.n, 1):
            raise invalid("best_of", f"is {self.best_of}, but only the value of n is supported; leave it out")
        if self.echo and self.logprobs is not None:
            raise invalid("echo", "is not supported together with logprobs; leave one out")

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts as a list, each a text or token ids."""
        match self.prompt:
            case str(text):
                return [text]
            case [int(), *_]:
                return [self.prompt]
        return self.prompt


class TextPart(_Model):
    type: Literal["text"]
    text: str


_Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<list>")],
    Discriminator(
        _text_or_list,
        custom_error_type="content_shape",
        custom_error_message="it should be a text or a list of text parts",
    ),
]


class ChatMessage(_Model):
    role: Literal["system", "developer", "user", "assistant"]
    content: _Content
    name: str | None = None
    tool_calls: Annotated[Any, _refused(None, [])] = None

    def as_template_sees_it(self) -> dict[str, str]:
        content = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        # "developer" is OpenAI's later name of "system"; models know the earlier one.
        message = {"role": "system" if self.role == "developer" else self.role, "content": content}
        return message if self.name is None else {**message, "name": self.name}


class ChatRequest(_Sampling):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    audio: Annotated[Any, _refused(None)] = None
    modalities: Annotated[Any, _refused(None, ["text"])] = None
    prediction: Annotated[Any, _refused(None)] = None
    chat_template: Annotated[Any, _refused(None)] = None
    chat_template_kwargs: Annotated[Any, _refused(None, {})] = None
    continue_final_message: Annotated[Any, _refused(None, False)] = None
    add_generation_prompt: Annotated[Any, _refused(None, True)] = None

    def max_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return _or(self.top_logprobs, 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "is only allowed when logprobs is true")


class AbortRequest(_Model):
    """POST /v1/abort: the id of an answer, or the client's own for the request (X-Request-Id, request_id)."""

    request_id: Annotated[str, Field(min_length=1, max_length=256)]


_R = TypeVar("_R", bound=_Sampling)


def parse(kind: type[_R], body: bytes) -> _R:
    """A request from the bytes of its JSON; raises ApiError with the path of the first field at fault."""
    request = validated(kind, body)
    request.check()
    return request


_M = TypeVar("_M", bound=_Model)


def validated(kind: type[_M], body: bytes) -> _M:
    """What `body` says, field by field; raises ApiError with the path of the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as e:
        raise _plain(e) from None


def _plain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    reason = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    path = echoed(".".join(str(at) for at in first["loc"] if not str(at).startswith("<")))
    if not path:
        return ApiError(400, "The request body must be a JSON object.")
    if first["type"] == "missing":
        return ApiError(400, f"{path} is missing; it is required.", param=path)
    return ApiError(400, f"{path} is {_shown(first['input'])}: {reason}.", param=path)


def _shown(value: Any) -> str:
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _token_id_key(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise invalid(f"logit_bias.{key}", "is no token id; keys are numbers such as 50256")
    return int(key)


def choice_seed(seed: int, index: int) -> int:
    """The seed of the choice `index` of a prompt: the request's own for the first, one derived from it for others."""
    if index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(b"%d/%d" % (seed, index), digest_size=8).digest(), "little") & _SEED_MASK
