"""The tools of /v1/responses: functions, custom tools and namespaces with both, and their translation to a chat's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_serializer, model_validator
from pydantic_core import PydanticCustomError

from runtime.output.fields import Options, invalid
from runtime.output.tools import (
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
    OrHosted,
    Tool,
)
from serve_app.protocol.shapes import RequestModel, type_of

_MAX_NAME = 128  # characters that this API allows


class FunctionTool(RequestModel):
    """A function; a chat nests these fields under `function`."""

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


class FlatCustomTool(RequestModel):
    """A custom tool; a chat nests these fields under `custom`."""

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


_FlatTool = OrHosted[FunctionTool, FlatCustomTool]


class NamespaceTool(RequestModel):
    """Tools under a common name. The model sees each as a tool that bears both names."""

    type: Literal["namespace"]
    name: Name
    description: str | None = None
    tools: Annotated[list[_FlatTool], Field(fail_fast=True)]


AnyFlatTool = Annotated[
    Annotated[NamespaceTool, Tag("<namespace>")] | Annotated[_FlatTool, Tag("<flat>")],
    Discriminator(lambda value: "<namespace>" if type_of(value) == "namespace" else "<flat>"),
]


class NamedTool(RequestModel):
    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class FlatAllowedTools(RequestModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[OrHosted[NamedTool, NamedTool]], Field(min_length=1, fail_fast=True)]


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    kind = type_of(value)
    if kind in ("function", "custom"):
        return "<tool>"
    return "<allowed_tools>" if kind == "allowed_tools" else None


FlatToolChoice = Annotated[
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


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name under which the model sees a tool of a namespace. Its end survives a cut."""
    return name if not namespace else f"{namespace.rstrip('_')}__{name}"[-_MAX_NAME:]


class OfferedTools:
    """A request's tools in a chat's form. A tool that searches found again is offered once."""

    def __init__(self, tools: Iterable[NamespaceTool | FunctionTool | FlatCustomTool | HostedTool]) -> None:
        self.flat: list[AnyTool | HostedTool] = []
        self.namespaces: dict[str, tuple[str, str]] = {}  # (namespace, name) by flat name
        self._by_name: dict[str, AnyTool] = {}
        for tool in tools:
            if not isinstance(tool, NamespaceTool):
                self._offer(tool if isinstance(tool, HostedTool) else tool.as_chat())
                continue
            for inner in tool.tools:
                if isinstance(inner, HostedTool):
                    self._offer(inner)
                    continue
                name = flat_name(tool.name, inner.name)
                self.namespaces[name] = tool.name, inner.name
                self._offer(inner.model_copy(update={"name": name}).as_chat())

    def _offer(self, tool: AnyTool | HostedTool) -> None:
        if not isinstance(tool, HostedTool):
            if self._by_name.get(tool.function.name) == tool:
                return
            self._by_name[tool.function.name] = tool
        self.flat.append(tool)

    def chosen(self, choice: Any) -> tuple[list[AnyTool | HostedTool], Any]:
        """Return the allowed tools and a chat's `tool_choice`; raises FieldError."""
        if isinstance(choice, NamedTool):
            chosen = ChosenFunction(name=self._name_of(choice))
            if choice.type == "function":
                return self.flat, ChosenTool(type="function", function=chosen)
            return self.flat, ChosenCustomTool(type="custom", custom=chosen)
        if isinstance(choice, FlatAllowedTools):
            own = {(t.type, t.function.name): t for t in self.flat if not isinstance(t, HostedTool)}
            allowed = {(tool.type, self._name_of(tool)) for tool in choice.tools if isinstance(tool, NamedTool)}
            if unknown := allowed - own.keys():
                raise invalid("tool_choice.tools", f"has {min(unknown)[1]!r}, which no tool has")
            whole = {(tool.model_extra or {}).get("name") for tool in choice.tools if tool.type == "namespace"}
            allowed |= {key for key in own if self.namespaces.get(key[1], (None,))[0] in whole - {None}}
            return [tool for key, tool in own.items() if key in allowed], choice.mode
        return self.flat, choice if self.flat or choice == "required" else None

    def _name_of(self, tool: NamedTool) -> str:
        """Return the flat name of a chosen tool. A choice may leave out the namespace."""
        own = {t.function.name for t in self.flat if not isinstance(t, HostedTool)}
        if tool.namespace or tool.name in own:
            return flat_name(tool.namespace, tool.name)
        return next((flat for flat, (_, name) in self.namespaces.items() if name == tool.name), tool.name)
