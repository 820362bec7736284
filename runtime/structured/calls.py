"""Function calls: the rules for an output that calls a request's functions, in any tool format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.structured.notation import Notation
from runtime.structured.pattern import GrammarError, Name, Repeat, escaped, literal_text, plain
from runtime.structured.readers.lark import in_json_string, read_lark
from runtime.structured.readers.regex import whole
from runtime.structured.rules import (
    NOTHING,
    SPACES,
    LarkGrammar,
    Rule,
    Shortest,
    Terminal,
    choice,
    marked,
    sequence,
    terminal,
    text,
)
from runtime.structured.schema import writer as schema
from runtime.structured.schema.merge import TerminalChecks
from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.written_values import types_of

_PYTHON_ARGUMENTS = r"""([^()"']|"([^"\\]|\\(?s:.))*"|'([^'\\]|\\(?s:.))*')*"""  # excludes tuples


class Calls(msgspec.Struct):
    """One output's calls. The prompt ends with a part of the first call's opening, which may be empty."""

    functions: dict[str, Any]  # the schemas of their arguments, by name
    inputs: dict[str, tuple[str, str]]  # syntax and grammar of a function's one argument, the text `input`
    lenient: list[str]  # functions that take any object where their schema is not supported
    unbound: list[str]  # functions with any text as arguments, up to the last mark that ends a call
    named: bool  # the opening names the only function
    to_arguments: str  # text that separates a function's name from its arguments
    end: str  # after a call's arguments
    again: str  # a further call's opening, up to the part that the prompt has already; "" for one call
    close: str  # after the last call
    begin: str = ""  # the rest of the opening
    arguments: ArgumentForm | None = None  # how arguments are written; None for one JSON object
    numbers: bool = False  # `to_arguments` begins with ":0", the call's number; other numbers are allowed
    answer: str = ""  # a JSON Schema: the output may be such a value instead; "" for none
    special: dict[str, int] = {}  # marks that are special tokens, and their ids
    no_text: list[str] = []  # the output may be a text that matches none of these expressions; empty if it may not

    def text(self, of: str) -> Rule:
        """Return the rule of a text with the format's marks."""
        return marked(of, self.special)


def rules_of(calls: Calls, checks: TerminalChecks, strict: bool | None, ignored: list[str]) -> dict[str, Rule]:
    """Return the rules of calls; `strict` applies to the answer's schema. Raises GrammarError."""
    written: dict[str, Rule] = {}
    bodies: list[tuple[Rule, Rule]] = []  # each call's opening, and its rest without the end marks
    marks = calls.end.lstrip("}") if calls.arguments is None else ""
    num_closing = len(calls.end) - len(marks)
    # White space behind a call must not decide between another call and the end.
    has_spaces = not calls.close or calls.again[:1].isspace() or calls.close[0].isspace()
    after = SPACES if has_spaces else NOTHING
    for i, (name, parameters) in enumerate(calls.functions.items()):
        opening = sequence(_to_arguments(calls, name), terminal("\\x{20}?"))
        if name in calls.unbound:
            bodies.append((opening, _unbound_arguments(calls)))
            continue
        written |= arguments_of(calls, name, parameters, f"f{i}", checks, ignored)
        bodies.append((opening, sequence(Name(f"f{i}start"), calls.text(calls.end[:num_closing]))))
    written["call"] = _one_of(bodies)
    end = sequence(calls.text(marks), after)
    more = Repeat(sequence(end, calls.text(calls.again.lstrip()), Name("call")), 0, None) if calls.again else NOTHING
    # llguidance takes the longest terminal and does not go back. Free text is allowed here as well. So a call's first
    # terminal has to reach to where the text cannot be free: behind the function's name.
    begin = calls.text(calls.begin)
    first = _one_of(bodies, sequence(SPACES, begin)) if calls.no_text else None
    last = sequence(end, calls.text(calls.close.lstrip()), SPACES) if calls.close else end
    if marks and not any(mark in marks for mark in calls.special):
        # A model that was not trained on the marks ends behind the object. What it wrote behind them would be chance.
        last = choice([last, SPACES])
    start = sequence(first or sequence(begin, Name("call")), more, last)
    if calls.answer:
        written |= schema.rules_of(schema.read(calls.answer), checks, None, "a", strict, ignored)
        start = choice([start, sequence(Name("astart"), SPACES)])
    if calls.no_text:
        start = choice([start, Terminal(("(?s:.*)",), tuple(calls.no_text))])
    return {"start": start, **written}


def _to_arguments(calls: Calls, name: str) -> Rule:
    if calls.named or not calls.numbers:
        return calls.text("" if calls.named else name + calls.to_arguments)
    return sequence(calls.text(name), terminal(":[0-9]{1,4}"), calls.text(calls.to_arguments.removeprefix(":0")))


def _one_of(bodies: list[tuple[Rule, Rule]], before: Rule = NOTHING) -> Rule:
    return choice(sequence(before, opening, rest) for opening, rest in bodies)


def _unbound_arguments(calls: Calls) -> Rule:
    """Return the rule of any arguments and the call's end."""
    rest = _text_up_to_end(calls)
    if calls.to_arguments or calls.arguments is None:
        return rest
    # The first argument's mark ends the function's name.
    return choice([calls.text(calls.end), sequence(calls.text(calls.arguments.begin), rest)])


def _text_up_to_end(calls: Calls) -> Rule:
    if calls.arguments is not None and not calls.arguments.stops:
        return sequence(terminal(_PYTHON_ARGUMENTS), calls.text(calls.end))
    *_, last_line = calls.end.splitlines()
    if last_line in calls.special:
        return sequence(terminal("(?s:.*)"), calls.text(last_line))
    return Shortest(f"(?s:.*){literal_text(last_line)}")


def arguments_of(
    calls: Calls, name: str, parameters: Any, prefix: str, checks: TerminalChecks, ignored: list[str]
) -> dict[str, Rule]:
    """Return the rules of one function's arguments; the first one is `prefix` + "start"."""
    is_object = {"allOf": [{"type": "object"}, {"$ref": "#"}]}
    strict, not_enforced = name not in calls.lenient, list[str]()
    try:
        if name in calls.inputs:
            return {f"{prefix}start": _input(*calls.inputs[name])}
        root = schema.read(json.dumps(parameters))
        if calls.arguments is None:
            found = schema.rules_of(root, checks, is_object, prefix, strict, not_enforced)
        else:
            found = _one_by_one(calls, calls.arguments, root, checks, prefix, strict, not_enforced)
        ignored += (f".{name}{path}" for path in not_enforced)
    except GrammarError as e:
        if name in calls.inputs:
            raise GrammarError(f"has a custom tool {name} whose format cannot be enforced: the grammar {e}") from e
        if strict:
            raise GrammarError(f"has a function {name} whose parameters cannot be enforced: the schema {e}") from e
        if calls.arguments is None:
            return schema.rules_of({}, checks, is_object, prefix)
        return _one_by_one(calls, calls.arguments, _types_alone(parameters), checks, prefix, False, [])
    return found


def _input(syntax: str, definition: str) -> Rule:
    """Return the rule of an object with one property, `input`: a text that follows a grammar."""
    if syntax == "regex":
        input_text: Rule = terminal(plain(escaped(whole(definition))))
    else:
        input_text = LarkGrammar(in_json_string(read_lark(definition)))
    return sequence(terminal(literal_text('{"input":') + '\\x{20}?"'), input_text, text('"}'))


# ---- arguments one by one --------------------------------------------------------------------------------------------


def _one_by_one(
    calls: Calls, form: ArgumentForm, root: Any, checks: TerminalChecks, prefix: str, strict: bool, ignored: list[str]
) -> dict[str, Rule]:
    """Return the rules of arguments between tags or in Python."""
    written: dict[str, Rule] = {}
    rest: dict[bool, Rule] = {False: NOTHING, True: NOTHING}  # key: an argument precedes
    notation = Notation(form, lambda of: _tagged_text(calls, form, of), written)
    properties, required = root.get("properties", {}), root.get("required", [])
    names = sorted(properties, key=str.lower) if form.is_sorted else list(properties)  # Jinja's dictsort order
    for i, name in reversed(list(enumerate(names))):
        is_text = bool(form.stops) and types_of(root, name) == {"string"}
        if is_text:
            value = _tagged_text(calls, form, properties[name])
        elif form.quote and (own := notation.value(properties[name], f"{prefix}n{i}")) is not None:
            value = sequence(own, calls.text(form.end))
        else:
            of = {"$ref": f"#/properties/{name}"}
            written |= schema.rules_of(root, checks, of, f"{prefix}v{i}", strict, ignored)
            value = sequence(Name(f"{prefix}v{i}start"), calls.text(form.end))
        for has_one in (False, True):
            begin = (
                (form.separator if has_one else "") + form.begin + name + ((is_text and form.to_text) or form.to_value)
            )
            given = sequence(calls.text(begin), value, rest[True])
            written[f"{prefix}{'ab'[has_one]}{i}"] = given if name in required else choice([given, rest[has_one]])
        rest = {False: Name(f"{prefix}a{i}"), True: Name(f"{prefix}b{i}")}
    return written | {f"{prefix}start": rest[False]}


def _types_alone(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a schema of the same arguments that states their types only."""
    types = {name: sorted(types_of(parameters, name)) for name in parameters.get("properties", {})}
    properties = {name: {"type": kinds} if kinds else {} for name, kinds in types.items()}
    return {"properties": properties, "required": parameters.get("required", [])}


def _tagged_text(calls: Calls, form: ArgumentForm, schema_of_text: Mapping[str, Any]) -> Rule:
    """Return the rule of a text and its closing tag. A special token ends the text where a tag begins with one."""
    begin, end = calls.text(form.quote), form.quote + form.end
    if values := schema_of_text.get("enum", [schema_of_text["const"]] if "const" in schema_of_text else []):
        return choice(sequence(begin, text(value), calls.text(end)) for value in values)
    if end.startswith(tuple(calls.special)):
        unwanted = [f"(?s:.*){literal_text(stop)}(?s:.*)" for stop in form.stops]
        return sequence(begin, Terminal(("(?s:.*)",), tuple(unwanted)), calls.text(end))
    unwanted = []
    for stop in form.stops:
        num_after = len(end.partition(stop)[2]) + 1 if stop in end else 0
        unwanted.append(f"(?s:.*){literal_text(stop)}(?s:.{{{num_after},}})")
    return sequence(begin, Terminal((f"(?s:.*){literal_text(end)}",), tuple(unwanted)))
