"""The grammar that an output's tool calls must follow. It depends on where calls may begin.

forced          the prompt ends with a call's opening; the output continues it
or JSON         the output is a JSON answer or calls
at the start    a text without a mark that begins like a call is one
after a mark    calls follow a mark, anywhere in the text"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from runtime.base.types import GrammarSpec
from runtime.output.fields import FieldError, invalid
from runtime.output.response_format import RequestedGrammar
from runtime.output.tools import AnyTool, CustomTool
from runtime.structured.calls import Calls
from runtime.structured.pattern import literal_text
from runtime.text import reasoning
from runtime.text.tool_calls import ForcedCall, ToolCallParser, ToolFormat

_NO_ARGUMENTS = {"type": "object", "additionalProperties": False}
_JSON = ToolFormat(ToolCallParser, mark="", marks=(), again=" ")


def with_calls(
    answer: RequestedGrammar | None,
    tools: list[AnyTool],
    form: ToolFormat | None,
    forced: ForcedCall | None,
    most_calls: int | None,
    special_marks: Mapping[str, int],
    thinks: bool,
) -> RequestedGrammar | None:
    """Return the grammar of an output that may hold calls; None if the output is free.

    Without a forced call, a grammar is needed only for strict tools, tools with their own grammar, and JSON
    content. Arguments fit their schema. For a tool that is not strict, any object is valid if the schema is not
    supported. Any text is valid if the format writes arguments one by one and cannot express the schema.

    Args:
        answer: the content's grammar; None if it is free.
        form: the model's call format.
        forced: the call that the prompt begins; None if the model may choose.
        most_calls: the highest number of calls; None if unlimited.
        special_marks: the marks that are special tokens, and their ids.
        thinks: the output may begin with reasoning.

    Raises FieldError if the calls cannot be bound as required."""
    strict = next((i for i, tool in enumerate(tools) if _is_strict(tool)), None)
    if not tools or (forced is None and strict is None and answer is None):
        return answer
    assert form is not None, "tools without a format are refused before"
    grammar = _CallGrammar(tools, form, special_marks, most_calls is None)
    if forced is not None:
        return grammar.forced(forced)
    has_mark, no_text = grammar.can_follow_mark(), grammar.bare_calls(thinks)
    if answer is not None and not (has_mark and answer.spec.kind == "json"):
        why = "only JSON can be" if has_mark else "this model marks no calls as text"
        raise invalid(
            answer.field, f"cannot be combined with tools that may be called ({why}); set tool_choice to none"
        )
    if answer is None and not has_mark and not no_text:
        assert strict is not None, "a free output needs no grammar"
        raise _not_strict(tools, strict, "for this model")
    for i, tool in enumerate(tools):
        if _is_strict(tool) and grammar.is_unbound(tool):
            raise _not_strict(tools, i, "for this schema, which the model's own format of calls cannot keep to,")
    if answer is not None:
        return grammar.beside_json(answer)
    return grammar.at_start(no_text) if no_text else grammar.after_mark()


def calls_in_json(tools: Sequence[AnyTool], may_repeat: bool) -> Calls:
    """Return calls with JSON objects as arguments. The caller writes the text around them."""
    grammar = _CallGrammar(tools, _JSON, {}, may_repeat)
    return grammar.calls(None)


def _is_strict(tool: AnyTool) -> bool:
    return bool(tool.function.strict or (isinstance(tool, CustomTool) and tool.grammar))


def _not_strict(tools: Sequence[AnyTool], index: int, where: str) -> FieldError:
    """Return the refusal of a strict tool that a grammar cannot bind where the model may choose."""
    field = "custom.format" if isinstance(tools[index], CustomTool) else "function.strict"
    return invalid(
        f"tools.{index}.{field}", f"is supported {where} only where tool_choice is required or names a function"
    )


@dataclass(frozen=True, slots=True)
class _CallGrammar:
    """The grammar for calls to `tools` in one format."""

    tools: Sequence[AnyTool]
    form: ToolFormat
    special_marks: Mapping[str, int]
    may_repeat: bool  # several calls are allowed

    # ---- one method for each place of calls -------------------------------------------------------------------------

    def forced(self, forced: ForcedCall) -> RequestedGrammar:
        return _requested(self.calls(forced.name, is_forced=True))

    def beside_json(self, answer: RequestedGrammar) -> RequestedGrammar:
        calls = self.calls(None)
        calls.begin, calls.answer = self.form.opening(None), answer.spec.text
        requested = _requested(calls, strict=answer.spec.strict, field=answer.field)
        of = answer.spec  # includes the reasoning before it
        return replace(requested, spec=replace(requested.spec, after=of.after, special=of.special, opens=of.opens))

    def at_start(self, no_text: list[str]) -> RequestedGrammar:
        calls = self.calls(None)
        calls.begin, calls.no_text = self.form.begin, no_text
        return _requested(calls)

    def after_mark(self) -> RequestedGrammar:
        calls, mark = self.calls(None), self.form.last_mark
        calls.begin = self.form.begin.partition(mark)[2].strip()
        around = {*reasoning.TOKENS, self.form.mark, *self.form.parser.other_marks}
        special = tuple((each, i) for each, i in self.special_marks.items() if each in around)
        return _requested(calls, mark, special if mark in self.special_marks else (), may_stay_free=True)

    # ---- conditions -------------------------------------------------------------------------------------------------

    def can_follow_mark(self) -> bool:
        """True if calls follow a mark that a grammar can find."""
        if (form := self.form).bare or not form.mark:
            return False
        return form.last_mark in self.special_marks or self._is_text(*reasoning.TOKENS, form.begin)

    def bare_calls(self, thinks: bool) -> list[str]:
        """Return regular expressions for texts that are read as calls without a mark; none if there are none.

        A free text must match none of them."""
        if thinks or not self.form.bare:
            return []
        names = "|".join(literal_text(tool.function.name) for tool in self.tools)
        marked = [f"(?s:.*){literal_text(self.form.mark)}(?s:.*)"] if self._is_text(self.form.mark) else []
        return [f"({self.form.bare.replace('%s', names)})(?s:.*)", *marked]

    def is_unbound(self, tool: AnyTool) -> bool:
        """True if the format cannot bind the tool's arguments: any text is valid for them."""
        return self.form.arguments is not None and tool.needs_json(self.form.arguments)

    def _is_text(self, *texts: str) -> bool:
        return not any(mark in text for mark in self.special_marks for text in texts)

    # ---- the calls --------------------------------------------------------------------------------------------------

    def calls(self, name: str | None, is_forced: bool = False) -> Calls:
        """Return the grammar from within the first call on: the function `name`, or any (None)."""
        form = self.form
        tools = [tool for tool in self.tools if name in (None, tool.function.name)]
        written = {tool.function.name: form.written(tool.function.name) for tool in tools}
        grammars = {written[tool.function.name]: tool.grammar for tool in tools if isinstance(tool, CustomTool)}
        schemas = {written[tool.function.name]: tool.function.parameters for tool in tools}
        again = form.again if name is None else f"{form.again}{form.written(name)}{form.to_arguments}"
        return Calls(
            functions={key: _NO_ARGUMENTS if schema is None else schema for key, schema in schemas.items()},
            inputs={key: (of.syntax, of.definition) for key, of in grammars.items() if of is not None},
            lenient=[written[tool.function.name] for tool in tools if not tool.function.strict],
            unbound=[] if is_forced else [written[tool.function.name] for tool in tools if self.is_unbound(tool)],
            named=name is not None,
            to_arguments=form.to_arguments,
            numbers=form.has_named_ids,
            end=form.end,
            again=again if self.may_repeat and form.again else "",
            arguments=form.arguments,
            close=form.close,
            special=dict(self.special_marks),
        )


def _requested(
    calls: Calls,
    after: str = "",
    special: tuple[tuple[str, int], ...] = (),
    *,
    may_stay_free: bool = False,
    strict: bool | None = None,
    field: str = "tools",
) -> RequestedGrammar:
    spec = GrammarSpec("calls", msgspec.json.encode(calls).decode(), after, special, may_stay_free, strict)
    return RequestedGrammar(spec, field)
