"""Writes a JSON Schema as rules. What cannot be enforced exactly is refused by name.

A schema is normalized (normalize.py), then written, each distinct schema once: a recursive schema becomes a recursive
rule. Every output is valid. These freedoms of JSON are left out:

    - properties come in the order of the schema, then `required` names that it does not list, then free names
    - an object with `properties`, even empty, or `patternProperties` has only these names, unless
      `additionalProperties` allows others
    - a schema without `type` has the one type that all its keywords are about, if there is one
    - white space is at most one space after each "," and ":"; a grammar allows some at its end, too
    - in strings, a character is escaped only where JSON requires it; numbers: see numbers.py
    - with `uniqueItems`, an enum of more than six values keeps its order"""

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
    Name,
    Repeat,
    literal_string,
    literal_text,
    quoted,
)
from runtime.structured.readers.regex import search
from runtime.structured.rules import (
    MAX_RULES,
    NEVER,
    NOTHING,
    Rule,
    Terminal,
    choice,
    optional,
    repeat,
    terminal,
    tokens,
)
from runtime.structured.schema import numbers
from runtime.structured.schema.keywords import ABOUT, TYPES, Schema, at, dumped, key_of, parse
from runtime.structured.schema.merge import NormalSchema, TerminalChecks, all_of, without_key
from runtime.structured.schema.normalize import SchemaNormalizer
from runtime.structured.schema.references import with_pointers
from runtime.structured.schema.values import admits, string_terminal

_MAX_PERMUTED = 6  # values of an enum in any order, in an array with uniqueItems

_ANY_KEY = Terminal((quoted(ANY_TEXT),))
_COMMA, _COLON = terminal(",\\x{20}?"), terminal(":\\x{20}?")


def read(text: str) -> Any:
    """Read a schema's JSON for `rules_of`. Raises GrammarError."""
    return with_pointers(parse(text))


def rules_of(
    root: Any,
    checks: TerminalChecks,
    schema: Any = None,
    prefix: str = "",
    strict: bool | None = None,
    ignored: list[str] | None = None,
) -> dict[str, Rule]:
    """Return the rules for `schema`, or for the root; the first one is `prefix` + "start". Raises GrammarError.

    `root` comes from `read`; for the other arguments see SchemaNormalizer."""
    return _Writer(SchemaNormalizer(root, checks, strict, [] if ignored is None else ignored), prefix).write(
        root if schema is None else schema
    )


