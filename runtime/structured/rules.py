"""Rules over terminals: the form between every reader and the two engines.

`lark` writes rules for llguidance; they may recurse, and terminals may intersect. `expression` writes the same language
as one regular expression for outlines-core, where there is one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from runtime.structured.pattern import (
    FIRST_OF_SPECIAL,
    Choice,
    GrammarError,
    Name,
    Repeat,
    Sequence,
    literal_text,
    names_in,
    special_text,
)

MAX_RULES = 10_000  # rules in one grammar
MAX_LARK_BYTES = 256 << 10  # size of a compiled grammar: its matcher is ready after some 30 ms
_MAX_EXPRESSION_CHARS = 32_768
_RESERVED = re.compile(r"[\U0010ffc0-\U0010ffff]|\\x\{10ff[c-f]")  # characters that stand for special tokens
_OPTIONS = '%llguidance {"no_forcing": true}'  # a mask has every token that fits, not only the tokenizer's own choice


@dataclass(frozen=True, slots=True)
class Terminal:
    """Texts that match all of `all_of` and none of `none_of`, which are regular expressions."""

    all_of: tuple[str, ...]
    none_of: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """A JSON Schema that llguidance compiles."""

    text: str


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A grammar in Lark's form that llguidance reads; its `%ignore` applies to nothing outside it."""

    text: str


@dataclass(frozen=True, slots=True)
class Shortest:
    """Text up to the first place where all of it matches a regular expression."""

    expression: str


@dataclass(frozen=True, slots=True)
class Special:
    """The special token with this id, which no text spells out."""

    id: int


@dataclass(frozen=True, slots=True)
class Wide:
    """Texts that match a regular expression of many states, each with most tokens.

    With a large vocabulary, its automaton would take seconds to build. So only llguidance serves it."""

    expression: str


Leaf = Terminal | Wide | Name | JsonSchema | LarkGrammar | Shortest | Special
Rule = Leaf | Sequence["Rule"] | Choice["Rule"] | Repeat["Rule"]
NOTHING: Rule = Sequence(())  # matches the empty text
NEVER: Rule = Choice(())  # matches no text


def terminal(expression: str) -> Terminal:
    return Terminal((expression,))


# Many tokens end with up to eight characters of white space. An output that takes one may still end or go on.
SPACES = terminal("[\\x{9}\\x{a}\\x{d}\\x{20}]{0,16}")


def text(of: str) -> Rule:
    """Return the rule of one text."""
    return terminal(literal_text(of)) if of else NOTHING


def marked(of: str, special: Mapping[str, int]) -> Rule:
    """Return the rule of one text, with the marks in it that are special tokens; `special` has their ids."""
    if not special:
        return text(of)
    pieces = re.split("(" + "|".join(map(re.escape, sorted(special, key=len, reverse=True))) + ")", of)
    return sequence(*(Special(special[piece]) if piece in special else text(piece) for piece in pieces if piece))


def sequence(*parts: Rule) -> Rule:
    """Return one rule after another; neighbours that are simple terminals become one."""
    joined: list[Rule] = []
    for part in parts:
        for each in part.parts if isinstance(part, Sequence) else (part,):
            match joined, each:
                case [*_, Terminal((before,), ())], Terminal((after,), ()):
                    joined[-1] = Terminal((before + after,))
                case _:
                    joined.append(each)
    return joined[0] if len(joined) == 1 else Sequence(tuple(joined))


def tokens(*parts: Rule) -> Rule:
    """Return one rule after another; each terminal stays one.

    llguidance takes the longest terminal and does not go back. So terminals that other alternatives share may not grow
    by what follows them here."""
    return Sequence(tuple(each for part in parts for each in (part.parts if isinstance(part, Sequence) else (part,))))


def choice(options: Iterable[Rule]) -> Rule:
    different = tuple(dict.fromkeys(options))
    return different[0] if len(different) == 1 else Choice(different)


def repeat(part: Rule, least: int, most: int | None) -> Rule:
    return NOTHING if most == 0 else Repeat(part, least, most)


def optional(part: Rule) -> Rule:
    return Choice((part, NOTHING))


