"""The requests of POST /api/chat and /api/generate, and their translation to chats and completions.

The chat's model checks the values."""

from __future__ import annotations

import json
import math
from collections import defaultdict, deque
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from runtime.media.source import NO_VIDEOS
from runtime.output.fields import invalid, read_options
from serve_app.apis.anthropic.request import FIELDS_OF_CHATS
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.completions.request import CompletionRequest
from serve_app.durations import Duration
from serve_app.protocol.dialects import OLLAMA_CHAT, OLLAMA_GENERATE
from serve_app.protocol.other_servers import UNSUPPORTED_FIELDS
from serve_app.protocol.sampling import DrawFields, SamplingFields, check_last_n
from serve_app.protocol.shapes import OpenRequestModel, RequestModel, check_absent, only

# ---- parts -----------------------------------------------------------------------------------------------------------

KEEP_ALIVE = "keep_alive"
_Images = Annotated[list[str], Field(fail_fast=True)] | None  # files in base64, which come before the text
_NoVideos = Annotated[Any, only(None, [], remedy=NO_VIDEOS)]


class OllamaOptions(DrawFields, OpenRequestModel):
    """Sampling options. Other options are refused, or reported in a header, like fields of requests."""

    refused = UNSUPPORTED_FIELDS
    within = "options."

    top_k: int | None = None
    seed: int | None = None
    stop: Any = None  # a text or several texts
    num_predict: int | None = None  # 0 and below mean the rest of the context
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None

    def check(self) -> None:
        super().check()
        penalties = (self.repeat_penalty or 1) != 1 or self.presence_penalty or self.frequency_penalty
        check_last_n("options.repeat_last_n", self.repeat_last_n if penalties else None)

    def fields(self) -> dict[str, Any]:
        """Return the equivalent fields of a chat or completion; unknown options keep their names."""
        values = {name: getattr(self, name) for name in (*DrawFields.model_fields, "stop")}
        values["top_k"] = None if self.top_k is None else max(self.top_k, 0)
        values["seed"] = None if self.seed == -1 else self.seed  # -1 is a random one
        values["repetition_penalty"] = self.repeat_penalty
        values["max_tokens"] = None if (self.num_predict or 0) <= 0 else self.num_predict
        asked = {name: value for name, value in values.items() if value is not None}
        return asked | {f"options.{name}": value for name, value in (self.model_extra or {}).items()}


