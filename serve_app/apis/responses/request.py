"""The request of POST /v1/responses, and its translation to a chat."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Discriminator, Field, Tag, field_serializer, model_validator
from pydantic_core import PydanticCustomError

from runtime.output.fields import Options, invalid
from runtime.output.options import Effort
from runtime.output.response_format import JsonSchema, ResponseFormat
from runtime.output.tools import (
    KIND_OR_HOSTED,
    AnyTool,
    ChosenCustomTool,
    ChosenFunction,
    ChosenTool,
    Custom,
    CustomTool,
    Function,
    HostedTool,
    InputFormat,
    InputGrammar,
    Name,
    Tool,
)
from serve_app.apis.chat.messages import ChatMessage
from serve_app.apis.chat.request import ChatRequest
from serve_app.apis.responses.input_items import InputItem, InputMessage, as_messages, encoded
from serve_app.protocol.dialects import RESPONSES, Metadata
from serve_app.protocol.other_servers import UNSUPPORTED_FIELDS, refused_fields
from serve_app.protocol.sampling import SamplingFields
from serve_app.protocol.shapes import RequestModel, hosted, only, or_default, text_or_list_of, type_of

LOGPROBS = "message.output_text.logprobs"
INSTRUCTING = ("system", "developer")  # roles of messages that instruct the model

# Unsupported fields of this request, and fields of other requests.
_INSTEAD = {
    "send input": "messages",
    "send max_output_tokens": "max_tokens max_completion_tokens",
    "send include and top_logprobs": "logprobs",
    "send instructions and input": "prompt",
}


class FunctionTool(Options):
    """A function; a chat nests these fields under `function`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def as_chat(self) -> Tool:
        given = self.model_dump(exclude_none=True, exclude={"type"})
        return Tool(type="function", function=Function(**given))


class CustomFormat(Options):
    """The format of a custom tool's input; a chat nests a grammar's fields."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Self:
        given = {self.syntax is not None, self.definition is not None}
        if given != {self.type == "grammar"}:
            raise PydanticCustomError(
                "format_shape", "it should have syntax and definition where its type is 'grammar', and only there"
            )
        return self

    def as_chat(self) -> InputFormat:
        if self.syntax is None or self.definition is None:
            return InputFormat(type=self.type)
        return InputFormat(type=self.type, grammar=InputGrammar(syntax=self.syntax, definition=self.definition))


class FlatCustomTool(Options):
    """A custom tool; a chat nests these fields under `custom`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: CustomFormat | None = None

    @field_serializer("format")
    def _shown(self, form: CustomFormat | None) -> dict[str, Any]:
        return {"type": "text"} if form is None else form.model_dump(exclude_none=True)

    def as_chat(self) -> CustomTool:
        form = None if self.format is None else self.format.as_chat()
        return CustomTool(type="custom", custom=Custom(name=self.name, description=self.description, format=form))


_AnyTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[FlatCustomTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    KIND_OR_HOSTED,
]


class NamedTool(RequestModel):
    type: Literal["function", "custom"]
    name: str


_NamedOrHosted = Annotated[
    Annotated[NamedTool, Tag("<function>")]
    | Annotated[NamedTool, Tag("<custom>")]
    | Annotated[HostedTool, Tag("<hosted>")],
    KIND_OR_HOSTED,
]


class FlatAllowedTools(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedOrHosted], Field(min_length=1, fail_fast=True)]


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    kind = type_of(value)
    if kind in ("function", "custom"):
        return "<tool>"
    return "<allowed_tools>" if kind == "allowed_tools" else None


_ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[NamedTool, Tag("<tool>")]
    | Annotated[FlatAllowedTools, Tag("<allowed_tools>")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="tool_choice_shape",
        custom_error_message="it should be 'none', 'auto', 'required', or an object of the type function, custom "
        "or allowed_tools, since this server runs no tools itself",
    ),
]


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
    Annotated[str, Tag("<text>")] | Annotated[list[InputItem], Field(min_length=1, fail_fast=True), Tag("<list>")],
    text_or_list_of("items"),
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
    tools: Annotated[list[_AnyTool], Field(fail_fast=True)] | None = None
    tool_choice: _ToolChoice | None = None
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
        return ignored + hosted(self.tools)

    def check(self) -> None:
        super().check()
        if self.top_logprobs and self.num_logprobs() is None:
            raise invalid("top_logprobs", f"is only allowed when include has {LOGPROBS}")
        if self.background and self.store is False:
            raise invalid("background", "is only allowed when the response is stored; leave out store")
        with RESPONSES.names.in_errors():
            self.chat([]).check()  # without items, which do not need checks

    def items(self) -> list[InputItem]:
        """The input as items."""
        return [InputMessage(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    @cached_property
    def encoded_items(self) -> list[bytes]:
        """The input as items, each as JSON."""
        return encoded(self.items())

    def after(self, items: Sequence[InputItem]) -> Self:
        """Return the request with a conversation before its input."""
        return self.model_copy(update={"input": [*items, *self.items()]})

    def messages(self) -> list[ChatMessage]:
        """Return the conversation of a chat.

        Instructions form one message with the input's leading instructions, since many templates accept only one."""
        messages = as_messages(self.items())
        if self.instructions is None:
            return messages
        texts = [self.instructions]
        while messages and messages[0].role in INSTRUCTING:
            texts.append(messages.pop(0).text())
        return [ChatMessage(role="system", content="\n\n".join(texts)), *messages]

    def chat(self, messages: list[ChatMessage]) -> ChatRequest:
        """Return the equivalent request of a chat with these messages."""
        shared = {name: getattr(self, name) for name in _SHARED & self.model_fields_set}
        tools, choice = self._offered_tools()
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

    def _offered_tools(self) -> tuple[list[AnyTool | HostedTool], Any]:
        """Return the allowed tools and a chat's `tool_choice`."""
        tools = [tool if isinstance(tool, HostedTool) else tool.as_chat() for tool in self.tools or ()]
        choice = self.tool_choice
        match choice:
            case NamedTool(type="function"):
                return tools, ChosenTool(type="function", function=ChosenFunction(name=choice.name))
            case NamedTool():
                return tools, ChosenCustomTool(type="custom", custom=ChosenFunction(name=choice.name))
            case FlatAllowedTools():
                allowed = {(tool.type, tool.name) for tool in choice.tools if isinstance(tool, NamedTool)}
                own = {(t.type, t.function.name): t for t in tools if not isinstance(t, HostedTool)}
                if unknown := allowed - own.keys():
                    raise invalid("tool_choice.tools", f"has {min(unknown)[1]!r}, which no tool has")
                return [tool for key, tool in own.items() if key in allowed], choice.mode
        return tools, choice if tools or choice == "required" else None


# A copy takes a tenth of the time of `model_construct`, which evaluates the default of each field.
_BLANK_CHAT = ResponsesChat.model_construct()

# Fields with the same name and meaning in a chat.
_SHARED = {"parallel_tool_calls", "include_reasoning", "channel_grammar"} | (
    SamplingFields.model_fields.keys()
    - {
        "stream",
        "stream_options",
        "n",
        "response_format",
        "prompt_logprobs",
        "return_token_ids",
        "return_prompt_token_ids",
        "detokenize",
        "routed_experts",
    }
)
