"""Normalizes schemas: references, `allOf`, `oneOf` and the like become plain keywords and one `anyOf`.

A normal schema allows what the schema allows, or less where one_of.py narrows options. The steps are in
`SchemaNormalizer.normalize`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import Any

from runtime.structured.pattern import shown
from runtime.structured.schema.formats import FORMATS, RANGES
from runtime.structured.schema.keywords import NORMAL_KEYWORDS, Schema, at, check
from runtime.structured.schema.merge import NormalSchema, TerminalChecks, merged, without_key
from runtime.structured.schema.one_of import any_of_one_of
from runtime.structured.schema.references import pointed

_ADVICE = {"uniqueItems": "it can for items with an enum; "}
_COUNTS = {f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties")}


class SchemaNormalizer:
    """Normalizes the schemas of one document."""

    def __init__(self, root: Any, checks: TerminalChecks, strict: bool | None, ignored: list[str]) -> None:
        """Keywords that cannot be enforced are refused, or added to `ignored` if `strict` (base/types.py) permits."""
        self._root, self.checks, self._strict, self._ignored = root, checks, strict, ignored

    def cannot(self, where: str, keyword: str, problem: str = "") -> None:
        """Note that a keyword is ignored, or raise GrammarError because it cannot be enforced."""
        if self._strict is False or (self._strict is None and keyword == "uniqueItems"):
            if (path := f"{where}/{keyword}") not in self._ignored:
                self._ignored.append(path)
            return
        advice = "leave it out, or set strict to false to have it ignored"
        problem = problem or f"has the keyword {shown(keyword)}, which cannot be enforced"
        raise at(where, f"{problem}; {_ADVICE.get(keyword, '')}{advice}")

    def normalize(self, schema: Any, where: str, followed: tuple[str, ...] = ()) -> NormalSchema | None:
        """Return the normal schema; None if nothing fits. Raises GrammarError.

        `followed` has the references that led here."""
        if isinstance(schema, NormalSchema):
            return schema
        if isinstance(schema, bool):
            return NormalSchema() if schema else None
        for keyword in check(schema, where):
            self.cannot(where, keyword)
        parts: list[NormalSchema | None] = [self._own(schema, where)]
        if "const" in schema:
            parts.append(NormalSchema(enum=[schema["const"]]))
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in followed:
                raise at(where, f"has a '$ref' {shown(ref)} that leads to itself")
            parts.append(self.normalize(pointed(self._root, ref, where), ref, (*followed, ref)))
        for i, part in enumerate(schema.get("allOf", ())):
            parts.append(self.normalize(part, f"{where}/allOf/{i}", followed))
        parts += [NormalSchema(anyOf=options) for options in _dependencies(schema)]
        result = reduce(lambda a, b: merged(a, b, where), parts)
        if "oneOf" in schema and result is not None:
            result = merged(result, any_of_one_of(self, schema["oneOf"], result, where), where)
        return self._with_unevaluated(schema, result, where)

    def options(self, schema: NormalSchema, where: str) -> list[NormalSchema]:
        """Return the options of its `anyOf`, each with all other keywords."""
        rest = without_key(schema, "anyOf")
        options = (self.normalize(option, f"{where}/anyOf/{i}") for i, option in enumerate(schema["anyOf"]))
        return [found for o in options if (found := merged(rest, o, where)) is not None]

    def _own(self, schema: Schema, where: str) -> NormalSchema:
        """Return the plain keywords of a schema, as draft 2020-12 writes them."""
        own = NormalSchema((k, v) for k, v in schema.items() if k in NORMAL_KEYWORDS)
        for keyword in own.keys() & {"type", "pattern"}:
            own[keyword] = own[keyword] if isinstance(own[keyword], list) else [own[keyword]]
        for keyword in own.keys() & _COUNTS:
            own[keyword] = int(own[keyword])
        for keyword in own.keys() & {"uniqueItems", "required"}:
            if own[keyword] is False:
                del own[keyword]
        if schema.get("nullable") and "type" in own and "null" not in own["type"]:
            own["type"] = [*own["type"], "null"]
        if isinstance(own.get("items"), list):  # before draft 2020-12
            own["prefixItems"] = own.pop("items")
            if "additionalItems" in schema:
                own["items"] = schema["additionalItems"]
        for end in ("Minimum", "Maximum"):
            if isinstance(is_open := own.get(f"exclusive{end}"), bool):  # draft 4
                del own[f"exclusive{end}"]
                if is_open and end.lower() in own:
                    own[f"exclusive{end}"] = own.pop(end.lower())
        if (name := own.get("format")) is not None and name not in FORMATS:
            del own["format"]
            if (ends := RANGES.get(name)) is not None:
                return merged(own, NormalSchema(minimum=ends[0], maximum=ends[1]), where) or own
        return own

    def _with_unevaluated(self, schema: Schema, result: NormalSchema | None, where: str) -> NormalSchema | None:
        """Add `unevaluatedProperties` and `unevaluatedItems`, which see the properties of all keywords next to them."""
        for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in schema and schema[keyword] is not True and result is not None and plain not in result:
                if "anyOf" in result:
                    self.cannot(where, keyword)
                else:
                    result = NormalSchema({**result, plain: schema[keyword]})
        return result


def _dependencies(schema: Schema) -> Iterable[list[Any]]:
    """Yield the two options of each dependency: the property is absent, or its consequence holds."""
    found = {**schema.get("dependencies", {}), **schema.get("dependentRequired", {})}
    for name, needed in (*found.items(), *schema.get("dependentSchemas", {}).items()):
        consequence = {"required": needed} if isinstance(needed, list) else needed
        yield [{"properties": {name: False}}, consequence]
