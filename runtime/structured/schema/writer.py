"""JSON Schema to rules: what can be enforced exactly, and everything else that asserts something refused by name.

A schema is first made flat (flat.py), then written as rules, each distinct schema once, so that recursion becomes
recursion. What comes out is always valid; it is a part of what is valid where JSON leaves freedom that a model is not
asked to use:

    - properties come in the order of the schema, then `required` names that it does not list, then free names
    - an object with `properties` or `patternProperties` has no others, unless `additionalProperties` says so
    - where `type` is missing and all other keywords are about one type, it is that type
    - white space is at most one space after each "," and ":"
    - characters are themselves in strings, and escaped only where JSON demands it; numbers: see numbers.py
    - with `uniqueItems` the values of an enum come in its order, if they are more than a few
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import reduce
from itertools import groupby
from typing import Any

from runtime.structured.pattern import (
    ALL,
    ANY_TEXT,
    MAX_REPEAT,
    CharacterClass,
    GrammarError,
    Repetition,
    literal_string,
    literal_text,
    quoted,
    search,
)
from runtime.structured.rules import (
    MAX_RULES,
    NEVER,
    NOTHING,
    Name,
    Rule,
    Terminal,
    choice,
    optional,
    repeat,
    sequence,
    terminal,
)
from runtime.structured.schema import numbers
from runtime.structured.schema.keywords import ABOUT, TYPES, Schema, at, dumped, key_of, parse
from runtime.structured.schema.normalize import Flat, Flattener, Terms, both
from runtime.structured.schema.references import with_pointers

_MAX_PERMUTED = 6  # values of an enum that an array with uniqueItems may have in any order

_ANY_KEY = Terminal((quoted(ANY_TEXT),))
_COMMA, _COLON = terminal(",\\x{20}?"), terminal(":\\x{20}?")


def read(text: str) -> Any:
    """A schema's JSON, ready for `rules_of`; raises GrammarError."""
    return with_pointers(parse(text))


def rules_of(
    root: Any,
    terms: Terms,
    schema: Any = None,
    prefix: str = "",
    strict: bool | None = None,
    ignored: list[str] | None = None,
) -> dict[str, Rule]:
    """The rules of a schema that was read, by default the root; the first one is `prefix` + "start". Raises
    GrammarError. `terms`, `strict`, `ignored`: see flat.py."""
    return _Writer(Flattener(root, terms, strict, [] if ignored is None else ignored), prefix).write(
        root if schema is None else schema
    )


