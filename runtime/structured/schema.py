"""JSON Schema (draft 2020-12) to rules: what can be enforced exactly, and everything else refused by name.

A schema is first made flat (references, allOf and constants merged into plain keywords), then written as rules, each
distinct schema once, so that recursion becomes recursion. What comes out is always valid; it is a part of what is valid
where JSON leaves freedom that a model is not asked to use:

    - properties come in the order of the schema, then `required` names that it does not list, then free names
    - an object with `properties` or `patternProperties` has no others, unless `additionalProperties` says so
    - where `type` is missing and all other keywords are about one type, it is that type
    - white space is at most one space after each "," and ":"
    - characters are themselves in strings, and escaped only where JSON demands it; numbers: see numbers.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from decimal import Decimal
from functools import reduce
from itertools import combinations, groupby
from typing import Any

from runtime.structured import numbers
from runtime.structured.formats import FORMATS
from runtime.structured.pattern import (
    ALL,
    ANY_TEXT,
    MAX_REPEAT,
    Chars,
    GrammarError,
    Times,
    literal_string,
    literal_text,
    quoted,
    search,
    shown,
    whole,
)
from runtime.structured.rules import NEVER, NOTHING, Name, Rule, Terminal, choice, optional, repeat, row, terminal

MAX_BYTES = 262_144
MAX_DEPTH = 64  # brackets within brackets
MAX_PROPERTIES = 500  # in all
MAX_ENUM_BYTES = 65_536  # of one enum
MAX_RULES = 10_000
_MAX_ONE_OF = 64  # options
_MAX_OPTIONS = 500  # of one anyOf, after allOf has multiplied it

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_ABOUT = {
    "object": ("properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type")
_OF_DOCUMENTS = ("$schema", "$id", "$comment", "$anchor", "$defs", "definitions", "title", "description", "default")
_OF_USES = ("examples", "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "discriminator")
ANNOTATIONS = frozenset((*_OF_DOCUMENTS, *_OF_USES))
_HARMLESS = {"uniqueItems": False, "nullable": False}  # of keywords that are not supported, the values that ask nothing
KEYWORDS = frozenset(_APPLICATORS).union(*_ABOUT.values())

_COMMA, _COLON = terminal(",\\x{20}?"), terminal(":\\x{20}?")

Schema = dict[str, Any]


class _Flat(dict[str, Any]):
    """A schema of plain keywords and anyOf; `type` and `pattern` are lists, of which a text fits one or all."""


def parse(text: str) -> Any:
    """A schema's JSON with its limits checked; numbers with a point or an exponent are Decimal."""
    try:
        schema = json.loads(text, parse_float=Decimal, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise GrammarError(f"is no JSON, or nested deeper than the limit of {MAX_DEPTH}") from None
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


def rules_of(root: Any, fits: Callable[[Terminal], bool], schema: Any = None, prefix: str = "") -> dict[str, Rule]:
    """The rules of a parsed schema, by default the root; the first one is `prefix` + "start". Raises GrammarError.

    `fits` tells whether any text matches an intersection of terminals."""
    return _Writer(root, fits, prefix).write(root if schema is None else schema)


class _Writer:
    def __init__(self, root: Any, fits: Callable[[Terminal], bool], prefix: str) -> None:
        self._root, self._fits, self._prefix = root, fits, prefix
        self._rules: dict[str, Rule] = {}
        self._names: dict[str, str] = {}  # of rules, by their schema
        self._todo: list[tuple[str, Any, str]] = []

    def write(self, schema: Any) -> dict[str, Rule]:
        self._rules[f"{self._prefix}start"] = self._rule(schema, "#")
        while self._todo:
            name, schema, where = self._todo.pop()
            self._rules[name] = self._written(schema, where)
        return self._rules

    def _rule(self, schema: Any, where: str) -> Rule:
        """A rule for `schema`, to be written later."""
        key = _key(schema, in_order=True)
        if key not in self._names:
            if len(self._names) > MAX_RULES:
                raise _too_large()
            self._names[key] = f"{self._prefix}r{len(self._names)}"
            self._todo.append((self._names[key], schema, where))
        return Name(self._names[key])

    def _named(self, rule: Rule) -> Rule:
        """`rule` in a form that may be used twice."""
        if isinstance(rule, Name) or rule in (NOTHING, NEVER):
            return rule
        if len(self._rules) > MAX_RULES:
            raise _too_large()
        name = f"{self._prefix}p{len(self._rules)}"
        self._rules[name] = rule
        return Name(name)

    def _written(self, schema: Any, where: str) -> Rule:
        flat = self._flat(schema, where)
        if flat is None:
            return NEVER
        if "anyOf" in flat:
            return choice(self._rule(option, where) for option in self._options(flat, where))
        types = flat.get("type", _TYPES)
        if "enum" in flat:
            if others := flat.keys() - {"enum", "type"}:
                raise _at(where, f"has {min(others)!r} beside 'enum' or 'const'; keep only the values that fit it")
            return choice(_value(value) for value in flat["enum"] if _type_of(value) in _widened(types))
        about = [kind for kind, keywords in _ABOUT.items() if flat.keys() & set(keywords)]
        if "type" not in flat and len(about) == 1:
            types = about
        writers = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": _number,
            "integer": _number,
            "boolean": lambda *_: terminal("(?:true|false)"),
            "null": lambda *_: terminal("null"),
        }
        if "number" in types:
            types = [t for t in types if t != "integer"]
        return choice(writers[t]({**flat, "type": t}, where) for t in types)

    def _options(self, flat: _Flat, where: str) -> list[_Flat]:
        """The options of its anyOf, each with all else that it says."""
        rest = _Flat((k, v) for k, v in flat.items() if k != "anyOf")
        options = (self._flat(option, f"{where}/anyOf/{i}") for i, option in enumerate(flat["anyOf"]))
        return [found for o in options if (found := self._merged(rest, o, where)) is not None]

    # ---- flattening -------------------------------------------------------------------------------------------------

    def _flat(self, schema: Any, where: str, followed: tuple[str, ...] = ()) -> _Flat | None:
        """`schema` without references, allOf, oneOf, const and annotations; None if nothing is valid."""
        if isinstance(schema, _Flat):
            return schema
        if isinstance(schema, bool):
            return _Flat() if schema else None
        _check(schema, where)
        own = _Flat((k, v) for k, v in schema.items() if k in KEYWORDS - {"$ref", "allOf", "oneOf", "const"})
        for keyword in own.keys() & {"type", "pattern"}:
            own[keyword] = own[keyword] if isinstance(own[keyword], list) else [own[keyword]]
        parts: list[_Flat | None] = [own]
        if "const" in schema:
            parts.append(_Flat(enum=[schema["const"]]))
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in followed:
                raise _at(where, f"has a '$ref' {shown(ref)} that leads to itself")
            parts.append(self._flat(self._target(ref, where), ref, (*followed, ref)))
        for i, part in enumerate(schema.get("allOf", ())):
            parts.append(self._flat(part, f"{where}/allOf/{i}", followed))
        if "oneOf" in schema:
            parts.append(self._one_of(schema["oneOf"], where))
        return reduce(lambda a, b: self._merged(a, b, where), parts)

    def _target(self, ref: str, where: str) -> Any:
        if not ref.startswith("#"):
            raise _at(where, f"has the '$ref' {shown(ref)}; only references within the schema (#/...) are supported")
        found = self._root
        try:
            for step in ref[1:].split("/"):
                if found is not self._root or step:
                    step = step.replace("~1", "/").replace("~0", "~")
                    found = found[int(step)] if isinstance(found, list) else found[step]
        except (LookupError, ValueError, TypeError):
            raise _at(where, f"has the '$ref' {shown(ref)}, which leads nowhere") from None
        return found

    def _one_of(self, options: list[Any], where: str) -> _Flat:
        """As anyOf, where that is the same."""
        if len(options) > _MAX_ONE_OF:
            raise _at(where, f"has a 'oneOf' of {len(options)} options; the limit is {_MAX_ONE_OF}")
        flat = [self._flat(option, f"{where}/oneOf/{i}") for i, option in enumerate(options)]
        for (i, a), (j, b) in combinations(enumerate(flat), 2):
            if not self._apart(a, b, where):
                raise _at(where, f"has a 'oneOf' whose options {i} and {j} may both fit; use anyOf, or a const in each")
        return _Flat(anyOf=options)

    def _apart(self, first: _Flat | None, second: _Flat | None, where: str, depth: int = 4) -> bool:
        """Whether certainly nothing fits both."""
        if first is None or second is None:
            return True
        if depth == 0:
            return False
        for one, other in ((first, second), (second, first)):
            if "anyOf" in one:
                return all(self._apart(option, other, where, depth - 1) for option in self._options(one, where))
        values = [None if "enum" not in s else {_key(v): _type_of(v) for v in s["enum"]} for s in (first, second)]
        if values[0] is not None and values[1] is not None and not values[0].keys() & values[1].keys():
            return True
        types = [
            set(_widened(s.get("type", _TYPES))) & (_TYPE_SET if v is None else set(_widened(v.values())))
            for s, v in zip((first, second), values, strict=True)
        ]
        if not types[0] & types[1]:
            return True
        if types[0] != {"object"} or types[1] != {"object"} or values != [None, None]:
            return False
        for one, other in ((first, second), (second, first)):
            for name in one.get("required", ()):
                closed = other.get("additionalProperties") is False and not other.get("patternProperties")
                theirs = self._flat(other.get("properties", {}).get(name, not closed), where)
                ours = self._flat(one.get("properties", {}).get(name, True), where)
                needed = theirs is None or name in other.get("required", ())
                if needed and self._apart(ours, theirs, where, depth - 1):
                    return True
        return False

    def _merged(self, a: _Flat | None, b: _Flat | None, where: str) -> _Flat | None:
        """What fits both of two flat schemas."""
        if not a or not b:
            return b if a == {} else a if b == {} else None
        free = [s.get("additionalProperties", True) for s in (a, b)]
        if any("patternProperties" in s for s in (a, b)) and free != [True, True]:
            raise _at(where, "combines 'patternProperties' with 'additionalProperties' of another schema")
        merged = _Flat(a | b)
        for keyword in a.keys() & b.keys():
            one, other = a[keyword], b[keyword]
            match keyword:
                case "type":
                    both = [t for t in one if t in _widened(other)] + [t for t in other if t in _widened(one)]
                    merged["type"] = list(dict.fromkeys(both))
                case "enum":
                    keys = set(map(_key, other))
                    merged["enum"] = [value for value in one if _key(value) in keys]
                case "anyOf":
                    pairs = [{"allOf": [x, y]} for x in one for y in other]
                    if len(pairs) > _MAX_OPTIONS:
                        raise _at(where, f"multiplies its 'anyOf' to {len(pairs)} options; the limit is {_MAX_OPTIONS}")
                    merged["anyOf"] = pairs
                case "required" | "pattern":
                    merged[keyword] = list(dict.fromkeys([*one, *other]))
                case "multipleOf":
                    merged[keyword] = math.lcm(_divisor(one, where), _divisor(other, where))
                case "items" | "additionalProperties":
                    merged[keyword] = _both(one, other)
                case "patternProperties":
                    merged[keyword] = {p: _both(one.get(p, True), other.get(p, True)) for p in {**one, **other}}
                case "format" if one != other:
                    raise _at(where, "combines two values of 'format'")
                case _ if keyword.startswith(("min", "exclusiveMin")):
                    merged[keyword] = max(one, other)
                case _ if keyword.startswith(("max", "exclusiveMax")):
                    merged[keyword] = min(one, other)
        if "properties" in merged:
            names = {**a.get("properties", {}), **b.get("properties", {})}
            merged["properties"] = {
                n: _both(*(s.get("properties", {}).get(n, f) for s, f in zip((a, b), free, strict=True))) for n in names
            }
        if "prefixItems" in merged:
            rest = [s.get("items", True) for s in (a, b)]
            mine, theirs = a.get("prefixItems", []), b.get("prefixItems", [])
            merged["prefixItems"] = [
                _both(mine[i] if i < len(mine) else rest[0], theirs[i] if i < len(theirs) else rest[1])
                for i in range(max(len(mine), len(theirs)))
            ]
        return merged

    # ---- writing ----------------------------------------------------------------------------------------------------

    def _string(self, schema: Schema, where: str) -> Rule:
        least, most = _bounds(schema, "Length", where)
        try:
            all_of = [quoted(search(pattern)) for pattern in schema.get("pattern", ())]
        except GrammarError as e:
            raise _at(where, str(e)) from None
        if (name := schema.get("format")) is not None:
            if name not in FORMATS:
                raise _at(where, f"has the 'format' {shown(name)}; supported are {', '.join(FORMATS)}")
            all_of.append(quoted(whole(FORMATS[name])))
        if least or most is not None or not all_of:
            all_of.append(quoted(Times(Chars(ALL), least, most)))
        return self._fitting(Terminal(tuple(all_of)))

    def _fitting(self, rule: Terminal) -> Rule:
        return rule if (len(rule.all_of) == 1 and not rule.none_of) or self._fits(rule) else NEVER

    def _array(self, schema: Schema, where: str) -> Rule:
        least, most = _bounds(schema, "Items", where)
        first = [self._rule(item, f"{where}/prefixItems/{i}") for i, item in enumerate(schema.get("prefixItems", ()))]
        items = schema.get("items", True)
        others = self._rule(items, f"{where}/items")
        k = len(first)
        rest_least, rest_most = max(least - k, 0), None if most is None else max(most - k, 0)
        rest: Rule
        if items is False or rest_most == 0:
            rest = NEVER if rest_least else NOTHING
        elif k:
            rest = repeat(row(_COMMA, others), rest_least, rest_most)
        else:
            more = repeat(row(_COMMA, others), max(rest_least - 1, 0), None if rest_most is None else rest_most - 1)
            rest = row(others, more) if rest_least else optional(row(others, more))
        for i in reversed(range(k)):
            rest = self._named(row(_COMMA if i else NOTHING, first[i], rest))
            if most is not None and i >= most:
                rest = NOTHING
            elif i >= least:
                rest = optional(rest)
        return row(terminal("\\x{5b}"), rest, terminal("\\x{5d}"))

    def _object(self, schema: Schema, where: str) -> Rule:
        listed: dict[str, Any] = schema.get("properties", {})
        patterns: dict[str, Any] = schema.get("patternProperties", {})
        required = schema.get("required", [])
        free = schema.get("additionalProperties", True)
        keys = {pattern: quoted(search(pattern)) for pattern in patterns}
        matching = {
            name: [p for p, key in keys.items() if self._fits(Terminal((literal_string(name), key)))]
            for name in {**listed, **dict.fromkeys(required)}
        }
        listed = listed | {name: bool(matching[name]) or free for name in required if name not in listed}
        free = False if "additionalProperties" not in schema and (listed or patterns) else free
        members: list[tuple[Rule, bool]] = []
        for name, value in listed.items():
            value = reduce(_both, (patterns[p] for p in matching[name]), value)
            key = terminal(literal_string(name))
            members.append((row(key, _COLON, self._rule(value, f"{where}/properties/{name}")), name in required))
        others = self._free_members(patterns, free, [literal_string(name) for name in listed], where)

        least, most = (schema.get(f"{end}Properties") for end in ("min", "max"))
        least = 0 if least is None or least <= len(set(required)) else least
        if least > 1 and others != NEVER:
            raise _at(where, "has 'minProperties' above its required properties, where names are free to repeat")
        most = None if most is None or (others == NEVER and most >= len(members)) else most
        cap = max(1, least, most or 0)  # members so far are counted up to here
        if cap > MAX_RULES:
            raise _too_large()
        states = [self._named(self._more(others, n, least, most)) for n in range(cap + 1)]  # what may follow n members
        runs = [(must, [member for member, _ in run]) for must, run in groupby(members, key=lambda each: each[1])]
        for must, run in reversed(runs):
            for some in [run] if must else ([member] for member in reversed(run)):
                after = [
                    NEVER
                    if most is not None and n + len(some) > most
                    else row(*_separated(some, n > 0), states[min(n + len(some), cap)])
                    for n in range(cap + 1)
                ]
                states = [self._named(a if must else choice((a, s))) for a, s in zip(after, states, strict=True)]
        return row(terminal("\\x{7b}"), states[0], terminal("\\x{7d}"))

    def _free_members(self, patterns: Schema, free: Any, taken: list[str], where: str) -> Rule:
        """A member whose name is not listed: it matches exactly one pattern, or none where other names are free."""
        keys = [quoted(search(pattern)) for pattern in patterns]
        options = []
        for i, (key, value) in enumerate(zip(keys, patterns.values(), strict=True)):
            apart = tuple(other for j, other in enumerate(keys) if j != i)
            options.append((self._fitting(Terminal((key,), (*taken, *apart))), value, "patternProperties"))
        free_key = Terminal((quoted(ANY_TEXT),), (*taken, *keys))
        options.append((self._fitting(free_key) if keys else free_key, free, "additionalProperties"))
        return choice(
            row(key, _COLON, self._rule(value, f"{where}/{keyword}"))
            for key, value, keyword in options
            if value is not False and key != NEVER
        )

    def _more(self, member: Rule, n: int, least: int, most: int | None) -> Rule:
        """Any number of `member` after `n` others, with their commas."""
        room = None if most is None else max(most - n, 0)
        if member == NEVER or room == 0:
            return NOTHING if n >= least else NEVER
        if n:
            return repeat(row(_COMMA, member), 0, room)
        some = row(member, repeat(row(_COMMA, member), 0, None if room is None else room - 1))
        return some if least else optional(some)


