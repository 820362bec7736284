"""OpenAI's request shapes, and their translation to the engine's own.

What a field may hold is said once, here. A field that would change the answer but is not supported is refused; other
unknown fields are ignored, and named in a header of the answer.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import quote

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from runtime.core.types import SamplingParams
from serve_app.errors import ApiError, invalid

MAX_CHOICES = 1024  # of one request: its prompts times n
_MAX_IGNORED = 32  # names of unknown fields to report
_SEED_MASK = (1 << 63) - 1


# Fields of OpenAI, vLLM, SGLang and TGI that would change the answer, with the values that ask for nothing.
_KNOWN_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "length_penalty": (None, 1),
    "early_stopping": (None, False),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None, []),
    "guided_grammar": (None,),
    "structural_tag": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "grammar": (None,),
    "stop_regex": (None, []),
    "no_stop_trim": (None, False),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "logits_processors": (None, []),
    "custom_logit_processor": (None,),
    "logprob_token_ids": (None,),
    "return_tokens_as_token_ids": (None, False),
    "truncation_side": (None, "left"),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "watermarking": (None, False),
    "watermark": (None, False),
    "typical_p": (None, 1),
    "top_n_tokens": (None, 0),
    "max_new_tokens": (None,),
    "prompt_embeds": (None,),
    "input_embeds": (None,),
    "lora_path": (None,),
    "adapter_id": (None,),
    "kv_transfer_params": (None,),
    "vllm_xargs": (None, {}),
}


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
    continuous_usage_stats: bool = False  # the choice's usage so far in every chunk, if include_usage is set


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
_RequestId = Annotated[str, Field(pattern=r"^[!-~]{1,128}$")]  # it may come back in a header


class _Sampling(_Model):
    """The fields that both endpoints share; those from `top_k` on are extensions."""

    model_config = ConfigDict(extra="allow")  # kept to be named, see `ignored_fields`

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
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    request_id: _RequestId | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # of its end; -1: what fits
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None

    tools: Annotated[Any, _refused(None, [])] = None
    functions: Annotated[Any, _refused(None, [])] = None
    response_format: Annotated[Any, _refused(None, {"type": "text"})] = None
    structured_outputs: Annotated[Any, _refused(None)] = None

    def max_output(self) -> int | None:
        """Tokens of output asked for; None if the request does not say."""
        raise NotImplementedError

    def num_logprobs(self) -> int | None:
        """Alternatives to report at each position; None if no log-probabilities are asked for."""
        raise NotImplementedError

    def num_prompt_logprobs(self) -> int | None:
        """Alternatives to compute at each position of the prompt; None if the prompt need not be scored."""
        return self.prompt_logprobs

    def ignored_fields(self) -> list[str]:
        """The first of the names that mean nothing here, fit for a header."""
        return [quote(name, safe="")[:64] for name in list(self.model_extra or ())[:_MAX_IGNORED]]

    def check(self) -> None:
        """Rules between fields, and fields that are known elsewhere; raises ApiError."""
        for name, value in (self.model_extra or {}).items():
            if value not in _KNOWN_ELSEWHERE.get(name, (value,)):
                raise invalid(
                    name, f"is {_shown(value)}: it would change the answer but is not supported; leave it out"
                )
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "is 0, which would leave no prompt; use -1 for all that fits")
        if self.prompt_logprobs is not None and self.stream:
            raise invalid("prompt_logprobs", "is not available when stream is true; leave one out")
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
            prompt_logprobs=self.num_prompt_logprobs(),
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
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    add_special_tokens: bool = True

    def max_output(self) -> int | None:
        return self.max_tokens

    def num_logprobs(self) -> int | None:
        return self.logprobs

    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None, None if self.max_tokens != 0 else 0]
        return max((n for n in wanted if n is not None), default=None)

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != _or(self.n, 1):
            raise invalid("best_of", f"is {self.best_of}, but only the value of n is supported; leave it out")

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
    add_special_tokens: bool = False  # the template has them

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


_R = TypeVar("_R", bound=_Sampling)


def parse(kind: type[_R], body: bytes) -> _R:
    """A request from the bytes of its JSON; raises ApiError with the path of the first field at fault."""
    try:
        request = kind.model_validate_json(body)
    except ValidationError as e:
        raise _plain(e) from None
    request.check()
    return request


def _plain(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    reason = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {first['ctx']['error']}.", code="invalid_json")
    path = ".".join(str(at) for at in first["loc"] if not str(at).startswith("<"))
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