class _Writer:
    def __init__(self, normalizer: SchemaNormalizer, prefix: str) -> None:
        self._normalizer, self._checks, self._prefix = normalizer, normalizer.checks, prefix
        self._rules: dict[str, Rule] = {}
        self._names: dict[str, str] = {}  # rule names, by their schema
        self._todo: list[tuple[str, Any, str]] = []  # name, schema and path of each rule to write

    def write(self, schema: Any) -> dict[str, Rule]:
        self._rules[f"{self._prefix}start"] = self._rule(schema, "#")
        while self._todo:
            name, schema, where = self._todo.pop()
            self._rules[name] = self._written(schema, where)
        return self._rules

    def _rule(self, schema: Any, where: str) -> Rule:
        """Return the name of a schema's rule, which is written later."""
        key = json.dumps(schema, default=str)
        if key not in self._names:
            if len(self._names) > MAX_RULES:
                raise _too_large()
            self._names[key] = f"{self._prefix}r{len(self._names)}"
            self._todo.append((self._names[key], schema, where))
        return Name(self._names[key])

    def _named(self, rule: Rule) -> Rule:
        """Return a rule that may be used twice: its name."""
        if isinstance(rule, Name) or rule in (NOTHING, NEVER):
            return rule
        if len(self._rules) > MAX_RULES:
            raise _too_large()
        name = f"{self._prefix}p{len(self._rules)}"
        self._rules[name] = rule
        return Name(name)

    def _written(self, schema: Any, where: str) -> Rule:
        normal = self._normalizer.normalize(schema, where)
        if normal is None:
            return NEVER
        if "anyOf" in normal:
            return choice(self._rule(option, where) for option in self._normalizer.options(normal, where))
        if "enum" in normal:
            return choice(_value(value) for value in self._values(normal, where))
        about = [kind for kind, keywords in ABOUT.items() if normal.keys() & set(keywords)]
        types = normal.get("type", about if len(about) == 1 else TYPES)
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
        return choice(writers[t]({**normal, "type": t}, where) for t in types)

    def _values(self, normal: NormalSchema, where: str) -> list[Any]:
        """Return the values of its enum that fit its other keywords."""
        rest = without_key(normal, "enum")
        return [value for value in normal["enum"] if not rest or admits(self._normalizer, rest, value, where)]

    def _number(self, schema: Schema, where: str) -> Rule:
        rule = numbers.rule(schema, where)
        return self._fitting(rule) if isinstance(rule, Terminal) else rule

    # ---- strings ----------------------------------------------------------------------------------------------------

    def _string(self, schema: Schema, where: str) -> Rule:
        return self._fitting(self._text(NormalSchema(schema), where))

    def _text(self, schema: NormalSchema, where: str) -> Terminal:
        least, most = _bounds(schema, "Length", where)
        found = string_terminal(self._normalizer, schema, where)
        if least or most is not None or not found.all_of:
            found = Terminal((*found.all_of, quoted(Repeat(CharacterClass(ALL), least, most))), found.none_of)
        return found

    def _fitting(self, rule: Terminal) -> Rule:
        return rule if (len(rule.all_of) == 1 and not rule.none_of) or self._checks.fits(rule) else NEVER

    # ---- arrays -----------------------------------------------------------------------------------------------------

    def _array(self, schema: Schema, where: str) -> Rule:
        least, most = _bounds(schema, "Items", where)
        if schema.get("uniqueItems") and (most is None or most > 1):
            if (values := self._finite(schema, where)) is not None:
                return tokens(terminal("\\x{5b}"), self._distinct(values, least, most), terminal("\\x{5d}"))
            self._normalizer.cannot(where, "uniqueItems")
        first = [self._rule(item, f"{where}/prefixItems/{i}") for i, item in enumerate(schema.get("prefixItems", ()))]
        items, k = schema.get("items", True), len(first)
        rest = _more(NEVER if items is False else self._rule(items, f"{where}/items"), k, least, most)
        for i in reversed(range(k)):
            rest = self._named(tokens(_COMMA if i else NOTHING, first[i], rest))
            if most is not None and i >= most:
                rest = NOTHING
            elif i >= least:
                rest = optional(rest)
        return tokens(terminal("\\x{5b}"), rest, terminal("\\x{5d}"))

    def _finite(self, schema: Schema, where: str) -> list[Any] | None:
        """Return the different values that its items may have; None if they are not listed."""
        if "prefixItems" in schema:
            return None
        items = self._normalizer.normalize(schema.get("items", True), f"{where}/items")
        if items is None or "anyOf" in items:
            return None
        if "enum" in items:
            return list({key_of(value): value for value in self._values(items, where)}.values())
        ways: dict[str, list[Any]] = {"boolean": [True, False], "null": [None]}
        types = items.get("type", TYPES)
        return [value for t in types for value in ways[t]] if set(types) <= ways.keys() else None

    def _distinct(self, values: list[Any], least: int, most: int | None) -> Rule:
        """Return the rule for some `values`, each at most once."""
        if len(values) <= _MAX_PERMUTED:
            return self._permuted(tuple(values), 0, least, len(values) if most is None else most, {})
        return self._members([(_value(value), False) for value in values], NEVER, least, most)

    def _permuted(
        self, left: tuple[Any, ...], count: int, least: int, most: int, written: dict[tuple[Any, ...], Rule]
    ) -> Rule:
        """Return the rule of the rest after `count` values; the values `left` may still follow, in any order."""
        key = tuple(map(id, left))
        if key not in written:
            options: list[Rule] = [NOTHING] if count >= least else []
            for i, value in enumerate(left if count < most else ()):
                others = self._permuted(left[:i] + left[i + 1 :], count + 1, least, most, written)
                options.append(tokens(*_separated([_value(value)], count), others))
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
            pattern_values = [value for p, value in patterns.items() if self._checks.matches(keys[p], name)]
            value = given[name] if name in given else bool(pattern_values) or free
            if not is_any and not admits(self._normalizer, schema["propertyNames"], name, where):
                value = False
            value = self._rule(reduce(all_of, pattern_values, value), f"{where}/properties/{name}")
            members.append((tokens(terminal(literal_string(name)), _COLON, value), name in required))
        # An option that only excludes names, as `oneOf` makes them, lists none.
        excludes = bool(given) and all(value is False for value in given.values())
        lists = bool(patterns) or ("properties" in schema and not excludes)
        closed = lists and "additionalProperties" not in schema
        free = False if names is not None or closed else free
        taken = [literal_string(name) for name in listed]
        others = self._free_members(keys, patterns if names is None else {}, free, any_key, taken, where)
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        least = least if least > len(set(required)) else 0
        if least > 1 and others != NEVER:
            problem = "has 'minProperties' above its required properties, where names are free to repeat"
            self._normalizer.cannot(where, "minProperties", problem)
            least = 1
        return tokens(terminal("\\x{7b}"), self._members(members, others, least, most), terminal("\\x{7d}"))

    def _patterns(self, patterns: Schema, where: str) -> dict[str, str]:
        """Return the expressions of names, by their patterns."""
        try:
            return {pattern: quoted(search(pattern)) for pattern in patterns}
        except GrammarError as e:
            raise at(where, str(e)) from None

    def _property_names(self, schema: Schema, where: str) -> tuple[list[str] | None, Terminal]:
        """Return the names that `propertyNames` lists, or None for any, and the terminal that each name matches."""
        where = f"{where}/propertyNames"
        normal = self._normalizer.normalize(schema.get("propertyNames", True), where)
        if normal is None:
            return [], _ANY_KEY
        options = self._normalizer.options(normal, where) if "anyOf" in normal else [normal]
        if all("enum" in option for option in options):
            return [n for option in options for n in self._values(option, where) if isinstance(n, str)], _ANY_KEY
        if "anyOf" in normal:
            self._normalizer.cannot(where, "anyOf")
            return None, _ANY_KEY
        if "string" not in normal.get("type", TYPES):
            return [], _ANY_KEY
        if not normal.keys() & set(ABOUT["string"]):
            return None, _ANY_KEY
        return None, self._text(normal, where)

    def _members(self, members: list[tuple[Rule, bool]], others: Rule, least: int, most: int | None) -> Rule:
        """Return the rule of `least` to `most` members with commas between: `members` in their order, then `others`.

        Each of `members` comes with whether it is required. A run of required members is one step, and so is each
        optional member. The rules after a step differ by the members before it, up to `cap`."""
        most = None if most is None or (others == NEVER and most >= len(members)) else most
        cap = max(1, least, most or 0)  # numbers of members from here on are alike
        if cap > MAX_RULES:
            raise _too_large()
        runs = [(must, [member for member, _ in run]) for must, run in groupby(members, key=lambda each: each[1])]
        steps = [step for must, run in runs for step in ([(True, run)] if must else [(False, [m]) for m in run])]
        reached = [{0}]  # numbers of members before each step
        for must, some in steps:
            taken = {min(n + len(some), cap) for n in reached[-1]}
            reached.append(taken if must else taken | reached[-1])
        after = {n: self._named(_more(others, n, least, most)) for n in reached[-1]}  # the rest after n members
        for step in reversed(range(len(steps))):
            (must, some), before = steps[step], reached[step]
            states: dict[int, Rule] = {}
            for n in before:
                follows = after[min(n + len(some), cap)]
                member = tokens(*_separated(some, n))
                if most is not None and n + len(some) > most:
                    states[n] = NEVER if must else after[n]
                elif must:
                    states[n] = tokens(member, follows)
                elif n == cap:
                    states[n] = tokens(optional(member), follows)
                else:
                    states[n] = choice((tokens(member, follows), after[n]))
            shared = step > 0 and len(reached[step - 1]) > 1
            after = {n: self._named(state) if shared or n < cap else state for n, state in states.items()}
        return after[0]

    def _free_members(
        self, keys: dict[str, str], patterns: Schema, free: Any, any_key: Terminal, taken: list[str], where: str
    ) -> Rule:
        """Return the rule of a member with a free name, which matches exactly one pattern or, if allowed, none."""
        options = []
        for pattern, value in patterns.items():
            others = tuple(other for p, other in keys.items() if p != pattern)
            also = () if any_key == _ANY_KEY else any_key.all_of
            key = self._fitting(Terminal((keys[pattern], *also), (*taken, *others, *any_key.none_of)))
            options.append((key, value, "patternProperties"))
        free_key = Terminal(any_key.all_of, (*taken, *keys.values(), *any_key.none_of))
        is_open = not keys and any_key == _ANY_KEY
        options.append((free_key if is_open else self._fitting(free_key), free, "additionalProperties"))
        return choice(
            tokens(key, _COLON, self._rule(value, f"{where}/{keyword}"))
            for key, value, keyword in options
            if value is not False and key != NEVER
        )


def _more(member: Rule, n: int, least: int, most: int | None) -> Rule:
    """Return the rule of further members after `n` ones, with their commas, `least` to `most` in all."""
    least, most = max(least - n, 0), None if most is None else max(most - n, 0)
    if member == NEVER or most == 0:
        return NEVER if least else NOTHING
    if n:
        return repeat(tokens(_COMMA, member), least, most)
    some = tokens(member, repeat(tokens(_COMMA, member), max(least - 1, 0), None if most is None else most - 1))
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
        most = MAX_REPEAT  # no text reaches a larger limit
    if most is not None and least > most:
        raise at(where, f"has min{of} {least} above max{of} {most}, so nothing fits")
    return least, most


def _value(value: Any) -> Rule:
    """Return the rule of one JSON value, with any value's white space."""
    match value:
        case list():
            return tokens(terminal("\\x{5b}"), *_separated(map(_value, value)), terminal("\\x{5d}"))
        case dict():
            members = (tokens(terminal(literal_string(name)), _COLON, _value(v)) for name, v in value.items())
            return tokens(terminal("\\x{7b}"), *_separated(members), terminal("\\x{7d}"))
        case str():
            return terminal(literal_string(value))
    return terminal(literal_text(dumped(value)))
