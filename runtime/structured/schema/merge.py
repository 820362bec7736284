"""Normal schemas, and the normal schema of the values that fit two."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Protocol

from runtime.structured.rules import Terminal
from runtime.structured.schema.formats import FORMATS
from runtime.structured.schema.keywords import Schema, at, key_of

_MAX_OPTIONS = 500  # options in one anyOf, after allOf has multiplied it


class NormalSchema(dict[str, Any]):
    """A schema with plain keywords and `anyOf` only. `type` and `pattern` are lists: any type fits, all patterns do."""


class TerminalChecks(Protocol):
    """Facts about terminals that only an engine can compute. Raises GrammarError at a limit."""

    def fits(self, terminal: Terminal) -> bool:
        """Return True if any text matches."""

    def matches(self, expression: str, text: str) -> bool:
        """Return True if a text matches an expression of JSON strings."""


class Normalizer(Protocol):
    """SchemaNormalizer's operations (normalize.py) that other files in this folder use."""

    checks: TerminalChecks

    def cannot(self, where: str, keyword: str, problem: str = "") -> None: ...

    def normalize(self, schema: Any, where: str) -> NormalSchema | None: ...

    def options(self, schema: NormalSchema, where: str) -> list[NormalSchema]: ...


def all_of(a: Any, b: Any) -> Any:
    """Return a schema of the values that fit both."""
    if a is True or b is False or a == b:
        return b
    return a if b is True or a is False else {"allOf": [a, b]}


def with_integers(types: Iterable[str]) -> list[str]:
    """Return types with "integer" added if "number" is there: an integer is a number."""
    types = list(types)
    return [*types, "integer"] if "number" in types else types


def without_key(schema: NormalSchema, keyword: str) -> NormalSchema:
    return NormalSchema((k, v) for k, v in schema.items() if k != keyword)


def merged(a: NormalSchema | None, b: NormalSchema | None, where: str) -> NormalSchema | None:
    """Return the normal schema for values that fit both; None if one fits nothing. Raises GrammarError."""
    if not a or not b:
        return b if a == {} else a if b == {} else None
    result = NormalSchema(a | b)
    for keyword in a.keys() & b.keys():
        result[keyword] = _merged_keyword(keyword, a[keyword], b[keyword], where, result[keyword])
    if a.get("format", b.get("format")) != b.get("format", a.get("format")):
        result["pattern"] = [*result.get("pattern", ()), f"^(?:{FORMATS[a['format']]})$"]
    for keyword in result.keys() & {"properties", "patternProperties"}:
        result[keyword] = _merged_properties(keyword, a, b)
    if "prefixItems" in result:
        result["prefixItems"] = _merged_tuples(a, b)
    return result


def _merged_keyword(keyword: str, one: Any, other: Any, where: str, default: Any) -> Any:
    match keyword:
        case "type":
            common = [t for t in one if t in with_integers(other)] + [t for t in other if t in with_integers(one)]
            return list(dict.fromkeys(common))
        case "enum":
            keys = set(map(key_of, other))
            return [value for value in one if key_of(value) in keys]
        case "anyOf":
            pairs = [{"allOf": [x, y]} for x in one for y in other]
            if len(pairs) > _MAX_OPTIONS:
                raise at(where, f"multiplies its 'anyOf' to {len(pairs)} options; the limit is {_MAX_OPTIONS}")
            return pairs
        case "required" | "pattern":
            return list(dict.fromkeys([*one, *other]))
        case "multipleOf":
            return _common_multiple(one, other)
        case "items" | "additionalProperties" | "propertyNames":
            return all_of(one, other)
        case _ if keyword.startswith(("min", "exclusiveMin")):
            return max(one, other)
        case _ if keyword.startswith(("max", "exclusiveMax")):
            return min(one, other)
    return default


def _merged_properties(keyword: str, a: Schema, b: Schema) -> Schema:
    """A property that one schema lists fits the other schema's rule for free names, too."""
    free_a, free_b = (s.get("additionalProperties", True) for s in (a, b))
    in_a, in_b = a.get(keyword, {}), b.get(keyword, {})
    return {name: all_of(in_a.get(name, free_a), in_b.get(name, free_b)) for name in {**in_a, **in_b}}


def _merged_tuples(a: Schema, b: Schema) -> list[Any]:
    items_a, items_b = a.get("prefixItems", []), b.get("prefixItems", [])
    rest_a, rest_b = a.get("items", True), b.get("items", True)
    return [
        all_of(items_a[i] if i < len(items_a) else rest_a, items_b[i] if i < len(items_b) else rest_b)
        for i in range(max(len(items_a), len(items_b)))
    ]


def _common_multiple(a: int | Decimal, b: int | Decimal) -> int | Decimal:
    one, other = Fraction(a), Fraction(b)
    common = Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
    return common.numerator if common.denominator == 1 else Decimal(common.numerator) / Decimal(common.denominator)
