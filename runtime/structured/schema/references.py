"""`$ref` within a schema: "#", a JSON pointer, an `$anchor` or the document's own `$id` before one of these.

Nothing is fetched. A schema within the document that has an `$id` changes what its references mean, so these are
refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from runtime.structured.pattern import shown
from runtime.structured.schema.keywords import at

_IDS = ("$id", "id")  # `id` until draft 4
_ANCHORS = ("$anchor", "$dynamicAnchor")
_DATA = ("const", "enum", "default", "examples", "example")  # their values are data


def pointed(root: Any, pointer: str, where: str) -> Any:
    """Return the schema that a reference of the form `#/...` leads to. Raises GrammarError."""
    found = root
    try:
        for step in pointer[1:].split("/")[1:]:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            found = found[int(step)] if isinstance(found, list) else found[step]
    except (LookupError, ValueError, TypeError):
        raise at(where, f"has the '$ref' {shown(pointer)}, which leads nowhere") from None
    return found


def with_pointers(root: Any) -> Any:
    """Rewrite each `$ref` of a document as a JSON pointer from its root. Raises GrammarError."""
    schemas = list(_walk(root, "#"))
    anchors = {f"#{s[key]}": where for s, where in schemas for key in _ANCHORS if isinstance(s.get(key), str)}
    anchors |= {name: where for s, where in schemas if (name := _id_of(s)).startswith("#")}  # until draft 7
    inner = [where for s, where in schemas[1:] if not _id_of(s).startswith(("#", "!"))]
    own = _id_of(root).removesuffix("#") if isinstance(root, dict) else ""
    for schema, where in schemas:
        if not isinstance(ref := schema.get("$ref"), str):
            continue
        if any(where == place or where.startswith(f"{place}/") for place in inner):
            raise at(where, "has a '$ref' in a schema with an '$id', which is supported at the root only")
        if (local := _local(own, ref)) is None:
            raise at(where, f"has the '$ref' {shown(ref)}; only references within the schema are supported")
        if local != "#" and not local.startswith("#/") and local not in anchors:
            raise at(where, f"has the '$ref' {shown(ref)}, which leads nowhere")
        schema["$ref"] = anchors.get(local, local)
    return root


def _local(own: str, ref: str) -> str | None:
    """Return a reference without the document's own address; None if it leads elsewhere."""
    if ref.startswith("#") or not ref:
        return ref or "#"
    try:
        address, fragment = urldefrag(urljoin(own, ref))
    except ValueError:
        return None
    return f"#{fragment}" if address == own else None


def _id_of(schema: dict[str, Any]) -> str:
    """Return a schema's `$id`; "!" if it has none."""
    return next((schema[key] for key in _IDS if isinstance(schema.get(key), str)), "!")


def _walk(value: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the schemas of a document, and every other object that may be one, each with its pointer."""
    todo = [(value, where, False)]
    while todo:
        value, where, is_map = todo.pop()  # a map's keys are property names and the like
        if isinstance(value, list):
            todo += [(each, f"{where}/{i}", False) for i, each in enumerate(value)]
        if not isinstance(value, dict):
            continue
        if not is_map:
            yield value, where
        for key, each in value.items():
            if is_map or key not in _DATA:
                step = key.replace("~", "~0").replace("/", "~1").replace("%", "%25")
                todo.append((each, f"{where}/{step}", not is_map and key in _MAPS))


_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies")
