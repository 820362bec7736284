"""The messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    field_serializer,
    model_serializer,
)
from pydantic_core import PydanticCustomError, from_json

from runtime.media.source import NO_VIDEOS, ImageSource
from runtime.output.fields import invalid, shown
from runtime.output.image_forms import IMAGE_KINDS, source_of
from runtime.output.tools import KIND
from serve_app.protocol.shapes import (
    LEGACY,
    MAX_VALUES,
    MarkedModel,
    RequestModel,
    TextOrList,
    has_too_many_values,
    kinds_in,
    only,
    text_or_list_of,
    type_of,
)

T = TypeVar("T")


class TextPart(MarkedModel):
    """A part in a chat, or in a response's items."""

    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(RequestModel):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


_TEXT_KINDS = "text", "input_text", "output_text"
ROLES = ("system", "developer", "user", "assistant", "tool")  # roles in OpenAI's chats, for all templates
INSTRUCTING = ("system", "developer")  # roles that instruct the model


class OtherPart(MarkedModel):
    """A part that is not a text, such as a document. The model sees its text, or a note that it is missing."""

    model_config = ConfigDict(extra="allow")
    type: str

    @property
    def readable(self) -> str | None:
        """The text within the part; None if it has none."""
        fields = self.model_extra or {}
        match self.type, fields:
            case "tool_reference", {"tool_name": str(name)}:
                return f"The tool {name} is available."
            case "document", {"source": {"type": "text", "data": str(text)}}:
                pass
            case ("document", {"source": {"content": content}}) | (
                "search_result" | "compaction",
                {"content": content},
            ):
                text = _texts(content)
            case _:
                return None
        title = fields.get("title")
        return f"{title}\n{text}" if text and isinstance(title, str) else text or None

    @property
    def text(self) -> str:
        verb = next((verb for kind, verb in _SENSES.items() if kind in self.type), None)
        return self.readable or f"[{verb or self.type}]"


class ImagePart(OtherPart):
    """A picture, in the form of any API. A model that takes no images sees a note in its place."""

    _path: str = PrivateAttr("")  # the client's field with the part; empty in a stored conversation
    _is_new: bool = PrivateAttr(False)  # true in a new message, false in the history and in a tool's result
    _image: Any = PrivateAttr(None)

    @property
    def path(self) -> str:
        return self._path or "messages"

    @property
    def is_new(self) -> bool:
        return self._is_new

    def place(self, path: str, is_new: bool) -> None:
        """Note where the client sent the part. A translated request is checked again, by a chat's paths."""
        if not self._path:
            self._path, self._is_new = path, is_new

    def image(self, make: Callable[[ImageSource], T]) -> T:
        """Return the result of `make`, which is called once, with the picture. Raises FieldError for a form that no
        API has."""
        if self._image is None:
            self._image = make(source_of(self.path, {"type": self.type, **(self.model_extra or {})}))
        return self._image  # type: ignore[no-any-return]


_SENSES = {
    "image": "image: this model cannot see it",
    "screenshot": "image: this model cannot see it",
    "video": "video: this model cannot see it",
    "audio": "audio: this model cannot hear it",
    "document": "document: this model cannot read it",
    "file": "file: this model cannot read it",
}


def _texts(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str))


def unread(where: str, contents: Iterable[Any]) -> list[str]:
    """Return the kinds of parts that no model here can read, safe for a header."""
    lists = (content for content in contents if isinstance(content, list))
    others = (part for content in lists for part in content if isinstance(part, OtherPart))
    return kinds_in(where, (part.type for part in others if part.readable is None and not isinstance(part, ImagePart)))


def check_new_parts(where: str, turns: Sequence[tuple[str, Any]]) -> None:
    """Raise FieldError for a part that no model here can read in a new message, and note the place of each picture.

    In the history and in messages with tool results, a note replaces such a part. Clients send both again with each
    turn, so an error would end the session.

    Args:
        where: the field with the conversation.
        turns: each message's role and content."""
    roles = [role for role, _ in turns]
    last = next((i for i in reversed(range(len(roles))) if roles[i] in ("tool", "assistant")), -1)
    first_new = len(turns) if last >= 0 and roles[last] == "tool" else last + 1
    for i, (_, content) in enumerate(turns):
        for path, part in _others(f"{where}.{i}.content", content):
            if isinstance(part, ImagePart):
                part.place(path, i >= first_new)
            elif i >= first_new and part.readable is None:
                reason = "models here read texts and images, no documents or sounds; leave it out"
                reason = NO_VIDEOS if "video" in part.type else reason
                raise invalid(f"{path}.type", f"is {shown(part.type)}: {reason}")


def _others(where: str, content: Any) -> Iterator[tuple[str, OtherPart]]:
    """Yield the parts that are not texts, with their paths, also those in tool results."""
    for i, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, OtherPart):
            yield f"{where}.{i}", part
        else:
            yield from _others(f"{where}.{i}.content", getattr(part, "content", None))


def _kind_of_part(value: Any) -> str:
    kind = type_of(value, "text")
    if kind == "refusal" or not isinstance(kind, str):
        return "<refusal>" if kind == "refusal" else "<text>"
    return "<text>" if kind in _TEXT_KINDS else "<image>" if kind in IMAGE_KINDS else "<other>"


Part = Annotated[
    Annotated[TextPart, Tag("<text>")]
    | Annotated[RefusalPart, Tag("<refusal>")]
    | Annotated[ImagePart, Tag("<image>")]
    | Annotated[OtherPart, Tag("<other>")],
    Discriminator(_kind_of_part),
]
Content = Annotated[TextOrList[str, Annotated[list[Part], Field(fail_fast=True)]], text_or_list_of("text parts")]


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
    tool_calls: Annotated[list[AnyToolCall], Field(fail_fast=True)] | None = None  # an assistant's calls
    tool_call_id: str | None = None  # the call that a tool's message answers
    reasoning_content: str | None = None  # an assistant's; the template decides whether the model sees it
    reasoning: str | None = None  # another name for it
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
        """Return the content; empty next to tool calls, since more templates accept that than null."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def thoughts(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def parts(self) -> list[Part]:
        if isinstance(self.content, list):
            return self.content
        return [TextPart(type="text", text=self.content)] if self.content else []

    def images(self) -> list[ImagePart]:
        parts = self.content if isinstance(self.content, list) else ()
        return [part for part in parts if isinstance(part, ImagePart)]

    def as_template_sees_it(self, takes_images: bool = False) -> dict[str, Any]:
        """Return the message for the template, which sees no picture, only where one stands."""
        # "developer" is OpenAI's later name for "system"; templates use the earlier one.
        content: Any = self.text()
        if isinstance(self.content, list):
            content = [
                {"type": "text", "text": part.text}
                if not takes_images or not isinstance(part, ImagePart)
                else {"type": "image"}
                for part in self.content
            ] or ""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": content}
        shown = {"name", "tool_call_id"} | ({"tool_calls"} if self.tool_calls else set())
        if (thoughts := self.thoughts()) is not None:
            message["reasoning_content"] = thoughts
        return message | self.model_dump(include=shown, exclude_none=True)
