"""Decides whether a JSON value fits a schema: for enums, and for names of properties."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

from runtime.structured.pattern import GrammarError, quoted
from runtime.structured.readers.regex import search, whole, without_lookaheads
from runtime.structured.rules import Terminal
from runtime.structured.schema.formats import FORMATS
from runtime.structured.schema.keywords import TYPES, Schema, key_of, type_of
from runtime.structured.schema.merge import Normalizer, NormalSchema, with_integers


def string_terminal(normalizer: Normalizer, schema: NormalSchema, where: str) -> Terminal:
    """Return the expressions of a schema's patterns and format; a terminal without any if it has neither."""
    all_of: list[str] = []
    none_of: list[str] = []
    for pattern in schema.get("pattern", ()):
        try:
            rest, must, must_not = without_lookaheads(pattern)
            all_of += [quoted(search(rest)), *map(quoted, must)]
            none_of += map(quoted, must_not)
        except GrammarError as e:
            normalizer.cannot(where, "pattern", str(e))
    if (name := schema.get("format")) is not None:
        all_of.append(quoted(whole(FORMATS[name])))
    return Terminal(tuple(all_of), tuple(none_of))


def admits(normalizer: Normalizer, schema: Any, value: Any, where: str) -> bool:
    """Return True if a value fits a schema. Raises GrammarError if that cannot be decided."""
    normal = normalizer.normalize(schema, where)
    if normal is None:
        return False
    if "anyOf" in normal and not any(admits(normalizer, o, value, where) for o in normalizer.options(normal, where)):
        return False
    if "enum" in normal and key_of(value) not in set(map(key_of, normal["enum"])):
        return False
    if type_of(value) not in with_integers(normal.get("type", TYPES)):
        return False
    match value:
        case str():
            terminal, matches = string_terminal(normalizer, normal, where), normalizer.checks.matches
            return (
                _is_within(normal, len(value), "Length")
                and all(matches(expression, value) for expression in terminal.all_of)
                and not any(matches(expression, value) for expression in terminal.none_of)
            )
        case bool() | None:
            return True
        case int() | Decimal():
            return _number_fits(normal, value)
        case list():
            return _list_fits(normalizer, normal, value, where)
    return _object_fits(normalizer, normal, value, where)


def _is_within(schema: NormalSchema, count: int, of: str) -> bool:
    return bool(schema.get(f"min{of}", 0) <= count <= schema.get(f"max{of}", math.inf))


def _number_fits(schema: NormalSchema, value: int | Decimal) -> bool:
    if (of := schema.get("multipleOf")) is not None and (of <= 0 or (Fraction(value) / Fraction(of)).denominator != 1):
        return False
    return (
        schema.get("minimum", value) <= value <= schema.get("maximum", value)
        and ("exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"])
        and ("exclusiveMaximum" not in schema or value < schema["exclusiveMaximum"])
    )


def _list_fits(normalizer: Normalizer, schema: NormalSchema, values: list[Any], where: str) -> bool:
    items = [*schema.get("prefixItems", [])[: len(values)]]
    items += [schema.get("items", True)] * (len(values) - len(items))
    return (
        _is_within(schema, len(values), "Items")
        and (not schema.get("uniqueItems") or len(set(map(key_of, values))) == len(values))
        and all(admits(normalizer, item, value, where) for item, value in zip(items, values, strict=True))
    )


def _object_fits(normalizer: Normalizer, schema: NormalSchema, members: Schema, where: str) -> bool:
    if not _is_within(schema, len(members), "Properties") or not members.keys() >= set(schema.get("required", ())):
        return False
    for name, value in members.items():
        listed = schema.get("properties", {})
        matching = [listed[name]] if name in listed else []
        for pattern, pattern_schema in schema.get("patternProperties", {}).items():
            if normalizer.checks.matches(quoted(search(pattern)), name):
                matching.append(pattern_schema)
        matching = matching or [schema.get("additionalProperties", True)]
        if not all(admits(normalizer, each, value, where) for each in matching):
            return False
        if not admits(normalizer, schema.get("propertyNames", True), name, where):
            return False
    return True
