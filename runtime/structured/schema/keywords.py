"""JSON Schema's keywords: the enforced ones, the refused ones, and the shape of each value.

A name that neither a draft (4 to 2020-12) nor OpenAPI defines is an annotation, as in JSON Schema. A defined keyword
that asserts something and is not enforced is refused by its name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any

from runtime.structured.pattern import GrammarError, shown

MAX_BYTES = 262_144
MAX_DEPTH = 64  # brackets within brackets
MAX_PROPERTIES = 1_000  # properties of all objects
MAX_ENUM_BYTES = 65_536  # size of one enum

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
ABOUT = {
    "object": (
        *("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
        "propertyNames",
    ),
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
# A normal schema has keywords of ABOUT or anyOf in their place.
REWRITTEN = (
    *("$ref", "allOf", "oneOf", "const", "nullable", "additionalItems", "dependentRequired", "dependentSchemas"),
    *("dependencies", "unevaluatedProperties", "unevaluatedItems"),
)
NORMAL_KEYWORDS = frozenset(("type", "enum", "anyOf")).union(*ABOUT.values())
KEYWORDS = NORMAL_KEYWORDS.union(REWRITTEN)
# They assert something that is not enforced; the last three come from draft 3.
REFUSED = (
    *("not", "if", "contains", "$dynamicRef", "$recursiveRef", "$recursiveAnchor"),
    *("extends", "disallow", "divisibleBy"),
)

Schema = dict[str, Any]


def is_number(value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return is_number(value) and value >= 0 and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _map_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_are_schemas, _are_texts, _are_types = _list_of(is_schema), _list_of(_is_text), _list_of(TYPES.__contains__)
# Keywords, their shape's name in a message, and its check.
_SHAPES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("minimum maximum multipleOf", "a number", _is_finite),
    ("exclusiveMinimum exclusiveMaximum", "a number", lambda v: isinstance(v, bool) or _is_finite(v)),  # draft 4: bool
    ("minLength maxLength minItems maxItems minProperties maxProperties", "a whole number from 0 on", _is_count),
    ("uniqueItems nullable", "true or false", lambda v: isinstance(v, bool)),
    ("pattern format $ref", "a text", _is_text),
    ("additionalProperties additionalItems propertyNames", "a schema", is_schema),
    ("unevaluatedProperties unevaluatedItems", "a schema", is_schema),
    ("allOf anyOf oneOf prefixItems", "a list of schemas", lambda v: bool(v) and _are_schemas(v)),
    ("items", "a schema or a list of them", lambda v: is_schema(v) or _are_schemas(v)),
    ("properties patternProperties dependentSchemas", "an object of schemas", _map_of(is_schema)),
    ("dependentRequired", "an object of lists of texts", _map_of(_are_texts)),
    ("dependencies", "an object of schemas and lists of texts", _map_of(lambda v: is_schema(v) or _are_texts(v))),
    ("required", "a list of texts", lambda v: v is False or _are_texts(v)),  # draft 3: false
    ("enum", "a list of values", lambda v: isinstance(v, list)),
    ("type", f"one of {', '.join(TYPES)}, or a list of them", lambda v: v in TYPES or (bool(v) and _are_types(v))),
)
_SHAPE_OF = {keyword: (wanted, fits) for keywords, wanted, fits in _SHAPES for keyword in keywords.split()}


def parse(text: str) -> Any:
    """Read a schema's JSON, its fractions as Decimal, and check its limits. Raises GrammarError."""
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise GrammarError(f"is not JSON, or nested deeper than the limit of {MAX_DEPTH}") from None
    level, depth, num_properties = [schema], 0, 0
    while level:
        depth += 1
        dicts = [each for each in level if isinstance(each, dict)]
        num_properties += sum(len(d["properties"]) for d in dicts if isinstance(d.get("properties"), dict))
        level = [v for d in dicts for v in d.values()] + [v for each in level if isinstance(each, list) for v in each]
        level = [each for each in level if isinstance(each, dict | list)]
        if depth > MAX_DEPTH:
            raise GrammarError(f"is nested deeper than the limit of {MAX_DEPTH}")
    if num_properties > MAX_PROPERTIES:
        raise GrammarError(f"has {num_properties} properties; the limit is {MAX_PROPERTIES}")
    return schema


def _no_number(name: str) -> Any:
    raise ValueError(name)


def at(where: str, problem: str) -> GrammarError:
    """Return the error for a problem at a path in the schema."""
    return GrammarError(f"at {where[:100]} {problem}")


def check(schema: Any, where: str) -> list[str]:
    """Return a schema's keywords that cannot be enforced. Raises GrammarError for a value with a wrong shape."""
    if not isinstance(schema, dict):
        raise at(where, f"has {shown(schema)} where a schema should be")
    for keyword, value in schema.items():
        if keyword in _SHAPE_OF:
            wanted, fits = _SHAPE_OF[keyword]
            if not fits(value):
                raise at(where, f"has {keyword!r} as {shown(value)}; it should be {wanted}")
        if keyword == "enum" and (size := len(dumped(value))) > MAX_ENUM_BYTES:
            raise at(where, f"has an 'enum' of {size} bytes; the limit is {MAX_ENUM_BYTES} bytes")
    harmless = {keyword for keyword in ("not", "$recursiveAnchor") if schema.get(keyword) is False}
    return [keyword for keyword in schema if keyword in REFUSED and keyword not in harmless]


# ---- values ----------------------------------------------------------------------------------------------------------


def type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case Decimal():
            return "integer" if value == value.to_integral_value() else "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def dumped(value: Any) -> str:
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False, default=str)


def key_of(value: Any) -> str:
    """Return a key that equal values of JSON Schema share: 1 and 1.0, objects in any order."""
    match value:
        case bool() | None | str():
            return encode_basestring(value) if isinstance(value, str) else str(value)
        case int() | Decimal():
            sign, digits, exponent = Decimal(value).as_tuple()
            text = "".join(map(str, digits)).lstrip("0")
            short = text.rstrip("0")
            return f"{'-' * sign}{short}e{int(exponent) + len(text) - len(short)}" if short else "0"
        case list():
            return "[" + ",".join([key_of(item) for item in value]) + "]"
    return (
        "{" + ",".join(sorted([f"{encode_basestring(name)}:{key_of(member)}" for name, member in value.items()])) + "}"
    )
