"""OpenAI's request shapes, and their translation to the engine's own.

What a field may hold is said once, here. A field that would change the answer but is not supported is refused; other
unknown fields are ignored, and named in a header of the answer.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal, LiteralString, TypeVar
from urllib.parse import quote

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError
from pydantic_core import PydanticCustomError

from runtime.core.types import GrammarSpec, SamplingParams
from runtime.structured.grammar import Calls
from runtime.text.tool_calls import ToolFormat
from serve_app.errors import ApiError, echoed, invalid
from serve_app.structure import ResponseFormat, Structure, StructuredOutputs, asked_structure

MAX_CHOICES = 1024  # of one request: its prompts times n
_MAX_IGNORED = 32  # names of unknown fields to report
_SEED_MASK = (1 << 63) - 1


# Fields of OpenAI, vLLM, SGLang and TGI that would change the answer, with the values that ask for nothing.
_KNOWN_ELSEWHERE: dict[str, tuple[Any, ...]] = {
    "suffix": (None, ""),
    "max_completion_tokens": (None,),  # of a completion; a chat has it
    "top_logprobs": (None, 0),
    "echo": (None, False),  # of a chat; a completion has it
    "best_of": (None, 1),
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


def _refused(*harmless: Any, says: LiteralString = "this field is not supported yet; leave it out") -> AfterValidator:
    """Allows a field that is not supported only the values that ask for nothing."""

    def check(value: Any) -> Any:
        if value not in harmless:
            raise PydanticCustomError("not_supported", says)
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
    stop_token_ids: Annotated[list[_TokenId], Field(max_length=1024, fail_fast=True)] | None = None
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0)] = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    add_special_tokens: bool | None = None  # default: around a text, not around what a template has rendered
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None  # of its end; -1: what fits
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool | None = None

    tools: Annotated[Any, _refused(None, [])] = None
    functions: Annotated[Any, _refused(None, [])] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

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
        if (structure := self.structure()) is not None:
            for name, asks in (("min_tokens", self.min_tokens), ("ignore_eos", self.ignore_eos)):
                if asks:
                    raise invalid(name, f"cannot be combined with {structure.field}, which says where the output ends")

    def structure(self) -> Structure | None:
        """What the output must match; None if it is free."""
        return asked_structure(self.response_format, self.structured_outputs)

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

    return_draft_spans: bool | None = None  # an extension: which of the text a draft had guessed

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


_LEGACY = _refused(None, [], says="this field is OpenAI's old one; use tools, tool_choice and tool_calls instead")


class CalledFunction(_Model):
    name: str
    arguments: str

    def as_template_sees_it(self) -> dict[str, Any]:
        # Templates write the arguments as JSON themselves. What a model wrote may be no JSON: it is a text then.
        try:
            arguments = json.loads(self.arguments)
        except (ValueError, RecursionError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(_Model):
    """A call that the model has made, as a client sends it back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_template_sees_it(self) -> dict[str, Any]:
        return {"id": self.id, "type": self.type, "function": self.function.as_template_sees_it()}


