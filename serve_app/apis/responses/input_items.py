"""The items of a response's conversation: messages, calls with their outputs, and reasoning."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, TypeAdapter, ValidationError
from pydantic_core import to_json

from runtime.output.fields import invalid
from serve_app.apis.chat.messages import (
    CalledCustomTool,
    CalledFunction,
    ChatMessage,
    Content,
    CustomToolCall,
    ImagePart,
    OtherPart,
    Part,
    RefusalPart,
    TextPart,
    ToolCall,
    check_new_parts,
    unread,
)
from serve_app.apis.responses.tools import AnyFlatTool, flat_name
from serve_app.protocol.shapes import RequestModel, kinds_in, type_of

_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}
_ADDING = "additional_tools", "tool_search_output"
# Items of tools that other servers run, and items that shorten a conversation there.
_HOSTED = re.compile(
    r"\w+_(call|call_output|output|list_tools|approval_request|approval_response)|(context_)?compaction(_\w+)?"
    r"|item_reference|ghost_snapshot"
)


_PARTS: TypeAdapter[list[Part]] = TypeAdapter(list[Part])


def _text(content: str | Sequence[TextPart | RefusalPart | OtherPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class _Item(RequestModel):
    id: str | None = None  # set for an item from a response


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCall(_Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class CallOutput(_Item):
    call_id: str
    output: Content


class FunctionCallOutput(CallOutput):
    type: Literal["function_call_output"]


class CustomCallOutput(CallOutput):
    type: Literal["custom_tool_call_output"]


class ReasoningText(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class Reasoning(_Item):
    """Reasoning before an answer. A template cannot use a summary or encrypted reasoning."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None


class AddedTools(_Item):
    """Tools that a client adds within the conversation, by itself or as the result of a search."""

    type: Literal["additional_tools", "tool_search_output"]
    call_id: str | None = None
    tools: Annotated[list[AnyFlatTool], Field(fail_fast=True)]


class HostedItem(_Item):
    """An item of another server's tool, or one that only another server can read."""

    model_config = ConfigDict(extra="allow")

    type: str

    def as_known(self) -> FunctionCall | FunctionCallOutput | None:
        """Return the item as a function's call or output, which it is if the client ran the tool; else None."""
        fields = dict(self.model_extra or {})
        call_id = fields.pop("call_id", None) or (self.id if self.type.endswith("call_output") else None)
        name, fields_of_call = self.type.removesuffix("_call"), fields.keys() - {"status", "output"}
        if not isinstance(call_id, str):
            return None
        if self.type.endswith("_output"):
            return FunctionCallOutput(
                type="function_call_output", call_id=call_id, output=_output(fields.get("output"))
            )
        arguments = (
            fields["arguments"] if "arguments" in fields else {key: fields[key] for key in sorted(fields_of_call)}
        )
        text = arguments if isinstance(arguments, str) else to_json(arguments).decode()
        return FunctionCall(type="function_call", call_id=call_id, name=name, arguments=text)


def _output(output: Any) -> str | list[Any]:
    """Return the output of another server's tool as a text, or as its parts."""
    parts = output if isinstance(output, list) else [output]
    try:
        return output if isinstance(output, str) else _PARTS.validate_python(parts)
    except ValidationError:
        return to_json(output).decode()


def _kind_of_item(value: Any) -> str | None:
    kind = type_of(value, "message")
    if not isinstance(kind, str):
        return None
    if kind in _ADDING:
        return "<added>"
    return f"<{kind}>" if kind in _ID_PREFIXES else "<hosted>" if _HOSTED.fullmatch(kind) else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[CustomCall, Tag("<custom_tool_call>")]
    | Annotated[CustomCallOutput, Tag("<custom_tool_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")]
    | Annotated[AddedTools, Tag("<added>")]
    | Annotated[HostedItem, Tag("<hosted>")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item_kind",
        custom_error_message="it should be an item of the type message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output or reasoning, or one of another server's tools",
    ),
]

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def encoded(items: Sequence[InputItem]) -> list[bytes]:
    """Return each item as JSON; equal items give equal bytes."""
    return [item.model_dump_json(exclude_none=True).encode() for item in items]


def as_list(items: Sequence[bytes]) -> bytes:
    """Return the JSON list of encoded items."""
    return b"[" + b",".join(items) + b"]"