class _Writer:
    def __init__(self, flattener: Flattener, prefix: str) -> None:
        self._schemas, self._terms, self._prefix = flattener, flattener.terms, prefix
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
        key = json.dumps(schema, default=str)
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
        flat = self._schemas.flat(schema, where)
        if flat is None:
            return NEVER
        if "anyOf" in flat:
            return choice(self._rule(option, where) for option in self._schemas.options(flat, where))
        if "enum" in flat:
            return choice(_value(value) for value in self._values(flat, where))
        about = [kind for kind, keywords in ABOUT.items() if flat.keys() & set(keywords)]
        types = flat.get("type", about if len(about) == 1 else TYPES)
        writers: dict[str, Callable[[Schema, str], Rule]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
            "integer": self._number,
            "boolean": lambda *_: terminal("(?:true|false)"),
            "null": lambda *_: terminal("null"),
        }
        if "number" in types:
            types = [t for t in types if t != "integer"]
        return choice(writers[t]({**flat, "type": t}, where) for t in types)

    def _values(self, flat: Flat, where: str) -> list[Any]:
        """The values of its enum that fit all else that it says."""
        rest = Flat((k, v) for k, v in flat.items() if k != "enum")
        return [value for value in flat["enum"] if not rest or self._schemas.admits(rest, value, where)]

    def _number(self, schema: Schema, where: str) -> Rule:
        rule = numbers.rule(schema, where)
        return self._fitting(rule) if isinstance(rule, Terminal) else rule

    # ---- strings ----------------------------------------------------------------------------------------------------

    def _string(self, schema: Schema, where: str) -> Rule:
        return self._fitting(self._text(Flat(schema), where))

    def _text(self, schema: Flat, where: str) -> Terminal:
        least, most = _bounds(schema, "Length", where)
        terms = self._schemas.string_terms(schema, where)
        if least or most is not None or not terms.all_of:
            terms = Terminal((*terms.all_of, quoted(Repetition(CharacterClass(ALL), least, most))), terms.none_of)
        return terms

    def _fitting(self, rule: Terminal) -> Rule:
        return rule if (len(rule.all_of) == 1 and not rule.none_of) or self._terms.fits(rule) else NEVER

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def _array(self, schema: Schema, where: str) -> Rule:
        least, most = _bounds(schema, "Items", where)
        if schema.get("uniqueItems") and (most is None or most > 1):
            if (values := self._finite(schema, where)) is not None:
                return sequence(terminal("\\x{5b}"), self._distinct(values, least, most), terminal("\\x{5d}"))
            self._schemas.cannot(where, "uniqueItems")
        first = [self._rule(item, f"{where}/prefixItems/{i}") for i, item in enumerate(schema.get("prefixItems", ()))]
        items, k = schema.get("items", True), len(first)
        rest = _more(NEVER if items is False else self._rule(items, f"{where}/items"), k, least, most)
        for i in reversed(range(k)):
            rest = self._named(sequence(_COMMA if i else NOTHING, first[i], rest))
            if most is not None and i >= most:
                rest = NOTHING
            elif i >= least:
                rest = optional(rest)
        return sequence(terminal("\\x{5b}"), rest, terminal("\\x{5d}"))

    def _finite(self, schema: Schema, where: str) -> list[Any] | None:
        """The different values that its items may have; None if they are not listed."""
        items = None if "prefixItems" in schema else self._schemas.flat(schema.get("items", True), f"{where}/items")
        if items is None or "anyOf" in items:
            return None
        if "enum" in items:
            return list({key_of(value): value for value in self._values(items, where)}.values())
        ways: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
        types = items.get("type", TYPES)
        return [value for t in types for value in ways[t]] if set(types) <= ways.keys() else None

    def _distinct(self, values: list[Any], least: int, most: int | None) -> Rule:
        """Some of `values`, each at most once."""
        if len(values) <= _MAX_PERMUTED:
            return self._permuted(tuple(values), 0, least, len(values) if most is None else most, {})
        return self._members([(_value(value), False) for value in values], NEVER, least, most)

    def _permuted(
        self, left: tuple[Any, ...], count: int, least: int, most: int, written: dict[tuple[Any, ...], Rule]
    ) -> Rule:
        """The rule of what follows `count` values, where those of `left` may still come in any order."""
        key = tuple(map(id, left))
        if key not in written:
            options: list[Rule] = [NOTHING] if count >= least else []
            for i, value in enumerate(left if count < most else ()):
                others = self._permuted(left[:i] + left[i + 1 :], count + 1, least, most, written)
                options.append(sequence(*_separated([_value(value)], count), others))
            written[key] = self._named(choice(options))
        return written[key]

    # ---- objects ----------------------------------------------------------------------------------------------------

    def _object(self, schema: Schema, where: str) -> Rule:
        given: dict[str, Any] = schema.get("properties", {})
        patterns: dict[str, Any] = schema.get("patternProperties", {})
        required = schema.get("required", [])
        free = schema.get("additionalProperties", True)
        keys = self._patterns(patterns, where)
        names, any_key = self._property_names(schema, where)
        is_any = names is None and any_key == _ANY_KEY
        listed = list(dict.fromkeys([*given, *(names or ()), *required]))
        members: list[tuple[Rule, bool]] = []
        for name in listed:
            of_patterns = [value for p, value in patterns.items() if self._terms.matches(keys[p], name)]
            value = given[name] if name in given else bool(of_patterns) or free
            if not is_any and not self._schemas.admits(schema["propertyNames"], name, where):
                value = False
            value = self._rule(reduce(both, of_patterns, value), f"{where}/properties/{name}")
            members.append((sequence(terminal(literal_string(name)), _COLON, value), name in required))
        listing = bool(patterns) or any(value is not False for value in given.values())
        closed = listing and "additionalProperties" not in schema
        free = False if names is not None or closed else free
        taken = [literal_string(name) for name in listed]
        others = self._free_members(keys, patterns if names is None else {}, free, any_key, taken, where)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        least = least if least > len(set(required)) else 0
        if least > 1 and others != NEVER:
            problem = "has 'minProperties' above its required properties, where names are free to repeat"
            self._schemas.cannot(where, "minProperties", problem)
            least = 1
        return sequence(terminal("\\x{7b}"), self._members(members, others, least, most), terminal("\\x{7d}"))

    def _patterns(self, patterns: Schema, where: str) -> dict[str, str]:
        """Terms of keys, by their patterns."""
        try:
            return {pattern: quoted(search(pattern)) for pattern in patterns}
        except GrammarError as e:
            raise at(where, str(e)) from None

    def _property_names(self, schema: Schema, where: str) -> tuple[list[str] | None, Terminal]:
        """The keys that `propertyNames` allows: a list of names (None: any), and the expression that all match."""
        where = f"{where}/propertyNames"
        flat = self._schemas.flat(schema.get("propertyNames", True), where)
        if flat is None:
            return [], _ANY_KEY
        options = self._schemas.options(flat, where) if "anyOf" in flat else [flat]
        if all("enum" in option for option in options):
            return [n for option in options for n in self._values(option, where) if isinstance(n, str)], _ANY_KEY
        if "anyOf" in flat:
            self._schemas.cannot(where, "anyOf")
            return None, _ANY_KEY
        if "string" not in flat.get("type", TYPES):
            return [], _ANY_KEY
        if not flat.keys() & set(ABOUT["string"]):
            return None, _ANY_KEY
        return None, self._text(flat, where)

    def _members(self, members: list[tuple[Rule, bool]], others: Rule, least: int, most: int | None) -> Rule:
        """`least` to `most` of these with commas between: `members` in their order, each with whether it must be there,
        then `others`."""
        most = None if most is None or (others == NEVER and most >= len(members)) else most
        cap = max(1, least, most or 0)  # members so far are counted up to here
        if cap > MAX_RULES:
            raise _too_large()
        runs = [(must, [member for member, _ in run]) for must, run in groupby(members, key=lambda each: each[1])]
        steps = [step for must, run in runs for step in ([(True, run)] if must else [(False, [m]) for m in run])]
        reached = [{0}]  # numbers of members, by the steps before
        for must, some in steps:
            taken = {min(n + len(some), cap) for n in reached[-1]}
            reached.append(taken if must else taken | reached[-1])
        after = {n: self._named(_more(others, n, least, most)) for n in reached[-1]}  # what may follow n members
        for step in reversed(range(len(steps))):
            (must, some), before = steps[step], reached[step]
            states: dict[int, Rule] = {}
            for n in before:
                follows = after[min(n + len(some), cap)]
                member = sequence(*_separated(some, n))
                if most is not None and n + len(some) > most:
                    states[n] = NEVER if must else after[n]
                elif must:
                    states[n] = sequence(member, follows)
                elif n == cap:
                    states[n] = sequence(optional(member), follows)
                else:
                    states[n] = choice((sequence(member, follows), after[n]))
            shared = step > 0 and len(reached[step - 1]) > 1
            after = {n: self._named(state) if shared or n < cap else state for n, state in states.items()}
        return after[0]

    def _free_members(
        self, keys: dict[str, str], patterns: Schema, free: Any, any_key: Terminal, taken: list[str], where: str
    ) -> Rule:
        """A member whose name is not listed: it matches exactly one pattern, or none where other names are free."""
        options = []
        for pattern, value in patterns.items():
            apart = tuple(other for p, other in keys.items() if p != pattern)
            terms = () if any_key == _ANY_KEY else any_key.all_of
            key = self._fitting(Terminal((keys[pattern], *terms), (*taken, *apart, *any_key.none_of)))
            options.append((key, value, "patternProperties"))
        free_key = Terminal(any_key.all_of, (*taken, *keys.values(), *any_key.none_of))
        is_open = not keys and any_key == _ANY_KEY
        options.append((free_key if is_open else self._fitting(free_key), free, "additionalProperties"))
        return choice(
            sequence(key, _COLON, self._rule(value, f"{where}/{keyword}"))
            for key, value, keyword in options
            if value is not False and key != NEVER
        )


