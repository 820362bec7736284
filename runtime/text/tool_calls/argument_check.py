"""Checks whether arguments fit the JSON Schema of a function, in bounded time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

_MAX_CHECKS = 10_000  # schemas applied to values; a hostile schema would need far more
_TYPES = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", type(None): "null"}
_RANGES: tuple[tuple[str, str, Any, Callable[[Any], float]], ...] = (
    ("minLength", "maxLength", str, len),
    ("minItems", "maxItems", list, len),
    ("minProperties", "maxProperties", dict, len),
    ("minimum", "maximum", int | float, lambda value: value),
)


def fits(value: Any, schema: Any) -> bool:
    """Return True if a JSON value fits a schema. Keywords that this file does not have assert nothing."""
    try:
        return _Check(schema).fits(value, schema)
    except RecursionError:
        return False


class _Check:
    def __init__(self, root: Any) -> None:
        self._root, self._num_left = root, _MAX_CHECKS

    def fits(self, value: Any, schema: Any) -> bool:
        self._num_left -= 1
        if self._num_left < 0 or schema is False:
            return False
        if not isinstance(schema, Mapping):
            return True
        if "$ref" in schema and not self.fits(value, self._referred(schema["$ref"])):
            return False
        kinds, values = schema.get("type"), schema.get("enum", [schema["const"]] if "const" in schema else None)
        if kinds and not _is_of([kinds] if isinstance(kinds, str) else kinds, value):
            return bool(schema.get("nullable") and value is None)
        if isinstance(values, list) and _key(value) not in map(_key, values):
            return False
        for least, most, kind, size in _RANGES:
            if isinstance(value, kind) and not isinstance(value, bool):
                low, high = _number(schema.get(least), -math.inf), _number(schema.get(most), math.inf)
                if not low <= size(value) <= high:
                    return False
        options = {name: _list(schema, name) for name in ("allOf", "anyOf", "oneOf")}
        if not all(self.fits(value, option) for option in options["allOf"]):
            return False
        if any(some and not any(self.fits(value, o) for o in some) for some in (options["anyOf"], options["oneOf"])):
            return False
        if isinstance(value, dict):
            return self._object_fits(value, schema)
        if isinstance(value, list):
            first = _list(schema, "prefixItems")
            others = all(self.fits(each, schema.get("items", True)) for each in value[len(first) :])
            return others and all(self.fits(each, of) for each, of in zip(value, first, strict=False))
        return True

    def _object_fits(self, members: dict[str, Any], schema: Mapping[str, Any]) -> bool:
        if not all(name in members for name in _list(schema, "required")):
            return False
        given = schema.get("properties")
        given = given if isinstance(given, Mapping) else {}
        others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
        return all(self.fits(value, given.get(name, others)) for name, value in members.items())

    def _referred(self, pointer: Any) -> Any:
        """Return the schema at a pointer; True for one elsewhere."""
        at = self._root
        for part in str(pointer).removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            at = at.get(name, True) if isinstance(at, Mapping) else True
        return at if str(pointer).startswith("#") else True


def _is_of(kinds: Any, value: Any) -> bool:
    kind = "number" if isinstance(value, float) else _TYPES[type(value)]
    also = "number" if kind == "integer" else "integer" if kind == "number" and value.is_integer() else kind
    return kind in kinds or also in kinds


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    found = schema.get(name)
    return found if isinstance(found, list) else []


def _number(bound: Any, default: float) -> float:
    return bound if isinstance(bound, int | float) else default


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
