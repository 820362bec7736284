"""Schemas made flat: references, allOf, oneOf and the like merged into plain keywords and one anyOf.

What a flat schema allows is what the schema allows, or where said a part of it:

    - a `oneOf` whose objects may both fit is kept apart by a property that tells them apart, which is then there, or by
      one that the one requires and the other then lacks
    - what two schemas say of the same names (`patternProperties`, `additionalProperties`) both holds
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from itertools import combinations
from typing import Any, Protocol

from runtime.structured.pattern import GrammarError, quoted, search, shown, whole, without_lookaheads
from runtime.structured.rules import Terminal
from runtime.structured.schema.formats import FORMATS, RANGES
from runtime.structured.schema.keywords import (
    FLAT,
    TYPES,
    Schema,
    at,
    check,
    key_of,
    type_of,
)
from runtime.structured.schema.references import pointed

_MAX_ONE_OF = 128  # options
_MAX_OPTIONS = 500  # of one anyOf, after allOf has multiplied it
_ADVICE = {"uniqueItems": "it can for items with an enum; "}


class Flat(dict[str, Any]):
    """A schema of plain keywords and anyOf; `type` and `pattern` are lists, of which a text fits one or all."""


class Terms(Protocol):
    """Answers about terminals that only an engine can give. Raises GrammarError if a limit is in the way."""

    def fits(self, terminal: Terminal) -> bool:
        """True if any text matches."""

    def matches(self, expression: str, text: str) -> bool:
        """True if a text matches an expression of JSON strings."""


class Flattener:
    def __init__(self, root: Any, terms: Terms, strict: bool | None, ignored: list[str]) -> None:
        """Keywords that cannot be enforced are refused, or added to `ignored` if `strict` (spec/types.py) allows it."""
        self._root, self.terms, self._strict, self._ignored = root, terms, strict, ignored

    def cannot(self, where: str, keyword: str, problem: str = "") -> None:
        """`keyword` cannot be enforced there: raises GrammarError, or notes that it is ignored."""
        if self._strict is False or (self._strict is None and keyword == "uniqueItems"):
            if (path := f"{where}/{keyword}") not in self._ignored:
                self._ignored.append(path)
            return
        advice = "leave it out, or set strict to false to have it ignored"
        problem = problem or f"has the keyword {shown(keyword)}, which cannot be enforced"
        raise at(where, f"{problem}; {_ADVICE.get(keyword, '')}{advice}")

    def flat(self, schema: Any, where: str, followed: tuple[str, ...] = ()) -> Flat | None:
        """None if nothing is valid."""
        if isinstance(schema, Flat):
            return schema
        if isinstance(schema, bool):
            return Flat() if schema else None
        for keyword in check(schema, where):
            self.cannot(where, keyword)
        parts: list[Flat | None] = [self._own(schema, where)]
        if "const" in schema:
            parts.append(Flat(enum=[schema["const"]]))
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in followed:
                raise at(where, f"has a '$ref' {shown(ref)} that leads to itself")
            parts.append(self.flat(pointed(self._root, ref, where), ref, (*followed, ref)))
        for i, part in enumerate(schema.get("allOf", ())):
            parts.append(self.flat(part, f"{where}/allOf/{i}", followed))
        parts += [Flat(anyOf=options) for options in _dependencies(schema)]
        merged = reduce(lambda a, b: self._merged(a, b, where), parts)
        if "oneOf" in schema and merged is not None:
            merged = self._merged(merged, self._one_of(schema["oneOf"], merged, where), where)
        for keyword, plain in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if keyword in schema and schema[keyword] is not True and merged is not None and plain not in merged:
                if "anyOf" in merged:
                    self.cannot(where, keyword)
                else:
                    merged = Flat({**merged, plain: schema[keyword]})
        return merged

    def _own(self, schema: Schema, where: str) -> Flat:
        """The plain keywords of a schema, as draft 2020-12 writes them."""
        own = Flat((k, v) for k, v in schema.items() if k in FLAT)
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
                return self._merged(own, Flat(minimum=ends[0], maximum=ends[1]), where) or own
        return own

    def options(self, flat: Flat, where: str) -> list[Flat]:
        """The options of its anyOf, each with all else that it says."""
        rest = Flat((k, v) for k, v in flat.items() if k != "anyOf")
        options = (self.flat(option, f"{where}/anyOf/{i}") for i, option in enumerate(flat["anyOf"]))
        return [found for o in options if (found := self._merged(rest, o, where)) is not None]

    # ---- oneOf ------------------------------------------------------------------------------------------------------

    def _one_of(self, options: list[Any], beside: Flat, where: str) -> Flat:
        """As anyOf, where that is the same or can be made so; `beside` is what else holds."""
        if len(options) > _MAX_ONE_OF:
            raise at(where, f"has a 'oneOf' of {len(options)} options; the limit is {_MAX_ONE_OF}")
        beside = Flat((k, v) for k, v in beside.items() if k != "anyOf")
        flat = [
            self._merged(beside, self.flat(option, f"{where}/oneOf/{i}"), where) for i, option in enumerate(options)
        ]
        lacking: list[dict[str, bool]] = [{} for _ in options]
        needed: list[dict[str, None]] = [{} for _ in options]
        for (i, a), (j, b) in combinations(enumerate(flat), 2):
            if a is None or b is None or self.apart(a, b, where):
                continue
            if (tag := self._tag(a, b, where)) is not None:
                needed[i][tag] = needed[j][tag] = None
                continue
            names = [_only(one, other) for one, other in ((a, b), (b, a))]
            if None in names:
                self.cannot(
                    where,
                    "oneOf",
                    f"has a 'oneOf' whose options {i} and {j} may both fit; use anyOf, or a const in each",
                )
            for at_, name in ((i, names[1]), (j, names[0])):
                if name is not None:
                    lacking[at_][name] = False
        narrowed = []
        for option, gone, tags in zip(options, lacking, needed, strict=True):
            also: Schema = {}
            if gone:
                also["properties"] = gone
            if tags:
                also["required"] = list(tags)
            narrowed.append({"allOf": [option, {"type": "object", **also}]} if also else option)
        return Flat(anyOf=narrowed)

    def _tag(self, one: Flat, other: Flat, where: str) -> str | None:
        """A property that tells two objects apart wherever it is there."""
        if not (_is_object(one) and _is_object(other)):
            return None
        names = [name for name in one.get("properties", {}) if name in other.get("properties", {})]
        both_ = ([self.flat(s["properties"][name], where) for s in (one, other)] for name in names)
        return next((name for name, (a, b) in zip(names, both_, strict=False) if self.apart(a, b, where)), None)

    def apart(self, first: Flat | None, second: Flat | None, where: str, depth: int = 4) -> bool:
        """True if certainly no value fits both."""
        if first is None or second is None:
            return True
        if depth == 0:
            return False
        # Some validators take a format for an annotation: two of them tell nothing apart.
        first, second = (Flat((k, v) for k, v in s.items() if k != "format") for s in (first, second))
        for one, other in ((first, second), (second, first)):
            if "anyOf" in one:
                return all(self.apart(option, other, where, depth - 1) for option in self.options(one, where))
        for one, other in ((first, second), (second, first)):
            if "enum" in one:
                return not any(self.admits(other, value, where) for value in one["enum"])
        types = set(widened(first.get("type", TYPES))) & set(widened(second.get("type", TYPES)))
        return all(self._type_apart(type_, first, second, where, depth) for type_ in types)

    def _type_apart(self, type_: str, first: Flat, second: Flat, where: str, depth: int) -> bool:
        match type_:
            case "object":
                return self._objects_apart(first, second, where, depth)
            case "string":
                one, other = (self.string_terms(s, where) for s in (first, second))
                terminal = Terminal((*one.all_of, *other.all_of), (*one.none_of, *other.none_of))
                least = max(first.get("minLength", 0), second.get("minLength", 0))
                most = min(s.get("maxLength", math.inf) for s in (first, second))
                return bool(least > most) or (bool(one.all_of and other.all_of) and not self.terms.fits(terminal))
            case "number" | "integer":
                low, high = (self._numbers(first, second, end, pick) for end, pick in (("min", max), ("max", min)))
                return low is not None and high is not None and bool(low > high)
            case "array":
                least = max(first.get("minItems", 0), second.get("minItems", 0))
                return bool(least > min(s.get("maxItems", math.inf) for s in (first, second)))
        return False

    def _numbers(self, first: Flat, second: Flat, end: str, pick: Callable[..., Any]) -> Any:
        ends = [s[k] for s in (first, second) for k in (f"{end}imum", f"exclusive{end.title()}imum") if k in s]
        return pick(ends) if ends else None

    def _objects_apart(self, first: Flat, second: Flat, where: str, depth: int) -> bool:
        for one, other in ((first, second), (second, first)):
            for name in one.get("required", ()):
                closed = other.get("additionalProperties") is False and not other.get("patternProperties")
                theirs = self.flat(other.get("properties", {}).get(name, not closed), where)
                ours = self.flat(one.get("properties", {}).get(name, True), where)
                needed = theirs is None or name in other.get("required", ())
                if needed and self.apart(ours, theirs, where, depth - 1):
                    return True
        return False

    # ---- allOf ------------------------------------------------------------------------------------------------------

    def _merged(self, a: Flat | None, b: Flat | None, where: str) -> Flat | None:
        """The flat schema of the values that fit both of two."""
        if not a or not b:
            return b if a == {} else a if b == {} else None
        free = [s.get("additionalProperties", True) for s in (a, b)]
        merged = Flat(a | b)
        for keyword in a.keys() & b.keys():
            one, other = a[keyword], b[keyword]
            match keyword:
                case "type":
                    both_ = [t for t in one if t in widened(other)] + [t for t in other if t in widened(one)]
                    merged["type"] = list(dict.fromkeys(both_))
                case "enum":
                    keys = set(map(key_of, other))
                    merged["enum"] = [value for value in one if key_of(value) in keys]
                case "anyOf":
                    pairs = [{"allOf": [x, y]} for x in one for y in other]
                    if len(pairs) > _MAX_OPTIONS:
                        raise at(where, f"multiplies its 'anyOf' to {len(pairs)} options; the limit is {_MAX_OPTIONS}")
                    merged["anyOf"] = pairs
                case "required" | "pattern":
                    merged[keyword] = list(dict.fromkeys([*one, *other]))
                case "multipleOf":
                    merged[keyword] = _common_multiple(one, other)
                case "items" | "additionalProperties" | "propertyNames":
                    merged[keyword] = both(one, other)
                case _ if keyword.startswith(("min", "exclusiveMin")):
                    merged[keyword] = max(one, other)
                case _ if keyword.startswith(("max", "exclusiveMax")):
                    merged[keyword] = min(one, other)
        if a.get("format", b.get("format")) != b.get("format", a.get("format")):
            merged["pattern"] = [*merged.get("pattern", ()), f"^(?:{FORMATS[a['format']]})$"]
        for keyword in merged.keys() & {"properties", "patternProperties"}:
            ours, theirs = (s.get(keyword, {}) for s in (a, b))
            merged[keyword] = {n: both(ours.get(n, free[0]), theirs.get(n, free[1])) for n in {**ours, **theirs}}
        if "prefixItems" in merged:
            rest = [s.get("items", True) for s in (a, b)]
            mine, theirs = a.get("prefixItems", []), b.get("prefixItems", [])
            merged["prefixItems"] = [
                both(mine[i] if i < len(mine) else rest[0], theirs[i] if i < len(theirs) else rest[1])
                for i in range(max(len(mine), len(theirs)))
            ]
        return merged

    # ---- values -----------------------------------------------------------------------------------------------------

    def string_terms(self, flat: Flat, where: str) -> Terminal:
        """The expressions that its patterns and its format ask a text to match; empty where they ask nothing."""
        all_of: list[str] = []
        none_of: list[str] = []
        for pattern in flat.get("pattern", ()):
            try:
                rest, must, must_not = without_lookaheads(pattern)
                all_of += [quoted(search(rest)), *map(quoted, must)]
                none_of += map(quoted, must_not)
            except GrammarError as e:
                self.cannot(where, "pattern", str(e))
        if (name := flat.get("format")) is not None:
            all_of.append(quoted(whole(FORMATS[name])))
        return Terminal(tuple(all_of), tuple(none_of))

    def admits(self, schema: Any, value: Any, where: str) -> bool:
        """True if a value is valid."""
        flat = self.flat(schema, where)
        if flat is None:
            return False
        if "anyOf" in flat and not any(self.admits(option, value, where) for option in self.options(flat, where)):
            return False
        if "enum" in flat and key_of(value) not in set(map(key_of, flat["enum"])):
            return False
        type_ = type_of(value)
        if type_ not in widened(flat.get("type", TYPES)):
            return False
        match value:
            case str():
                terms = self.string_terms(flat, where)
                return (
                    _within(flat, len(value), "Length")
                    and all(self.terms.matches(term, value) for term in terms.all_of)
                    and not any(self.terms.matches(term, value) for term in terms.none_of)
                )
            case bool():
                return True
            case int() | Decimal():
                return _number_within(flat, value)
            case list():
                return self._admits_list(flat, value, where)
            case dict():
                return self._admits_dict(flat, value, where)
        return True

    def _admits_list(self, flat: Flat, values: list[Any], where: str) -> bool:
        schemas = [*flat.get("prefixItems", [])[: len(values)]]
        schemas += [flat.get("items", True)] * (len(values) - len(schemas))
        return (
            _within(flat, len(values), "Items")
            and (not flat.get("uniqueItems") or len(set(map(key_of, values))) == len(values))
            and all(self.admits(schema, value, where) for schema, value in zip(schemas, values, strict=True))
        )

    def _admits_dict(self, flat: Flat, members: Schema, where: str) -> bool:
        if not _within(flat, len(members), "Properties") or not members.keys() >= set(flat.get("required", ())):
            return False
        for name, value in members.items():
            listed = flat.get("properties", {})
            schemas = [listed[name]] if name in listed else []
            for pattern, schema in flat.get("patternProperties", {}).items():
                if self.terms.matches(quoted(search(pattern)), name):
                    schemas.append(schema)
            schemas = schemas or [flat.get("additionalProperties", True)]
            if not all(self.admits(schema, value, where) for schema in schemas):
                return False
            if not self.admits(flat.get("propertyNames", True), name, where):
                return False
        return True


_COUNTS = {f"{end}{of}" for end in ("min", "max") for of in ("Length", "Items", "Properties")}


def _within(flat: Flat, count: int, of: str) -> bool:
    return bool(flat.get(f"min{of}", 0) <= count <= flat.get(f"max{of}", math.inf))


def _number_within(flat: Flat, value: int | Decimal) -> bool:
    if (of := flat.get("multipleOf")) is not None and (of <= 0 or (Fraction(value) / Fraction(of)).denominator != 1):
        return False
    return (
        flat.get("minimum", value) <= value <= flat.get("maximum", value)
        and ("exclusiveMinimum" not in flat or value > flat["exclusiveMinimum"])
        and ("exclusiveMaximum" not in flat or value < flat["exclusiveMaximum"])
    )


def _common_multiple(a: int | Decimal, b: int | Decimal) -> int | Decimal:
    one, other = Fraction(a), Fraction(b)
    common = Fraction(math.lcm(one.numerator, other.numerator), math.gcd(one.denominator, other.denominator))
    return common.numerator if common.denominator == 1 else Decimal(common.numerator) / Decimal(common.denominator)


def _is_object(flat: Flat) -> bool:
    return flat.get("type", ["object"]) == ["object"] and "anyOf" not in flat and "enum" not in flat


def _only(one: Flat, other: Flat) -> str | None:
    """A name that `one` requires and `other` does not, both objects' schemas."""
    if not (_is_object(one) and _is_object(other)):
        return None
    return next((name for name in one.get("required", ()) if name not in other.get("required", ())), None)


def _dependencies(schema: Schema) -> Iterable[list[Any]]:
    """Each as the options that it leaves: the property is not there, or what follows from it holds."""
    found = {**schema.get("dependencies", {}), **schema.get("dependentRequired", {})}
    for name, needed in (*found.items(), *schema.get("dependentSchemas", {}).items()):
        follows = {"required": needed} if isinstance(needed, list) else needed
        yield [{"properties": {name: False}}, follows]


def both(a: Any, b: Any) -> Any:
    """A schema for what fits two."""
    if a is True or b is False or a == b:
        return b
    return a if b is True or a is False else {"allOf": [a, b]}


def widened(types: Iterable[str]) -> list[str]:
    types = list(types)
    return [*types, "integer"] if "number" in types else types