def _too_large() -> GrammarError:
    return GrammarError(f"makes more than {MAX_RULES} rules, the limit; make it smaller")


# ---- keywords --------------------------------------------------------------------------------------------------------


def _at(where: str, problem: str) -> GrammarError:
    return GrammarError(f"at {where[:100]} {problem}")


_TYPE_SET = frozenset(_TYPES)
_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "number": ("a number", lambda v: isinstance(v, int | Decimal) and not isinstance(v, bool) and math.isfinite(v)),
    "count": ("a whole number from 0 on", lambda v: type(v) is int and v >= 0),
    "text": ("a text", lambda v: isinstance(v, str)),
    "schema": ("a schema", lambda v: isinstance(v, dict | bool)),
    "schemas": ("a list of schemas", lambda v: isinstance(v, list) and bool(v) and all(map(_is_schema, v))),
    "map": ("an object of schemas", lambda v: isinstance(v, dict) and all(map(_is_schema, v.values()))),
    "names": ("a list of texts", lambda v: isinstance(v, list) and all(isinstance(n, str) for n in v)),
    "values": ("a list of values", lambda v: isinstance(v, list)),
    "types": (
        f"one of {', '.join(_TYPES)}, or a list of them",
        lambda v: bool(v) and all(isinstance(t, str) and t in _TYPE_SET for t in (v if isinstance(v, list) else [v])),
    ),
}
_SHAPE_OF = {
    **dict.fromkeys(_ABOUT["number"], "number"),
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), "count"),
    **dict.fromkeys(("pattern", "format", "$ref"), "text"),
    **dict.fromkeys(("items", "additionalProperties"), "schema"),
    **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), "schemas"),
    **dict.fromkeys(("properties", "patternProperties"), "map"),
    "required": "names",
    "enum": "values",
    "type": "types",
}


