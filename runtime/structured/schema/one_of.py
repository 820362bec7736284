"""`oneOf` as `anyOf`: the two are the same where no value fits two options.

Options that share values are narrowed, in this order:

1. A *tag*, a property without a common value in two objects, becomes required in both.
2. A property that one object requires and the other does not becomes forbidden in the other."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from runtime.structured.schema.keywords import TYPES, Schema, at
from runtime.structured.schema.merge import Normalizer, NormalSchema, merged, with_integers, without_key
from runtime.structured.schema.values import admits

_MAX_OPTIONS = 128
_MAX_DEPTH = 4  # nested properties and options, up to which schemas are compared


def any_of_one_of(normalizer: Normalizer, options: list[Any], beside: NormalSchema, where: str) -> NormalSchema:
    """Return the `anyOf` of a `oneOf`; `beside` is what else holds. Raises GrammarError where there is none."""
    if len(options) > _MAX_OPTIONS:
        raise at(where, f"has a 'oneOf' of {len(options)} options; the limit is {_MAX_OPTIONS}")
    beside = without_key(beside, "anyOf")
    normal = [merged(beside, normalizer.normalize(o, f"{where}/oneOf/{i}"), where) for i, o in enumerate(options)]
    forbidden: list[dict[str, bool]] = [{} for _ in options]
    required: list[dict[str, None]] = [{} for _ in options]
    for (i, a), (j, b) in combinations(enumerate(normal), 2):
        if a is None or b is None or disjoint(normalizer, a, b, where):
            continue
        if (tag := _tag(normalizer, a, b, where)) is not None:
            required[i][tag] = required[j][tag] = None
            continue
        only_a, only_b = _required_in_one(a, b), _required_in_one(b, a)
        if only_a is None or only_b is None:
            problem = f"has a 'oneOf' whose options {i} and {j} may both fit; use anyOf, or a const in each"
            normalizer.cannot(where, "oneOf", problem)
        if only_b is not None:
            forbidden[i][only_b] = False
        if only_a is not None:
            forbidden[j][only_a] = False
    narrowed = []
    for option, absent, tags in zip(options, forbidden, required, strict=True):
        also: Schema = {"properties": absent} if absent else {}
        also |= {"required": list(tags)} if tags else {}
        narrowed.append({"allOf": [option, {"type": "object", **also}]} if also else option)
    return NormalSchema(anyOf=narrowed)


def disjoint(
    normalizer: Normalizer, a: NormalSchema | None, b: NormalSchema | None, where: str, depth: int = _MAX_DEPTH
) -> bool:
    """Return True if certainly no value fits both: their types, enums or required properties exclude each other."""
    if a is None or b is None:
        return True
    if depth == 0:
        return False
    for one, other in ((a, b), (b, a)):
        if "anyOf" in one:
            options = normalizer.options(one, where)
            return all(disjoint(normalizer, option, other, where, depth - 1) for option in options)
    for one, other in ((a, b), (b, a)):
        if "enum" in one:  # some validators ignore formats, so a format excludes no value
            return not any(admits(normalizer, without_key(other, "format"), value, where) for value in one["enum"])
    types = set(with_integers(a.get("type", TYPES))) & set(with_integers(b.get("type", TYPES)))
    return types <= {"object"} and (not types or _objects_disjoint(normalizer, a, b, where, depth))


def _objects_disjoint(normalizer: Normalizer, a: NormalSchema, b: NormalSchema, where: str, depth: int) -> bool:
    for one, other in ((a, b), (b, a)):
        is_closed = other.get("additionalProperties") is False and not other.get("patternProperties")
        for name in one.get("required", ()):
            in_one = normalizer.normalize(one.get("properties", {}).get(name, True), where)
            in_other = normalizer.normalize(other.get("properties", {}).get(name, not is_closed), where)
            is_needed = in_other is None or name in other.get("required", ())
            if is_needed and disjoint(normalizer, in_one, in_other, where, depth - 1):
                return True
    return False


def _tag(normalizer: Normalizer, a: NormalSchema, b: NormalSchema, where: str) -> str | None:
    """Return a property of two objects that no value fits in both; None if there is none."""
    if not (_is_object(a) and _is_object(b)):
        return None
    in_a, in_b = a.get("properties", {}), b.get("properties", {})
    for name in in_a:
        if name in in_b and disjoint(
            normalizer, normalizer.normalize(in_a[name], where), normalizer.normalize(in_b[name], where), where
        ):
            return str(name)
    return None


def _required_in_one(one: NormalSchema, other: NormalSchema) -> str | None:
    """Return a property that `one` requires and `other` does not; None if there is none, or one is not of objects."""
    if not (_is_object(one) and _is_object(other)):
        return None
    return next((name for name in one.get("required", ()) if name not in other.get("required", ())), None)


def _is_object(schema: NormalSchema) -> bool:
    return schema.get("type", ["object"]) == ["object"] and "anyOf" not in schema and "enum" not in schema
