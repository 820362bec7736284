"""Marks around arguments that are written one by one, and a check of schemas for this form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from runtime.text.tool_calls.written_values import types_of

_OF_OBJECTS = {"type", "properties", "required", "additionalProperties", "$defs", "definitions"}
_OF_TEXTS = {"type", "enum", "const"}
SAYS_NOTHING = {"title", "description", "default", "examples", "$schema"}


class ArgumentForm(msgspec.Struct, frozen=True):
    """The marks around one argument."""

    begin: str  # before its name
    to_value: str
    end: str
    separator: str = ""
    stops: tuple[str, ...] = ()  # marks that an unquoted text may not contain; empty if texts are JSON
    quote: str = ""  # written before and after such a text
    to_text: str = ""  # instead of `to_value` before a text; empty if it is the same
    is_sorted: bool = False  # sorted by name, as the template shows parameters; otherwise in the schema's order


def can_write(form: ArgumentForm, parameters: Any) -> bool:
    """True if exactly the objects that fit a function's schema can be written and parsed in this form."""
    if parameters is None:
        return True
    if not isinstance(parameters, Mapping) or not is_closed(parameters):
        return False
    return all(not form.stops or _can_be_argument(form, parameters, name) for name in parameters.get("properties", {}))


def is_closed(schema: Mapping[str, Any]) -> bool:
    """True for the schema of an object with known properties alone, which have identifiers as names."""
    if not schema.keys() <= _OF_OBJECTS | SAYS_NOTHING:
        return False
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema.get("type") != "object" or schema.get("additionalProperties", "properties" not in schema) is not False:
        return False
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        return False
    if not all(isinstance(name, str) and name in properties for name in required):
        return False
    return all(name.isidentifier() for name in properties)


def _can_be_argument(form: ArgumentForm, parameters: Mapping[str, Any], name: str) -> bool:
    types = types_of(parameters, name)
    if types != {"string"}:
        return bool(types) and "string" not in types
    return can_stand_bare(form, parameters["properties"][name])


def can_stand_bare(form: ArgumentForm, schema: Mapping[str, Any]) -> bool:
    """True if a schema's texts can all be written without escapes, up to where their tag or quote ends."""
    if not schema.keys() <= _OF_TEXTS | SAYS_NOTHING or {"enum", "const"} <= schema.keys():
        return False
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        return False
    return not any(stop in value or value[:1] == "\n" for value in values for stop in form.stops)