def _is_schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _check(schema: Any, where: str) -> None:
    """Raises GrammarError for a keyword that is not supported, or whose value is none that it may have."""
    if not isinstance(schema, dict):
        raise _at(where, f"has {shown(schema)} where a schema should be")
    for keyword, value in schema.items():
        if keyword in ANNOTATIONS or keyword.startswith("x-") or _HARMLESS.get(keyword) is value is False:
            continue
        if keyword not in KEYWORDS:
            raise _at(where, f"has the keyword {shown(keyword)}, which is not supported; leave it out")
        if keyword in _SHAPE_OF:
            wanted, fits = _SHAPES[_SHAPE_OF[keyword]]
            if not fits(value):
                raise _at(where, f"has {keyword!r} as {shown(value)}; it should be {wanted}")
        if keyword == "enum" and (size := len(_dumped(value))) > MAX_ENUM_BYTES:
            raise _at(where, f"has an 'enum' of {size} bytes; the limit is {MAX_ENUM_BYTES} bytes")


def _bounds(schema: Schema, of: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    for name, count in ((f"min{of}", least), (f"max{of}", most or 0)):
        if count > MAX_REPEAT:
            raise _at(where, f"has {name!r} as {count}; the limit is {MAX_REPEAT} repetitions")
    if most is not None and least > most:
        raise _at(where, f"has min{of} {least} above max{of} {most}, so nothing fits")
    return least, most


def _divisor(value: int | Decimal, where: str) -> int:
    if value != int(value) or value <= 0:
        raise _at(where, f"has 'multipleOf' as {shown(value)}; only whole numbers from 1 on are supported")
    return int(value)


def _number(schema: Schema, where: str) -> Rule:
    low, low_open = schema.get("minimum"), False
    high, high_open = schema.get("maximum"), False
    if (bound := schema.get("exclusiveMinimum")) is not None and (low is None or bound >= low):
        low, low_open = bound, True
    if (bound := schema.get("exclusiveMaximum")) is not None and (high is None or bound <= high):
        high, high_open = bound, True
    for name, bound in (("minimum", low), ("maximum", high)):
        if bound is not None and bound and not -9 <= Decimal(bound).adjusted() <= 17:
            raise _at(where, f"has a {name} of {shown(bound)}; supported are 0 and sizes from 1e-9 to 1e17")
    if schema["type"] == "number" and "multipleOf" not in schema:
        if low is None and high is None:
            return terminal(numbers.NUMBER)
        ends = [None if bound is None else Decimal(bound) for bound in (low, high)]
        found = numbers.decimals(ends[0], ends[1], low_open, high_open)
        return NEVER if found is None else terminal(found)
    least = None if low is None else math.floor(low) + 1 if low_open else math.ceil(low)
    most = None if high is None else math.ceil(high) - 1 if high_open else math.floor(high)
    if (of := _divisor(schema.get("multipleOf", 1), where)) == 1:
        found = numbers.INTEGER if least is None and most is None else numbers.integers(least, most)
        return NEVER if found is None else terminal(found)
    if least is not None and most is not None and (most - least) // of < 1000:
        found = numbers.listed(range(-(-least // of) * of, most + 1, of))
        return NEVER if found is None else terminal(found)
    if (tails := numbers.multiples(of)) is None or least is not None or most is not None:
        raise _at(
            where, f"has 'multipleOf' {of}; supported are divisors of 1000 without bounds, and 1000 values at most"
        )
    return Terminal((numbers.INTEGER, tails))


def _separated(members: list[Rule], after_others: bool) -> Iterable[Rule]:
    for i, member in enumerate(members):
        if i or after_others:
            yield _COMMA
        yield member


def _both(a: Any, b: Any) -> Any:
    """A schema for what fits two."""
    if a is True or b is False or a == b:
        return b
    return a if b is True or a is False else {"allOf": [a, b]}


def _widened(types: Iterable[str]) -> list[str]:
    types = list(types)
    return [*types, "integer"] if "number" in types else types


def _type_of(value: Any) -> str:
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


def _value(value: Any) -> Rule:
    """One JSON value, with the white space that any value has."""
    parts: list[Rule] = []
    match value:
        case list():
            for item in value:
                parts += [_COMMA, _value(item)] if parts else [_value(item)]
            return row(terminal("\\x{5b}"), *parts, terminal("\\x{5d}"))
        case dict():
            for name, member in value.items():
                parts += [*([_COMMA] if parts else []), terminal(literal_string(name)), _COLON, _value(member)]
            return row(terminal("\\x{7b}"), *parts, terminal("\\x{7d}"))
        case str():
            return terminal(literal_string(value))
    return terminal(literal_text(_dumped(value)))


def _dumped(value: Any) -> str:
    return str(value) if isinstance(value, Decimal) else json.dumps(value, ensure_ascii=False, default=str)


def _key(value: Any, in_order: bool = False) -> str:
    """Equal for values that JSON Schema takes for equal; `in_order` tells orders of properties apart."""
    match value:
        case bool() | None | str():
            return json.dumps(value)
        case int() | Decimal():
            return str(Decimal(value).normalize() if value else 0)
        case list():
            return "[" + ",".join(_key(item, in_order) for item in value) + "]"
    members = [f"{json.dumps(name)}:{_key(member, in_order)}" for name, member in value.items()]
    return "{" + ",".join(members if in_order else sorted(members)) + "}"
