"""`$ref` within a document: every reference is written anew as a JSON pointer from the document's root.

`$id` gives a schema an address that the references below it start from, `$anchor` gives it a name; draft 4 has `id` for
both. Nothing is ever fetched: what is not in the document leads nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from runtime.structured.pattern import shown
from runtime.structured.schema.keywords import at, is_schema

_SCHEMAS = (
    *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "contentSchema"),
)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
_OLD = re.compile(r"draft-0[34]\b")
_REF_ALONE = re.compile(r"draft-0[34567]\b")  # beside `$ref` nothing else counts
_POINTER = re.compile(r"#(/.*)?")


def pointed(root: Any, pointer: str, where: str) -> Any:
    """The schema to which a reference of the form `#/...` points."""
    found = root
    try:
        for step in pointer[1:].split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            found = found[int(step)] if isinstance(found, list) else found[step]
    except (LookupError, ValueError, TypeError):
        raise at(where, f"has the '$ref' {shown(pointer)}, which leads nowhere") from None
    return found


def with_pointers(root: Any) -> Any:
    """`root`, in which each `$ref` that can be resolved begins with "#" and counts from the root."""
    if isinstance(root, dict):
        _Document(root).rewrite()
    return root


class _Document:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        draft = root.get("$schema")
        self._id = "id" if isinstance(draft, str) and _OLD.search(draft) else "$id"
        self._ref_alone = bool(_REF_ALONE.search(draft)) if isinstance(draft, str) else None
        self._places: dict[str, str] = {}  # by address, with or without an anchor: pointers from the root
        self._visited: set[int] = set()
        self._references: list[tuple[dict[str, Any], str, str]] = []  # schemas with $ref, their bases and pointers
        self._places[""] = "#"
        self._visit(root, "", "#")

    def rewrite(self) -> None:
        while self._references:
            schema, base, where = self._references.pop()
            ref = schema["$ref"]
            address, fragment = urldefrag(_joined(base, ref))
            is_anchor = fragment != "" and not fragment.startswith("/")
            place = self._places.get(f"{address}#{fragment}" if is_anchor else address)
            if place is None:
                known = address in self._places
                problem = ", which leads nowhere" if known else "; only references within the schema are supported"
                raise at(where, f"has the '$ref' {shown(ref)}{problem}")
            place += "" if is_anchor else fragment
            schema["$ref"] = place
            target = pointed(self._root, place, where)
            if is_schema(target) and id(target) not in self._visited:  # beneath a keyword that no draft defines
                self._visit(target, address, place)

    def _visit(self, schema: Any, base: str, where: str) -> None:
        todo = [(schema, base, where)]
        while todo:
            schema, base, where = todo.pop()
            if not isinstance(schema, dict) or id(schema) in self._visited:
                continue
            has_ref = isinstance(schema.get("$ref"), str)
            name = schema.get(self._id)
            if isinstance(name, str) and has_ref and self._ref_alone is None and where != "#":
                raise at(
                    where, "has '$id' beside '$ref', which drafts read in two ways; say which draft it is in $schema"
                )
            if isinstance(name, str) and not (has_ref and self._ref_alone):
                address, anchor = urldefrag(_joined(base, name))
                if anchor and name.startswith("#"):
                    self._places.setdefault(f"{base}#{anchor}", where)
                else:
                    base = address
                    self._places.setdefault(base, where)
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(named := schema.get(keyword), str):
                    self._places.setdefault(f"{base}#{named}", where)
            self._visited.add(id(schema))
            if has_ref:
                self._references.append((schema, base, where))
            todo += [(each, base, f"{where}/{step}") for step, each in _below(schema)]


def _joined(base: str, reference: str) -> str:
    """`urljoin`, which does not know that a fragment alone stays where it is whatever the scheme is."""
    if reference.startswith("#") or not reference:
        return base + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _below(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword, value in schema.items():
        if keyword in _SCHEMAS and isinstance(value, dict):
            yield keyword, value
        elif keyword in _LISTS and isinstance(value, list):
            yield from ((f"{keyword}/{i}", each) for i, each in enumerate(value))
        elif keyword in _MAPS and isinstance(value, dict):
            yield from ((f"{keyword}/{_step(name)}", each) for name, each in value.items())


def _step(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1").replace("%", "%25")
