"""The functions and custom tools that a chat's model may call, and the grammar that its calls must follow."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from runtime.output.fields import FieldError, Options, invalid
from runtime.output.response_format import RequestedGrammar
from runtime.spec.types import GrammarSpec
from runtime.structured.calls import Calls
from runtime.structured.pattern import literal_text
from runtime.text import reasoning
from runtime.text.tool_calls import ForcedCall, ToolFormat
from runtime.text.tool_calls.argument_form import ArgumentForm, can_write

_NAME = r"^[a-zA-Z0-9_-]{1,64}$"


class Function(Options):
    model_config = ConfigDict(extra="allow")  # what else there is may mean something to the template

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # the arguments fit `parameters`, or the request is refused


class Tool(Options):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: Function

    def needs_json(self, form: ArgumentForm | None) -> bool:
        """True if its arguments cannot be written in a form one by one."""
        return form is not None and not can_write(form, self.function.parameters)

    def as_template_sees_it(self) -> dict[str, Any]:
        return {"type": self.type, "function": self.function.model_dump(exclude_unset=True, exclude={"strict"})}


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


class Custom(Options):
    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    format: InputFormat | None = None


class CustomTool(Options):
    """A tool that takes a text, of which the model is told as of a function of one string, `input`."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"]
    custom: Custom

    @property
    def grammar(self) -> InputGrammar | None:
        """The grammar that the text follows; None: any text will do."""
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


def kind_of_tool(value: Any) -> str:
    """The tag of a tool, or of a call, in a union of functions and custom tools."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "<custom>" if kind == "custom" else "<function>"


AnyTool = Annotated[
    Annotated[Tool, Tag("<function>")] | Annotated[CustomTool, Tag("<custom>")], Discriminator(kind_of_tool)
]


class ChosenFunction(Options):
    model_config = ConfigDict(extra="ignore")

    name: str


class ChosenTool(Options):
    model_config = ConfigDict(extra="ignore")

    type: Literal["function"]
    function: ChosenFunction


class ChosenCustomTool(Options):
    model_config = ConfigDict(extra="ignore")

    type: Literal["custom"]
    custom: ChosenFunction

    @property
    def function(self) -> ChosenFunction:
        return self.custom


AnyChosenTool = Annotated[
    Annotated[ChosenTool, Tag("<function>")] | Annotated[ChosenCustomTool, Tag("<custom>")],
    Discriminator(kind_of_tool),
]


class AllowedFunctions(Options):
    """The tools that the model is told of, and whether it must call one."""

    model_config = ConfigDict(extra="ignore")

    mode: Literal["auto", "required"]
    tools: Annotated[list[AnyChosenTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(Options):
    model_config = ConfigDict(extra="ignore")

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


def with_calls(
    answer: RequestedGrammar | None,
    tools: list[AnyTool],
    form: ToolFormat | None,
    forced: ForcedCall | None,
    most_calls: int | None,
    special_marks: Collection[str],
    thinks: bool,
) -> RequestedGrammar | None:
    """The grammar of an output that may hold calls, where `answer` is that of its content; None: all is free.

    Calls are bound from the opening on with which the prompt ends, or, where the model may choose and some function
    is strict or has a grammar of its own, from any mark on that it writes, or from the text's beginning where it may be
    a call without one; beside an answer in JSON, they are all that it may write instead. Arguments fit their schema;
    without `strict` any object will do where the schema is not supported, and any text where arguments that are written
    one by one cannot be bound to it. No grammar can write `special_marks`, which are tokens and no text: what has to
    follow one is left out."""
    inputs = {tool.function.name: tool.grammar for tool in tools if isinstance(tool, CustomTool)}
    strict = next((i for i, t in enumerate(tools) if t.function.strict or inputs.get(t.function.name)), None)
    if not tools or (forced is None and strict is None and answer is None):
        return answer
    assert form is not None, "tools that the model has no format for are refused before"

    def is_text(*texts: str) -> bool:
        return not any(mark in text for mark in special_marks for text in texts)

    has_marks, no_text = _ways_to_call(form, [tool.function.name for tool in tools], is_text, thinks)
    unbound = (
        [] if forced is not None else [tool for tool in tools if form.arguments and tool.needs_json(form.arguments)]
    )
    if forced is not None:
        answer = None  # there is no content
    elif answer is not None and not (has_marks and answer.spec.kind == "json"):
        why = "only JSON can be" if has_marks else "this model marks no calls as text"
        raise invalid(
            answer.field, f"cannot be combined with tools that may be called ({why}); set tool_choice to none"
        )
    elif not (has_marks or no_text):
        assert strict is not None, "there is no other reason for a grammar here"
        raise _not_strict(tools, strict, "for this model")
    for i, tool in enumerate(tools):
        if tool in unbound and (tool.function.strict or isinstance(tool, CustomTool)):
            raise _not_strict(tools, i, "for this schema, which the model's own format of calls cannot keep to,")
    name = None if forced is None else forced.name
    functions = [tool.function for tool in tools if name in (None, tool.function.name)]
    nothing = {"type": "object", "additionalProperties": False}
    again = form.again if name is None else f"{form.again}{name}{form.to_arguments}"
    end = form.end if is_text(form.end) else form.end.partition("\n")[0]
    calls = Calls(
        functions={f.name: nothing if f.parameters is None else f.parameters for f in functions},
        inputs={f.name: (of.syntax, of.definition) for f in functions if (of := inputs.get(f.name)) is not None},
        lenient=[f.name for f in functions if not f.strict],
        unbound=[tool.function.name for tool in unbound],
        named=name is not None,
        to_arguments=form.to_arguments,
        end=end,
        again=again if form.again and is_text(form.end, again) and most_calls is None else "",
        arguments=form.arguments,
        close=form.close if is_text(form.end, form.close) else "",
    )
    after, free = "", False
    if answer is not None:
        calls.begin, calls.answer, after = form.opening(None), answer.spec.text, answer.spec.after
    elif forced is None and no_text:
        calls.begin, calls.no_text = form.begin, no_text
    elif forced is None:
        calls.begin, after, free = form.begin.partition(form.last_mark)[2].strip(), form.last_mark, True
    strictness = None if answer is None else answer.spec.strict
    spec = GrammarSpec("calls", msgspec.json.encode(calls).decode(), after, free, strictness)
    return RequestedGrammar(spec, "tools" if answer is None else answer.field)


def _ways_to_call(
    form: ToolFormat, names: list[str], is_text: Callable[..., bool], thinks: bool
) -> tuple[bool, list[str]]:
    """How a model that may choose can call, as far as a grammar can bind it: if after a mark; and without one, by the
    regular expressions that no text of it may match then, as it would be read as calls (none: it cannot)."""
    around = () if form.arguments is None else (form.arguments.begin, form.arguments.to_value, form.arguments.end)
    if not is_text(form.begin, form.to_arguments, form.end, form.close, *around) or (form.bare and thinks):
        return False, []
    if not form.bare:
        return bool(form.mark) and is_text(reasoning.OPEN, reasoning.CLOSE), []
    marked = [f"(?s:.*){literal_text(form.mark)}(?s:.*)"] if is_text(form.mark) else []
    return False, [f"({form.bare.replace('%s', '|'.join(names))})(?s:.*)", *marked]


def _not_strict(tools: Sequence[AnyTool], index: int, where: str) -> FieldError:
    """The refusal of a tool whose calls would have to be bound where the model may choose."""
    field = "custom.format" if isinstance(tools[index], CustomTool) else "function.strict"
    return invalid(
        f"tools.{index}.{field}", f"is supported {where} only where tool_choice is required or names a function"
    )
