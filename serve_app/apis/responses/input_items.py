"""The items of a response's conversation: messages, calls with their outputs, and reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter

from serve_app.apis.chat.messages import (
    CalledCustomTool,
    CalledFunction,
    ChatMessage,
    Content,
    CustomToolCall,
    RefusalPart,
    TextPart,
    ToolCall,
)
from serve_app.protocol.shapes import RequestModel, type_of

_KINDS = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "reasoning",
)


def _text(content: str | list[TextPart | RefusalPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class _Item(RequestModel):
    id: str | None = None  # of an item from a response


class InputMessage(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCall(_Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CustomCall(_Item):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
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


def _kind_of_item(value: Any) -> str | None:
    kind = type_of(value, "message")
    return f"<{kind}>" if kind in _KINDS else None


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[CustomCall, Tag("<custom_tool_call>")]
    | Annotated[CustomCallOutput, Tag("<custom_tool_call_output>")]
    | Annotated[Reasoning, Tag("<reasoning>")],
    Discriminator(
        _kind_of_item,
        custom_error_type="item_kind",
        custom_error_message="it should be an item of the type message, function_call, function_call_output, "
        "custom_tool_call, custom_tool_call_output or reasoning; others are not supported",
    ),
]

ITEMS: TypeAdapter[list[InputItem]] = TypeAdapter(list[InputItem])


def encoded(items: Sequence[InputItem]) -> list[bytes]:
    """Return each item as JSON; equal items give equal bytes."""
    return [item.model_dump_json(exclude_none=True).encode() for item in items]


def as_list(items: Sequence[bytes]) -> bytes:
    """Return the JSON list of encoded items."""
    return b"[" + b",".join(items) + b"]"


_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
}


def listed(item: InputItem, name: str) -> dict[str, Any]:
    """Return an item of a stored input for clients. An item without an id gets one from `name`."""
    fields = {"id": f"{_ID_PREFIXES[item.type]}_{name}", "status": "completed"} | item.model_dump(exclude_none=True)
    match item:
        case InputMessage(role="assistant"):
            text = {"type": "output_text", "text": _text(item.content), "annotations": []}
            fields["content"] = [text]
        case InputMessage():
            fields["content"] = [{"type": "input_text", "text": _text(item.content)}]
        case CallOutput():
            fields["output"] = _text(item.output)
        case Reasoning():
            fields["summary"] = []
    return fields


def as_messages(items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the messages of a conversation. The items of one turn of the model form one message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's open turn
    for item in items:
        match item:
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
                function = CalledFunction(name=item.name, arguments=item.arguments)
                turn.setdefault("tool_calls", []).append(ToolCall(id=item.call_id, function=function))
            case CustomCall():
                custom = CalledCustomTool(name=item.name, input=item.input)
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