class OllamaFunction(RequestModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(RequestModel):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None  # an assistant's calls
    tool_name: str | None = None  # the function that a tool's result comes from
    tool_call_id: str | None = None  # the id of a tool's call, if it has one
    images: _Images = None
    videos: _NoVideos = None


_Format = Annotated[
    Annotated[Literal["", "json"], Tag("<text>")] | Annotated[dict[str, Any], Tag("<schema>")],
    Discriminator(
        lambda value: "<text>" if value in ("", "json") else "<schema>" if isinstance(value, dict) else None,
        custom_error_type="format_shape",
        custom_error_message="it should be 'json' or a JSON Schema",
    ),
]
_Think = Annotated[
    Annotated[bool, Tag("<switch>")] | Annotated[Literal["low", "medium", "high"], Tag("<effort>")],
    Discriminator(lambda value: "<switch>" if isinstance(value, bool) else "<effort>"),
]


# ---- requests --------------------------------------------------------------------------------------------------------


class _Kept(SamplingFields):
    """A request with the time for which its model stays loaded; -1 for ever."""

    def keep_s(self) -> float | None:
        value = (self.model_extra or {}).get(KEEP_ALIVE)
        return None if value is None else math.inf if value < 0 else float(value)


class LoadRequest(_Kept):
    """A request without a prompt, which loads the model, or with keep_alive 0 unloads it."""

    computes = False

    def max_output(self) -> int | None:
        return None

    def num_logprobs(self) -> int | None:
        return None


class OllamaChat(_Kept, ChatRequest):
    """The chat of either route."""

    dialect = OLLAMA_CHAT


class OllamaCompletion(_Kept, CompletionRequest):
    """The completion of POST /api/generate."""

    dialect = OLLAMA_GENERATE


class OllamaRequest(RequestModel):
    """The fields that both routes share. Most fields of chats are allowed too."""

    model_config = ConfigDict(extra="allow")  # the chat reads, refuses or reports the other fields
    unknown_fields: ClassVar[frozenset[str]] = FIELDS_OF_CHATS - {"logprobs", "top_logprobs", "parallel_tool_calls"}

    model: str
    stream: bool | None = None
    format: _Format | None = None
    options: OllamaOptions | None = None
    think: _Think | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_output_tokens: int | None = None  # another name for options.num_predict
    keep_alive: Duration | None = None  # idle time until the model sleeps; -1 for ever

    def check(self) -> None:
        if self.options is not None:
            self.options.check()

    def as_request(self) -> SamplingFields:
        """Return the equivalent chat or completion; raises FieldError."""
        raise NotImplementedError

    def _shared(self) -> dict[str, Any]:
        fields = self._kept() | (self.model_extra or {})
        check_absent(self.unknown_fields, fields, "Ollama")
        if self.options is not None:
            fields |= self.options.fields()
        if isinstance(tools := fields.get("tools"), list):  # a type is optional here
            fields["tools"] = [{**t, "type": t.get("type") or "function"} if isinstance(t, dict) else t for t in tools]
        if self.max_output_tokens is not None:
            fields.setdefault("max_tokens", self.max_output_tokens)
        fields |= {"model": self.model, "stream": self.stream is not False}
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "it", "schema": self.format}}
        return fields

    def _kept(self) -> dict[str, Any]:
        return {} if self.keep_alive is None else {KEEP_ALIVE: self.keep_alive}

    def _chat(self, messages: list[dict[str, Any]], is_continued: bool = False) -> ChatRequest:
        fields = self._shared() | {"messages": messages, "continue_final_message": is_continued}
        fields["include_reasoning"] = self.think is not False
        if isinstance(self.think, bool):  # model families have two names for the switch
            given = fields.get("chat_template_kwargs")
            own = {"enable_thinking": self.think, "thinking": self.think}
            fields["chat_template_kwargs"] = own | given if isinstance(given, dict) else own
        elif self.think is not None:
            fields["reasoning_effort"] = self.think
        fields |= {"logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        chat = read_options(OllamaChat, fields)
        chat.check()
        return chat


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] | None = None

    def as_request(self) -> SamplingFields:
        if not self.messages:
            return LoadRequest(model=self.model, **self._kept())
        last = self.messages[-1]
        return self._chat(_chat_messages(self.messages), last.role == "assistant" and not last.tool_calls)


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate."""

    unknown_fields: ClassVar[frozenset[str]] = OllamaRequest.unknown_fields | {"tools", "tool_choice"}

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: _Images = None
    videos: _NoVideos = None
    template: Annotated[Any, only(None, "", remedy="a template is a program; the operator sets --chat-template")] = None
    context: Annotated[Any, only(None, [], remedy="it is not supported; send the conversation to /api/chat")] = None

    def check(self) -> None:
        super().check()
        if (self.raw or self.suffix) and self.system:
            raise invalid("system", f"cannot be combined with {'raw' if self.raw else 'suffix'}, which has no template")
        if (self.raw or self.suffix) and self.think:
            raise invalid("think", f"cannot be combined with {'raw' if self.raw else 'suffix'}, which has no template")
        if (self.raw or self.suffix) and self.images:
            raise invalid("images", f"cannot be combined with {'raw' if self.raw else 'suffix'}, which has no template")

    def as_request(self) -> SamplingFields:
        if not (self.prompt or self.suffix or self.images):
            return LoadRequest(model=self.model, **self._kept())
        if not self.raw and not self.suffix:
            system = [{"role": "system", "content": self.system}] if self.system else []
            return self._chat([*system, {"role": "user", "content": _content(self.prompt or "", self.images)}])
        scores = (self.top_logprobs or 0) if self.logprobs else None
        fields = self._shared() | {"prompt": self.prompt or "", "suffix": self.suffix, "logprobs": scores}
        completion = read_options(OllamaCompletion, fields)
        completion.check()
        return completion


def _content(text: str, images: list[str] | None) -> str | list[dict[str, Any]]:
    """Return a chat's content: a text, or pictures and a text."""
    if not images:
        return text
    return [*({"type": "image", "data": data} for data in images), *([{"type": "text", "text": text}] if text else ())]


def _chat_messages(messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Return the messages of a chat, in which results name calls by ids. Ollama's results follow calls in order, or
    name functions."""
    chat: list[dict[str, Any]] = []
    pending = _PendingCalls([])
    for at, message in enumerate(messages):
        fields: dict[str, Any] = {"role": message.role, "content": _content(message.content, message.images)}
        if message.thinking is not None:
            fields["reasoning_content"] = message.thinking
        if message.tool_calls:
            named = [(call.id or f"call_{at}_{i}", call.function) for i, call in enumerate(message.tool_calls)]
            pending = _PendingCalls([(call_id, function.name) for call_id, function in named])
            fields["tool_calls"] = [
                {"id": i, "function": {"name": f.name, "arguments": json.dumps(f.arguments, ensure_ascii=False)}}
                for i, f in named
            ]
        if message.role == "tool":
            call_id = message.tool_call_id or pending.next(message.tool_name) or f"call_{at}"
            fields |= {"tool_call_id": call_id, "name": message.tool_name}
        chat.append(fields)
    return chat


class _PendingCalls:
    """The calls of one message without a result."""

    def __init__(self, calls: list[tuple[str, str]]) -> None:
        """`calls` are pairs of an id and a function's name."""
        self._done: set[str] = set()
        self._of: dict[str | None, deque[str]] = defaultdict(deque)  # ids by function; all ids under None
        for call_id, name in calls:
            self._of[None].append(call_id)
            self._of[name].append(call_id)

    def next(self, name: str | None) -> str | None:
        """Return a function's first pending call, or any function's if `name` is None."""
        ids = self._of[name]
        while ids and ids[0] in self._done:
            ids.popleft()
        if not ids:
            return None
        self._done.add(ids[0])
        return ids.popleft()
