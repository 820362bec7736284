"""A grammar as rules over terminals, and the two forms that it is handed to the engines in.

`lark` is llguidance's, with recursion and with intersections of terminals; `expression` is one regular expression for
outlines-core, where there is one. Both say the same language.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.structured.pattern import GrammarError

MAX_RULES = 10_000  # of one grammar
MAX_LARK_BYTES = 256 << 10  # of a compiled grammar: its matcher is ready after some 30 ms
_MAX_EXPRESSION_CHARS = 32_768


@dataclass(frozen=True, slots=True)
class Terminal:
    """Texts that match all of `all_of` and none of `none_of`, regular expressions."""

    all_of: tuple[str, ...]
    none_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    parts: tuple[Rule, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Rule
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Name:
    """Stands for the rule of this name."""

    of: str


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON Schema that llguidance's own compiler takes."""

    text: str


@dataclass(frozen=True, slots=True)
class Shortest:
    """Text up to the first place where all of it matches a regular expression."""

    expression: str


Rule = Terminal | Sequence | Choice | Repeat | Name | JsonSchema | Shortest
NOTHING = Sequence(())  # matches the empty text
NEVER = Choice(())  # matches no text


def terminal(expression: str) -> Terminal:
    return Terminal((expression,))


def sequence(*parts: Rule) -> Rule:
    """One after another; neighbours that are simple terminals become one."""
    joined: list[Rule] = []
    for part in parts:
        for each in part.parts if isinstance(part, Sequence) else (part,):
            match joined, each:
                case [*_, Terminal((before,), ())], Terminal((after,), ()):
                    joined[-1] = Terminal((before + after,))
                case _:
                    joined.append(each)
    return joined[0] if len(joined) == 1 else Sequence(tuple(joined))


def choice(options: Iterable[Rule]) -> Rule:
    different = tuple(dict.fromkeys(options))
    return different[0] if len(different) == 1 else Choice(different)


def repeat(part: Rule, least: int, most: int | None) -> Rule:
    return NOTHING if most == 0 else Repeat(part, least, most)


def optional(part: Rule) -> Rule:
    return Choice((part, NOTHING))


def pruned(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """`rules` without those that nothing needs and what can never be completed, as a recursion without an end; raises
    GrammarError if the start cannot."""
    alive: set[str] = set()

    def can_end(rule: Rule) -> bool:
        match rule:
            case Sequence(parts):
                return all(map(can_end, parts))
            case Choice(parts):
                return any(map(can_end, parts))
            case Repeat(part, least):
                return least == 0 or can_end(part)
            case Name(name):
                return name in alive
        return True

    def prune(rule: Rule) -> Rule:
        match rule:
            case Sequence(parts):
                return Sequence(tuple(map(prune, parts)))
            case Choice(parts):
                return choice(prune(part) for part in parts if can_end(part))
            case Repeat(part, least, most):
                return Repeat(prune(part), least, most) if can_end(part) else NOTHING
        return rule

    found, names = -1, list(rules)[::-1]  # most rules stand before those that they need
    while found < len(alive):
        found = len(alive)
        for name in names:
            if name not in alive and can_end(rules[name]):
                alive.add(name)
        names.reverse()
    if "start" not in alive:
        raise GrammarError("cannot be satisfied: no text fits it")
    kept: dict[str, Rule] = {}
    todo = ["start"]
    while todo:
        if (name := todo.pop()) not in kept:
            kept[name] = prune(rules[name])
            todo += _names(kept[name])
    return kept


def _names(rule: Rule) -> Iterable[str]:
    match rule:
        case Name(name):
            yield name
        case Repeat(part):
            yield from _names(part)
        case Sequence(parts) | Choice(parts):
            for part in parts:
                yield from _names(part)


def lark(rules: Mapping[str, Rule]) -> str:
    """llguidance's form; raises GrammarError if it is too long."""
    terminals: dict[Terminal, str] = {}
    lazy: dict[Shortest, str] = {}

    def write(rule: Rule) -> str:
        match rule:
            case Terminal((expression,), ()):
                return f"/{expression}/"
            case Terminal():
                return terminals.setdefault(rule, f"T{len(terminals)}")
            case Sequence(parts):
                return " ".join(map(write, parts)) or '""'
            case Choice(parts):
                return "(" + " | ".join(map(write, parts)) + ")"
            case Repeat(part, least, most):
                times = "*" if (least, most) == (0, None) else f"{{{least},{'' if most is None else most}}}"
                return f"({write(part)}){times}"
            case Name(name):
                return name
            case JsonSchema(text):
                return f"%json {text}"
            case Shortest():
                return lazy.setdefault(rule, f"shortest{len(lazy)}")

    # Without forcing, a mask has every token that fits, not just the one that a tokenizer would choose.
    lines = ['%llguidance {"no_forcing": true}', *(f"{name}: {write(rule)}" for name, rule in rules.items())]
    for each, name in terminals.items():
        parts = [*(f"/{e}/" for e in each.all_of), *(f"~/{e}/" for e in each.none_of)]
        lines.append(f"{name}: " + " & ".join(parts))
    lines += (f"{name}[lazy]: /{each.expression}/" for each, name in lazy.items())
    text = "\n".join(lines)
    if (size := len(text.encode())) > MAX_LARK_BYTES:
        raise GrammarError(f"makes a grammar of {size} bytes; the limit is {MAX_LARK_BYTES} bytes; make it smaller")
    return text


class _NoExpression(Exception):
    pass


def expression(rules: Mapping[str, Rule]) -> str:
    """The same as one regular expression; "" if it recurses, intersects or gets long."""
    written: dict[str, str | None] = {}

    def write(rule: Rule) -> str:
        match rule:
            case Terminal((text,), ()):
                result = text
            case Sequence(parts):
                result = "".join(map(write, parts))
            case Choice(parts):
                result = "(?:" + "|".join(map(write, parts)) + ")"
            case Repeat(part, least, most):
                result = f"(?:{write(part)}){{{least},{'' if most is None else most}}}"
            case Name(name):
                if name not in written:
                    written[name] = None
                    written[name] = write(rules[name])
                if (found := written[name]) is None:
                    raise _NoExpression
                result = found
            case _:
                raise _NoExpression
        if len(result) > _MAX_EXPRESSION_CHARS:
            raise _NoExpression
        return result

    try:
        return write(Name("start"))
    except (_NoExpression, RecursionError):
        return ""