def listed(item: InputItem, name: str) -> dict[str, Any]:
    """Return an item of a stored input for clients. An item without an id gets one from `name`."""
    fields = {"id": f"{_ID_PREFIXES.get(item.type, 'item')}_{name}", "status": "completed"} | item.model_dump(
        exclude_none=True
    )
    match item:
        case InputMessage(role="assistant"):
            text = {"type": "output_text", "text": _text(item.content), "annotations": []}
            fields["content"] = [text]
        case InputMessage():
            fields["content"] = _listed_parts(item.content)
        case CallOutput():
            fields["output"] = _listed_parts(item.output) if _has_images(item.output) else _text(item.output)
        case Reasoning():
            fields["summary"] = []
    return fields


def _listed_parts(content: str | Sequence[Any]) -> list[dict[str, Any]]:
    """Return a content's parts: the texts between pictures as one, and the pictures as they were sent."""
    if not _has_images(content):
        return [{"type": "input_text", "text": _text(content)}]
    parts: list[dict[str, Any]] = []
    for is_image, group in groupby(content, lambda part: isinstance(part, ImagePart)):
        if is_image:
            parts += ({"detail": "auto"} | part.model_dump(exclude_none=True) for part in group)
        else:
            parts.append({"type": "input_text", "text": _text([*group])})
    return parts


def _has_images(content: str | Sequence[Any]) -> bool:
    return not isinstance(content, str) and any(isinstance(part, ImagePart) for part in content)


def check_new(items: Sequence[InputItem]) -> None:
    """Raise FieldError for a part of a new message that the model cannot read, or if it can read no item."""
    if not any(_seen(item) for item in items):
        raise invalid("input", "has no item that this server can read; send the messages of the conversation")
    check_new_parts("input", [_turn(item) for item in items])


def _seen(item: InputItem) -> InputItem | None:
    return item.as_known() if isinstance(item, HostedItem) else item


def _turn(item: InputItem) -> tuple[str, Any]:
    match item:
        case InputMessage():
            return item.role, item.content
        case CallOutput() | AddedTools(call_id=str()) | HostedItem() if "output" in item.type:
            return "tool", getattr(item, "output", None)
    return "assistant", None


def contents(items: Sequence[InputItem]) -> Iterator[Any]:
    """Return each item's content: a text, or a list of parts."""
    return (_turn(item)[1] for item in items)


def left_out(items: Sequence[InputItem]) -> list[str]:
    """Return the kinds of items and parts that the model does not see, safe for a header."""
    seen = [(item.type, _seen(item)) for item in items]
    contents = (_turn(item)[1] for _, item in seen if item is not None)
    return kinds_in("input", (kind for kind, item in seen if item is None)) + unread("input", contents)


def as_messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return a conversation's messages. The items in one turn of the model form one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's open turn
    for each in items:
        match item := _seen(each):
            case None:
                continue
            case AddedTools():
                if item.call_id is not None:
                    names = ", ".join(getattr(tool, "name", tool.type) for tool in item.tools)
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": f"Tools: {names}"})
                    turn = None
                continue
            case CallOutput():
                turn = None
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})
                continue
            case InputMessage() if item.role != "assistant":
                turn = None
                messages.append({"role": item.role, "content": item.content})
                continue
        if turn is None or not _continues(turn, item):
            messages.append(turn := {"role": "assistant", "content": ""})
        match item:
            case Reasoning():
                turn["reasoning_content"] = "".join(part.text for part in item.content or ())
            case InputMessage():
                turn["content"] = item.content
            case FunctionCall():
                function = CalledFunction(name=flat_name(item.namespace, item.name), arguments=item.arguments)
                turn.setdefault("tool_calls", []).append(ToolCall(id=item.call_id, function=function))
            case CustomCall():
                custom = CalledCustomTool(name=flat_name(item.namespace, item.name), input=item.input)
                call = CustomToolCall(id=item.call_id, type="custom", custom=custom)
                turn.setdefault("tool_calls", []).append(call)
    return [ChatMessage(**message) for message in messages]


def _continues(turn: dict[str, Any], item: InputItem) -> bool:
    """Return whether an item continues the model's turn: reasoning, then text, then calls."""
    match item:
        case Reasoning():
            return False
        case InputMessage():
            return not (turn["content"] or "tool_calls" in turn)
    return True
