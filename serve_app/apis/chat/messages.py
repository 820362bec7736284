"""The messages of a chat."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, field_serializer, model_serializer
from pydantic_core import PydanticCustomError, from_json

from runtime.output.fields import invalid
from runtime.output.tools import KIND
from serve_app.protocol.shapes import (
    LEGACY,
    MAX_VALUES,
    RequestModel,
    has_too_many_values,
    only,
    text_or_list_of,
    type_of,
)


class TextPart(RequestModel):
    """A part of chats, or of the items of responses."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


ROLES = ("system", "developer", "user", "assistant", "tool")  # of OpenAI's chats, for all templates


def _kind_of_part(value: Any) -> str:
    return "<refusal>" if type_of(value) == "refusal" else "<text>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")], Discriminator(_kind_of_part)
]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    text_or_list_of("text parts"),
]


def _parsed_at_once(text: str) -> str:
    if has_too_many_values(text.encode()):
        raise PydanticCustomError("too_long", f"it should be a JSON of at most {MAX_VALUES} values")
    return text


class CalledFunction(RequestModel):
    name: str
    arguments: Annotated[str, AfterValidator(_parsed_at_once)]

    @field_serializer("arguments")
    def _as_template_sees_them(self, text: str) -> str | dict[str, Any]:
        # Templates write the arguments as JSON themselves. Model output that is not JSON stays a text.
        try:
            arguments = from_json(text)
        except ValueError:
            return text
        return arguments if isinstance(arguments, dict) else text


class ToolCall(RequestModel):
    """A call of the model, which a client sends back."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledCustomTool(RequestModel):
    name: str
    input: str


class CustomToolCall(RequestModel):
    """A call of a custom tool, which templates receive as a function with one string."""

    id: str
    type: Literal["custom"]
    custom: CalledCustomTool

    @property
    def function(self) -> CalledCustomTool:
        return self.custom

    @model_serializer
    def _as_template_sees_it(self) -> dict[str, Any]:
        function = {"name": self.custom.name, "arguments": {"input": self.custom.input}}
        return {"id": self.id, "type": "function", "function": function}


AnyToolCall = Annotated[Annotated[ToolCall, Tag("<function>")] | Annotated[CustomToolCall, Tag("<custom>")], KIND]


class ChatMessage(RequestModel):
    role: Annotated[str, Field(pattern="^[a-z][a-z0-9_.-]{0,63}$")]  # one of ROLES, or one that the template names
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[AnyToolCall], Field(fail_fast=True)] | None = None  # of an assistant
    tool_call_id: str | None = None  # of a tool: the call that it answers
    reasoning_content: str | None = None  # of an assistant; the template decides whether the model sees it
    reasoning: str | None = None  # another name of it
    audio: Annotated[Any, only(None)] = None
    refusal: Annotated[Any, only(None)] = None
    function_call: Annotated[Any, LEGACY] = None

    def check_at(self, where: str) -> None:
        """Rules between fields; raises ApiError."""
        if self.role == "assistant":
            if self.content is None and not self.tool_calls and self.thoughts() is None:
                raise invalid(f"{where}.content", "is missing; a text is needed where there are no tool_calls")
            return
        if self.content is None:
            raise invalid(f"{where}.content", "is missing; it should be a text or a list of text parts")
        if self.tool_calls:
            raise invalid(f"{where}.tool_calls", f"is not allowed in a message of the role {self.role!r}")
        if self.role == "tool" and self.tool_call_id is None:
            raise invalid(f"{where}.tool_call_id", "is missing; it is the id of the call that the message answers")

    def text(self) -> str:
        """Return the content; empty beside tool calls, since more templates accept that than null."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def as_template_sees_it(self) -> dict[str, Any]:
        # "developer" is OpenAI's later name of "system"; templates use the earlier one.
        content: Any = self.text()
        if isinstance(self.content, list):
            content = [{"type": "text", "text": part.text} for part in self.content] or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        shown = {"name", "tool_call_id"} | ({"tool_calls"} if self.tool_calls else set())
        if (thoughts := self.thoughts()) is not None:
            message["reasoning_content"] = thoughts
        return message | self.model_dump(include=shown, exclude_none=True)
