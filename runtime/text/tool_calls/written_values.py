"""Argument values that a model writes as plain text. The function's schema determines their types."""

from __future__ import annotations

import json
from collections.abc import Mapping

_TYPES = {
    type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"
}  # fmt: skip
_LITERALS = {"True": "true", "False": "false", "None": "null"}  # written by templates that use Python's syntax


def json_text(text: str) -> str:
    """Return a text as JSON, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def dumped(value: object) -> str:
    """Return a value as JSON. A lone surrogate, which UTF-8 cannot encode, stays escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def types_of(parameters: object, name: str) -> frozenset[str]:
    """Return the JSON types of a parameter; empty if its schema does not determine them."""
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return _types(properties.get(name)) if isinstance(properties, Mapping) else frozenset()


def _types(schema: object) -> frozenset[str]:
    if not isinstance(schema, Mapping):
        return frozenset()
    of = schema.get("type")
    if isinstance(of, str | list):
        names = frozenset([of] if isinstance(of, str) else map(str, of))
        return names if names <= {*_TYPES.values()} else frozenset()
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            parts = [_types(option) for option in options]
            return frozenset[str]().union(*parts) if all(parts) else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return frozenset(_TYPES.get(type(value), "string") for value in values) if isinstance(values, list) else frozenset()


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value as JSON: its text if that is JSON with an allowed type, else a string."""
    text_of_json = _LITERALS.get(text.strip(), text.strip())
    try:
        value = json.loads(text_of_json, parse_constant=lambda _: "")  # NaN is not JSON
    except (ValueError, RecursionError):
        return f'"{json_text(text)}"'
    kind = _TYPES[type(value)]
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    fits = fits or (kind == "number" and "integer" in types and value.is_integer())
    return text_of_json if fits and kind != "string" else f'"{json_text(text)}"'
