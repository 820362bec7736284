"""The functions and the custom tools that a chat's model may call, and the client's choice among them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from runtime.output.fields import OpenOptions, Options
from runtime.text.tool_calls.argument_form import ArgumentForm, can_write

Name = Annotated[str, Field(min_length=1, max_length=512)]  # parsers read up to 1,024 characters before arguments


class Function(Options):
    model_config = ConfigDict(extra="allow")  # the template may use further fields

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the arguments fit `parameters`, or the request is refused


class Tool(OpenOptions):
    type: Literal["function"]
    function: Function

    def needs_json(self, form: ArgumentForm | None) -> bool:
        """True if its arguments cannot be written one by one in this form."""
        return form is not None and not can_write(form, self.function.parameters)

    def as_template_sees_it(self) -> dict[str, Any]:
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class InputGrammar(Options):
    syntax: Literal["lark", "regex"]
    definition: str


class InputFormat(Options):
    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> Self:
        if (self.type == "grammar") != (self.grammar is not None):
            raise PydanticCustomError(
                "format_shape", "it should have a grammar where its type is 'grammar', and only there"
            )
        return self


class Custom(OpenOptions):
    name: Name
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(OpenOptions):
    """A tool that takes a text. The model sees a function with one string, `input`."""

    type: Literal["custom"]
    custom: Custom

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar of the text; None if any text is valid."""
        return None if self.custom.format is None else self.custom.format.grammar

    @property
    def function(self) -> Function:
        about: dict[str, Any] = {"type": "string"}
        if (grammar := self.grammar) is not None:
            kind = "regular expression" if grammar.syntax == "regex" else "Lark grammar"
            about["description"] = f"A text that matches this {kind}:\n{grammar.definition}"
        parameters = {"type": "object", "properties": {"input": about}, "required": ["input"]}
        given = self.custom.model_dump(include={"name", "description"}, exclude_none=True)
        return Function(**given, parameters=parameters | {"additionalProperties": False})

    def needs_json(self, form: ArgumentForm | None) -> bool:
        return self.grammar is not None

    def as_template_sees_it(self) -> dict[str, Any]:
        return Tool(type="function", function=self.function).as_template_sees_it()


class HostedTool(Options):
    """A tool that another server runs itself, such as a search. It is left out of prompts."""

    model_config = ConfigDict(extra="allow")

    type: str


_TAGS = {None: "<function>", "function": "<function>", "custom": "<custom>"}
_DEFINING = {"function", "custom", "parameters", "input_schema"}  # fields of tools that the client runs


def _kind(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _TAGS.get(kind) if kind is None or isinstance(kind, str) else "<function>"


def _kind_or_hosted(value: Any) -> str | None:
    kind = _kind(value)
    is_hosted = kind is None and not (isinstance(value, dict) and _DEFINING & value.keys())
    return "<hosted>" if is_hosted else kind


_ERROR: Any = {"custom_error_type": "tool_kind", "custom_error_message": "it should be of the type function or custom"}
KIND = Discriminator(_kind, **_ERROR)  # calls and choices
F = TypeVar("F")
C = TypeVar("C")
OrHosted = Annotated[
    Annotated[F, Tag("<function>")] | Annotated[C, Tag("<custom>")] | Annotated[HostedTool, Tag("<hosted>")],
    Discriminator(_kind_or_hosted, **_ERROR),
]
AnyTool = Tool | CustomTool
OfferedTool = OrHosted[Tool, CustomTool]


class ChosenFunction(OpenOptions):
    name: str


class ChosenTool(OpenOptions):
    type: Literal["function"]
    function: ChosenFunction


class ChosenCustomTool(OpenOptions):
    type: Literal["custom"]
    custom: ChosenFunction

    @property
    def function(self) -> ChosenFunction:
        return self.custom


AnyChosenTool = Annotated[Annotated[ChosenTool, Tag("<function>")] | Annotated[ChosenCustomTool, Tag("<custom>")], KIND]


class AllowedFunctions(OpenOptions):
    """The tools in the prompt, and whether the model must call one."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChosenTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(OpenOptions):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions

    @property
    def names(self) -> set[tuple[str, str]]:
        """The types and names of the tools."""
        return {(tool.type, tool.function.name) for tool in self.allowed_tools.tools}


def _kind_of_choice(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, AllowedTools) or (isinstance(value, dict) and value.get("type") == "allowed_tools"):
        return "<allowed>"
    return "<tool>" if isinstance(value, dict | ChosenTool | ChosenCustomTool) else None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<text>")]
    | Annotated[AnyChosenTool, Tag("<tool>")]
    | Annotated[AllowedTools, Tag("<allowed>")],
    Discriminator(
        _kind_of_choice,
        custom_error_type="tool_choice_shape",
        custom_error_message="it should be 'none', 'auto', 'required', or an object that names a tool or allowed_tools",
    ),
]
