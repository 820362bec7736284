"""The request of POST /v1/responses, and its translation to a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import takewhile
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from runtime.output.fields import Options, invalid
from runtime.output.options import Effort
from runtime.output.response_format import JsonSchema, ResponseFormat
from serve_app.apis.chat.messages import INSTRUCTING, ChatMessage, Content, TextPart
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.responses.input_items import (
    AddedTools,
    InputItem,
    InputMessage,
    as_messages,
    check_new,
    contents,
    encoded,
    left_out,
)
from serve_app.apis.responses.tools import AnyFlatTool, FlatToolChoice, OfferedTools
from serve_app.protocol.dialects import RESPONSES, Metadata
from serve_app.protocol.other_servers import UNSUPPORTED_FIELDS, refused_fields
from serve_app.protocol.sampling import SamplingFields
from serve_app.protocol.shapes import RequestModel, TextOrList, hosted, only, or_default, text_or_list_of

LOGPROBS = "message.output_text.logprobs"

# Unsupported fields of this request, and other requests' fields.
_INSTEAD = {
    "send input": "messages",
    "send max_output_tokens": "max_tokens max_completion_tokens",
    "send include and top_logprobs": "logprobs",
    "send instructions and input": "prompt",
}


class TextFormat(Options):
    """`text.format`; a chat nests the JSON Schema under `json_schema`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None

    def as_chat(self) -> ResponseFormat:
        if self.type != "json_schema":
            return ResponseFormat(type=self.type)
        schema = {"schema": self.schema_, "strict": self.strict}
        return ResponseFormat(type=self.type, json_schema=JsonSchema.model_validate(schema))


class TextOptions(Options):
    format: TextFormat | None = None
    verbosity: str | None = None  # ignored

    def as_chat(self) -> ResponseFormat | None:
        return None if self.format is None else self.format.as_chat()


class ReasoningOptions(RequestModel):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # ignored, since answers have all reasoning


class ResponsesChat(ChatRequest):
    """The chat of a response."""

    dialect = RESPONSES


_Input = Annotated[
    TextOrList[str, Annotated[list[InputItem], Field(min_length=1, fail_fast=True)]], text_or_list_of("items")
]
_Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(SamplingFields):
    """POST /v1/responses."""

    dialect = RESPONSES
    refused = UNSUPPORTED_FIELDS | refused_fields(_INSTEAD)

    input: _Input
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=512)] | None = None
    store: bool | None = None
    background: bool | None = None
    include: Annotated[list[_Include], Field(max_length=16, fail_fast=True)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    metadata: Metadata | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[AnyFlatTool], Field(fail_fast=True)] | None = None
    tool_choice: FlatToolChoice | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    channel_grammar: bool | None = None

    # Shared fields that a response does not support.
    n: Annotated[int | None, only(None, 1, remedy="a response has one answer; send several requests")] = None
    response_format: Annotated[Any, only(None, remedy="send text.format")] = None
    prompt_logprobs: Annotated[Any, only(None, remedy="send it to /v1/completions")] = None
    return_token_ids: Annotated[Any, only(None, False, remedy="send it to /v1/chat/completions")] = None
    return_prompt_token_ids: Annotated[Any, only(None, False, remedy="send it to /v1/chat/completions")] = None
    detokenize: Annotated[Any, only(None, True, remedy="send it to /v1/chat/completions")] = True
    routed_experts: Annotated[Any, only(None, False, remedy="send it to /v1/chat/completions")] = False

    def max_output(self) -> int | None:
        return self.max_output_tokens

    def num_logprobs(self) -> int | None:
        return or_default(self.top_logprobs, 0) if LOGPROBS in (self.include or ()) else None

    def ignored_fields(self) -> list[str]:
        ignored = super().ignored_fields() + [f"include.{name}" for name in self.include or () if name != LOGPROBS]
        if self.reasoning is not None and self.reasoning.summary is not None:
            ignored.append("reasoning.summary")
        if self.text is not None and self.text.verbosity is not None:
            ignored.append("text.verbosity")
        return ignored + hosted(self.offered.flat) + left_out(self.items())

    def check(self) -> None:
        super().check()
        if self.top_logprobs and self.num_logprobs() is None:
            raise invalid("top_logprobs", f"is only allowed when include has {LOGPROBS}")
        if self.background and self.store is False:
            raise invalid("background", "is only allowed when the response is stored; leave out store")
        with RESPONSES.names.in_errors():
            self.chat([]).check()  # checks the chat without items
        check_new(self.items())

    @cached_property
    def offered(self) -> OfferedTools:
        """The request's tools, and its items' tools."""
        later = (tool for item in self.items() if isinstance(item, AddedTools) for tool in item.tools)
        return OfferedTools([*(self.tools or ()), *later])

    def contents(self) -> Iterable[Any]:
        return contents(self.items())

    def items(self) -> list[InputItem]:
        """The input as items."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @cached_property
    def encoded_items(self) -> list[bytes]:
        """The input as items, each as JSON."""
        return encoded(self.items())

    def after(self, items: Sequence[InputItem]) -> Self:
        """Return the request with a conversation before its input."""
        longer = self.model_copy(update={"input": [*items, *self.items()]})
        longer.__dict__.pop("offered", None)  # cached values are copied, too
        return longer

    def messages(self) -> list[ChatMessage]:
        """Return the conversation of a chat.

        Instructions form one message with the input's leading instructions, since many templates accept only one."""
        messages = as_messages(self.items())
        if self.instructions is None:
            return messages
        leading = [*takewhile(lambda message: message.role in INSTRUCTING, messages)]
        content: Content = "\n\n".join((self.instructions, *(message.text() for message in leading)))
        if any(message.images() for message in leading):
            content = [TextPart(type="text", text=self.instructions)]
            for message in leading:
                content += [TextPart(type="text", text="\n\n"), *message.parts()]
        return [ChatMessage(role="system", content=content), *messages[len(leading) :]]

    def chat(self, messages: list[ChatMessage]) -> ChatRequest:
        """Return the equivalent request of a chat with these messages."""
        shared = {name: getattr(self, name) for name in _SHARED & self.model_fields_set}
        tools, choice = self.offered.chosen(self.tool_choice)
        own = {
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "response_format": None if self.text is None else self.text.as_chat(),
            "tools": tools,
            "tool_choice": choice,
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
            "chat_template_kwargs": self.chat_template_kwargs,
        }
        return _BLANK_CHAT.model_copy(update=shared | own)


# A copy takes a tenth of the time of `model_construct`, which evaluates each field's default.
_BLANK_CHAT = ResponsesChat.model_construct()

# Fields with the same name and meaning in a chat.
_OTHERS = """
    stream stream_options n response_format prompt_logprobs return_token_ids return_prompt_token_ids detokenize
    routed_experts"""
_SHARED = {"parallel_tool_calls", "include_reasoning", "channel_grammar"} | (
    SamplingFields.model_fields.keys() - set(_OTHERS.split())
)