def _more(member: Rule, n: int, least: int, most: int | None) -> Rule:
    """As many of `member` after `n` others, with their commas, that there are `least` to `most` in all."""
    least, most = max(least - n, 0), None if most is None else max(most - n, 0)
    if member == NEVER or most == 0:
        return NEVER if least else NOTHING
    if n:
        return repeat(sequence(_COMMA, member), least, most)
    some = sequence(member, repeat(sequence(_COMMA, member), max(least - 1, 0), None if most is None else most - 1))
    return some if least else optional(some)


def _separated(members: Iterable[Rule], num_before: int = 0) -> Iterable[Rule]:
    for i, member in enumerate(members, num_before):
        yield from (_COMMA, member) if i else (member,)


def _too_large() -> GrammarError:
    return GrammarError(f"makes more than {MAX_RULES} rules, the limit; make it smaller")


def _bounds(schema: Schema, of: str, where: str) -> tuple[int, int | None]:
    least, most = schema.get(f"min{of}", 0), schema.get(f"max{of}")
    if least > MAX_REPEAT:
        raise at(where, f"has 'min{of}' as {least}; the limit is {MAX_REPEAT} repetitions")
    if most is not None and most > MAX_REPEAT:
        most = MAX_REPEAT  # so much need not be said
    if most is not None and least > most:
        raise at(where, f"has min{of} {least} above max{of} {most}, so nothing fits")
    return least, most


def _value(value: Any) -> Rule:
    """One JSON value, with the white space that any value has."""
    match value:
        case list():
            return sequence(terminal("\\x{5b}"), *_separated(map(_value, value)), terminal("\\x{5d}"))
        case dict():
            members = (sequence(terminal(literal_string(name)), _COLON, _value(v)) for name, v in value.items())
            return sequence(terminal("\\x{7b}"), *_separated(members), terminal("\\x{7d}"))
        case str():
            return terminal(literal_string(value))
    return terminal(literal_text(dumped(value)))