def pruned(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    """Return the rules that the start needs, without options that no text can complete. Raises GrammarError if none is
    left of the start."""
    productive: set[str] = set()

    def can_end(rule: Rule) -> bool:
        match rule:
            case Sequence(parts):
                return all(map(can_end, parts))
            case Choice(parts):
                return any(map(can_end, parts))
            case Repeat(part, least):
                return least == 0 or can_end(part)
            case Name(name):
                return name in productive
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

    before, names = -1, list(rules)[::-1]  # most rules stand before the rules that they need
    while before < len(productive):
        before = len(productive)
        productive.update(name for name in names if name not in productive and can_end(rules[name]))
        names.reverse()
    if "start" not in productive:
        raise GrammarError("cannot be satisfied: no text fits it")
    kept: dict[str, Rule] = {}
    todo = ["start"]
    while todo:
        if (name := todo.pop()) not in kept:
            kept[name] = prune(rules[name])
            todo += names_in(kept[name])
    return kept


def leaves(rules: Mapping[str, Rule]) -> Iterator[Rule]:
    """Yield the smallest parts of all rules."""
    todo = list(rules.values())
    while todo:
        match todo.pop():
            case Sequence(parts) | Choice(parts):
                todo += parts
            case Repeat(part):
                todo.append(part)
            case leaf:
                yield leaf


def special_ids(rules: Mapping[str, Rule]) -> list[int]:
    """Return the ids of the special tokens that rules have, in order."""
    return sorted({leaf.id for leaf in leaves(rules) if isinstance(leaf, Special)})


def lark(rules: Mapping[str, Rule]) -> str:
    """Return llguidance's form of rules: Lark, or JSON if a rule holds its own grammar. Raises GrammarError if it
    is too long."""
    terminals: dict[Terminal, str] = {}
    lazy: dict[Shortest, str] = {}
    inner: dict[str, str] = {}  # names of grammars within, by their text

    def write(rule: Rule) -> str:
        match rule:
            case Terminal((expression,), ()) | Wide(expression):
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
            case LarkGrammar(text):
                return "@" + inner.setdefault(text, f"lark{len(inner)}")
            case Shortest():
                return lazy.setdefault(rule, f"shortest{len(lazy)}")
            case Special(token_id):
                return f"<[{token_id}]>"

    match rules:
        case {"start": LarkGrammar(text)}:
            return f"{text}\n{_OPTIONS}"
    lines = [_OPTIONS, *(f"{name}: {write(rule)}" for name, rule in rules.items())]
    for each, name in terminals.items():
        parts = [*(f"/{e}/" for e in each.all_of), *(f"~/{e}/" for e in each.none_of)]
        lines.append(f"{name}: " + " & ".join(parts))
    lines += (f"{name}[lazy]: /{each.expression}/" for each, name in lazy.items())
    text = "\n".join(lines)
    if inner:
        grammars = [{"name": name, "lark_grammar": f"{of}\n{_OPTIONS}"} for of, name in inner.items()]
        text = json.dumps({"grammars": [{"lark_grammar": text}, *grammars]})
    if (size := len(text.encode())) > MAX_LARK_BYTES:
        raise GrammarError(f"makes a grammar of {size} bytes; the limit is {MAX_LARK_BYTES} bytes; make it smaller")
    return text


class _NoExpression(Exception):
    pass


def expression(rules: Mapping[str, Rule]) -> str:
    """Return one regular expression for rules; "" if they recurse or intersect, or if it is long.

    No text has the characters that stand for special tokens."""
    written: dict[str, str | None] = {}  # None while the rule is being written

    def write(rule: Rule) -> str:
        match rule:
            case Terminal((text,), ()):
                if _RESERVED.search(text):
                    raise _NoExpression
                result = _without_special(text)
            case Special(token_id):
                result = literal_text(special_text(token_id))
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


def _without_special(expression: str) -> str:
    """Return an expression with open character classes that leave out the characters of special tokens."""
    reserved = f"\\x{{{FIRST_OF_SPECIAL:x}}}-\\x{{10ffff}}"
    return expression.replace("[^", f"[^{reserved}").replace("(?s:.", f"(?:[^{reserved}]")