class ChatMessage(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: _Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool: the call that it answers
    reasoning_content: str | None = None  # of an assistant; templates decide whether it is shown
    function_call: Annotated[Any, _LEGACY] = None

    def check(self, where: str) -> None:
        """Rules between fields; raises ApiError."""
        if self.role == "assistant":
            if self.content is None and not self.tool_calls and self.reasoning_content is None:
                raise invalid(f"{where}.content", "is missing; a text is needed where there are no tool_calls")
            return
        if self.content is None:
            raise invalid(f"{where}.content", "is missing; it should be a text or a list of text parts")
        if self.tool_calls:
            raise invalid(f"{where}.tool_calls", f"is not allowed in a message of the role {self.role!r}")
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", "is missing; it is the id of the call that the message answers")

    def text(self) -> str:
        """The content; empty where only tool calls are, which more templates take than null."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def as_template_sees_it(self) -> dict[str, Any]:
        # "developer" is OpenAI's later name of "system"; models know the earlier one.
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text()}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_sees_it() for call in self.tool_calls]
        optional = {n: getattr(self, n) for n in ("name", "tool_call_id", "reasoning_content")}
        return message | {name: value for name, value in optional.items() if value is not None}


class Function(_Model):
    model_config = ConfigDict(extra="allow")  # what else there is may mean something to the template

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the arguments fit `parameters`, or the request is refused


class Tool(_Model):
    type: Literal["function"]
    function: Function

    def as_template_sees_it(self) -> dict[str, Any]:
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True, exclude={"strict"})}


class ChosenFunction(_Model):
    name: str


class ChosenTool(_Model):
    type: Literal["function"]
    function: ChosenFunction


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")] | Annotated[ChosenTool, Tag("<tool>")],
    Discriminator(
        lambda value: "<text>" if isinstance(value, str) else "<tool>" if isinstance(value, dict) else None,
        custom_error_type="tool_choice_shape",
        custom_error_message="it should be 'none', 'auto', 'required' or an object that names a function",
    ),
]

_NOT_KWARGS = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}


class ChatRequest(_Sampling):
    """POST /v1/chat/completions.

    `tool_choice` "required" or a function makes the model go on from the beginning of a call, whose grammar is that of
    its arguments."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    include_reasoning: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None

    functions: Annotated[Any, _LEGACY] = None
    function_call: Annotated[Any, _LEGACY] = None
    audio: Annotated[Any, _refused(None)] = None
    modalities: Annotated[Any, _refused(None, ["text"])] = None
    prediction: Annotated[Any, _refused(None)] = None
    chat_template: Annotated[
        Any, _refused(None, says="a template is a program, and only the model's own is run here; leave it out")
    ] = None

    def max_output(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def num_logprobs(self) -> int | None:
        return _or(self.top_logprobs, 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "is only allowed when logprobs is true")
        if self.continue_final_message and self.add_generation_prompt:
            raise invalid("add_generation_prompt", "begins another message than continue_final_message; send one")
        for name in _NOT_KWARGS & (self.chat_template_kwargs or {}).keys():
            raise invalid(f"chat_template_kwargs.{name}", "is nothing that a request can hand to the template")
        for i, message in enumerate(self.messages):
            message.check(f"messages.{i}")
        if self.tool_choice not in (None, "none"):
            if not self.tools:
                raise invalid("tool_choice", "is only allowed when there are tools")
            if isinstance(self.tool_choice, ChosenTool) and self.tool_choice.function.name not in self.function_names:
                raise invalid(
                    "tool_choice.function.name", f"is {_shown(self.tool_choice.function.name)}, which no tool has"
                )

    @property
    def function_names(self) -> set[str]:
        return {tool.function.name for tool in self.tools or ()}

    def template_messages(self) -> list[dict[str, Any]]:
        """The messages as the template sees them; a tool's has the function's name, which Hermes' template wants."""
        calls = [call for message in self.messages for call in message.tool_calls or ()]
        names = {call.id: call.function.name for call in calls}
        messages = [message.as_template_sees_it() for message in self.messages]
        for message in messages:
            if message.get("tool_call_id") in names:
                message.setdefault("name", names[message["tool_call_id"]])
        return messages

    def offered_tools(self) -> list[Tool]:
        """The tools that the model is told of."""
        return [] if self.tool_choice == "none" else self.tools or []

    def begun_call(self) -> str | None:
        """The function of a call that the answer must begin with; "" if it may be any, None if none is asked for."""
        match self.tool_choice:
            case ChosenTool(function=function):
                return function.name
            case "required":
                names = self.function_names
                return names.pop() if len(names) == 1 else ""
        return None

    def bound_structure(
        self, answer: Structure | None, form: ToolFormat | None, marks_are_text: bool
    ) -> Structure | None:
        """What the output must be, where `answer` is what its content must be; None: nothing is enforced.

        Calls are bound from the opening on with which the prompt ends, or, where the model may choose and some function
        is strict, from any mark on that it writes; beside an answer in JSON, they are all that it may write instead.
        Arguments fit their schema; without `strict` any object will do where the schema is not supported."""
        begun, tools = self.begun_call(), self.offered_tools()
        strict = next((i for i, tool in enumerate(tools) if tool.function.strict), None)
        if not tools or (begun is None and strict is None and answer is None):
            return answer
        assert form is not None, "tools that the model has no format for are refused before"
        has_marks = marks_are_text and not form.is_bare
        if begun is not None:
            answer = None  # there is no content
        elif answer is not None and not (has_marks and answer.spec.kind == "json"):
            why = "only JSON can be" if has_marks else "this model marks no calls as text"
            raise invalid(
                answer.field, f"cannot be combined with tools that may be called ({why}); set tool_choice to none"
            )
        elif not has_marks:
            raise invalid(
                f"tools.{strict}.function.strict",
                "is supported for this model only where tool_choice is required or names a function",
            )
        functions = [tool.function for tool in tools if (begun or "") in ("", tool.function.name)]
        nothing = {"type": "object", "additionalProperties": False}
        again = ("; " if form.is_bare else "\n") + form.opening("")
        calls = Calls(
            functions={f.name: nothing if f.parameters is None else f.parameters for f in functions},
            lenient=[f.name for f in functions if not f.strict],
            named=bool(begun),
            to_arguments=f'", "{form.arguments}":',
            end="\n" + form.end_mark if form.end_mark and marks_are_text else "",
            again=again if marks_are_text and self.most_calls() is None else "",
        )
        after, free = "", False
        if answer is not None:
            calls.begin, calls.answer, after = form.opening(""), answer.spec.text, answer.spec.after
        elif begun is None:
            calls.begin, after, free = form.opening("").removeprefix(form.mark).strip(), form.mark, True
        spec = GrammarSpec("calls", msgspec.json.encode(calls).decode(), after, free)
        return Structure(spec, "tools" if answer is None else answer.field)

    def most_calls(self) -> int | None:
        """How many calls the answer may have; None: any number."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, ChosenTool) else None


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
