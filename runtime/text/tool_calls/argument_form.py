"""Marks around arguments that are written one by one, and a check of schemas for this form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.text.tool_calls.written_values import types_of

_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = {"type", "enum", "const"}
_SAYS_NOTHING = {"title", "description", "default", "examples", "$schema"}


class ArgumentForm(msgspec.Struct, frozen=True):
    """The marks around one argument."""

    begin: str  # before its name
    to_value: str
    end: str
    separator: str = ""
    stops: tuple[str, ...] = ()  # marks that an unquoted text may not contain; empty if texts are JSON
    quote: str = ""  # before and after such a text


def can_write(form: ArgumentForm, parameters: Any) -> bool:
    """True if exactly the objects that fit a function's schema can be written and parsed in this form."""
    if parameters is None:
        return True
    if not isinstance(parameters, Mapping) or not parameters.keys() <= _OF_OBJECTS | _SAYS_NOTHING:
        return False
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if parameters.get("type") != "object" or parameters.get("additionalProperties", not properties) is not False:
        return False
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    if not all(isinstance(name, str) and name in properties for name in required):
        return False
    return all(
        name.isidentifier() and (not form.stops or _can_stand_bare(form, parameters, name)) for name in properties
    )


def _can_stand_bare(form: ArgumentForm, parameters: Mapping[str, Any], name: str) -> bool:
    types, of = types_of(parameters, name), parameters["properties"][name]
    if types != {"string"}:
        return bool(types) and "string" not in types
    if not of.keys() <= _OF_TEXTS | _SAYS_NOTHING or {"enum", "const"} <= of.keys():
        return False
    values = of.get("enum", [of["const"]] if "const" in of else [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return False
    return not any(stop in value or value[:1] == "\n" for value in values for stop in form.stops)
