"""The grammar of arguments that a model writes one by one and not as one JSON object: between tags, or in Python."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.structured.pattern import literal_text
from runtime.structured.rules import NOTHING, Name, Rule, Terminal, choice, sequence, terminal
from runtime.structured.schema import writer as schema
from runtime.structured.schema.normalize import Terms
from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.written_values import types_of


def rules_of(
    form: ArgumentForm, root: Any, terms: Terms, prefix: str, strict: bool, ignored: list[str]
) -> dict[str, Rule]:
    """The rules of a call's arguments, in the order of their schema, which `can_write` has found fit."""
    written: dict[str, Rule] = {}
    rest: dict[bool, Rule] = {False: NOTHING, True: NOTHING}  # by whether there is an argument before
    properties, required = root.get("properties", {}), root.get("required", [])
    for i, name in reversed(list(enumerate(properties))):
        if form.stops and types_of(root, name) == {"string"}:
            value = _text(form, properties[name])
        else:
            of = {"$ref": f"#/properties/{name}"}
            written |= schema.rules_of(root, terms, of, f"{prefix}v{i}", strict, ignored)
            value = sequence(Name(f"{prefix}v{i}start"), terminal(literal_text(form.end)) if form.end else NOTHING)
        for has_one in (False, True):
            begin = (form.separator if has_one else "") + form.begin + name + form.to_value
            given = sequence(terminal(literal_text(begin)), value, rest[True])
            written[f"{prefix}{'ab'[has_one]}{i}"] = given if name in required else choice([given, rest[has_one]])
        rest = {False: Name(f"{prefix}a{i}"), True: Name(f"{prefix}b{i}")}
    return written | {f"{prefix}start": rest[False]}


def without_details(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A schema of the same arguments that tells their types alone."""
    types = {name: sorted(types_of(parameters, name)) for name in parameters.get("properties", {})}
    properties = {name: {"type": kinds} if kinds else {} for name, kinds in types.items()}
    return {"properties": properties, "required": parameters.get("required", [])}


def _text(form: ArgumentForm, of: Mapping[str, Any]) -> Rule:
    """A text and the end after it."""
    if values := of.get("enum", [of["const"]] if "const" in of else []):
        return choice(terminal(literal_text(value + form.end)) for value in values)
    unwanted = []
    for stop in form.stops:
        num_after = len(form.end.partition(stop)[2]) + 1 if stop in form.end else 0
        unwanted.append(f"(?s:.*){literal_text(stop)}(?s:.{{{num_after},}})")
    return Terminal((f"(?s:.*){literal_text(form.end)}",), tuple(unwanted))
