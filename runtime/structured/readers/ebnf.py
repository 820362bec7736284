"""Grammars in EBNF, as llama.cpp (GBNF), SGLang and XGrammar write it: `name ::= ...`, beginning with `root`.

A grammar describes its texts character by character. Any way to derive a text counts."""

from __future__ import annotations

import re

from runtime.structured.pattern import (
    ALL,
    MAX_NESTING,
    MAX_REPEAT,
    CharacterClass,
    GrammarError,
    Name,
    Pattern,
    Repeat,
    Sequence,
    any_of,
    literal,
    shown,
)
from runtime.structured.readers.tokens import COUNT, STRING, Token, error_at, pattern_at, string_at, tokens_of
from runtime.structured.rules import MAX_RULES

START = "root"
_FORMS = re.compile(
    rf"(?P<space>(?:\s|\#[^\n]*)+)|(?P<name>[A-Za-z0-9_][A-Za-z0-9_-]*)|(?P<string>{STRING})"
    rf"|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<count>{COUNT})|(?P<mark>::=|[|()*+?.])",
    re.DOTALL,
)
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_LONG_ESCAPE = re.compile(r"\\U(?:00)?([0-9a-fA-F]{6})")


def read_ebnf(text: str) -> dict[str, Pattern]:
    """Return a grammar's rules, `root` among them; each reference leads to a rule. Raises GrammarError."""
    return _Reader(text).read()


class _Reader:
    """A recursive-descent parser of one grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._rules: dict[str, Pattern] = {}
        self._references: dict[str, int] = {}  # offset of the first reference to each rule
        self._depth = 0
        self._at = 0  # index of the next token
        self._tokens = tokens_of(text, _FORMS)

    def read(self) -> dict[str, Pattern]:
        while self._peek().kind != "end":
            name = self._take()
            if name.kind != "name" or not self._skip("::="):
                self._at -= 1
                raise self._unexpected("where a rule `name ::=` should begin")
            if name.text in self._rules:
                raise error_at(self._text, f"defines {shown(name.text)} again", name.at)
            if len(self._rules) == MAX_RULES:
                raise GrammarError(f"has over {MAX_RULES} rules, the limit")
            self._rules[name.text] = self._alternatives()
            if not self._ends_rule():
                raise self._unexpected("where the next rule should begin")
        for reference, at in self._references.items():
            if reference not in self._rules:
                raise error_at(self._text, f"refers to {shown(reference)}, which is not defined,", at)
        if START not in self._rules:
            raise GrammarError(f"has no rule {START!r}, with which it would begin")
        return self._rules

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def _peek(self, ahead: int = 0) -> Token:
        return self._tokens[min(self._at + ahead, len(self._tokens) - 1)]

    def _take(self) -> Token:
        token = self._peek()
        self._at += 1
        return token

    def _skip(self, text: str) -> bool:
        found = self._peek().text == text
        self._at += found
        return found

    def _unexpected(self, why: str) -> GrammarError:
        token = self._peek()
        what = "ends" if token.kind == "end" else f"has {shown(token.text)}"
        return error_at(self._text, f"{what} {why}", token.at)

    def _ends_rule(self) -> bool:
        token = self._peek()
        return token.kind == "end" or (token.kind == "name" and self._peek(1).text == "::=")

    # ---- expressions ------------------------------------------------------------------------------------------------

    def _alternatives(self) -> Pattern:
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        return any_of(options)

    def _sequence(self) -> Pattern:
        parts = []
        while not self._ends_rule() and self._peek().text not in ("|", ")"):
            parts.append(self._repeated(self._item()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, part: Pattern) -> Pattern:
        while True:
            token = self._peek()
            if token.text in _TIMES:
                least, most = _TIMES[token.text]
            elif token.kind == "count":
                first, comma, last = token.text.strip("{} \n\t").replace(" ", "").partition(",")
                least = int(first or 0)
                most = int(last) if last else None if comma else least
            else:
                return part
            if (times := max(least, most or 0)) > MAX_REPEAT:
                raise error_at(self._text, f"repeats {times} times, over the limit of {MAX_REPEAT},", token.at)
            if most is not None and most < least:
                raise error_at(self._text, f"repeats at least {least} and at most {most} times", token.at)
            part = Repeat(part, least, most)
            self._at += 1

    def _item(self) -> Pattern:
        token = self._take()
        match token.kind, token.text:
            case "name", name:
                self._references.setdefault(name, token.at)
                return Name(name)
            case "string", quoted:
                return literal(string_at(self._text, quoted, token.at))
            case "set", source:
                return pattern_at(self._text, _LONG_ESCAPE.sub(r"\\u{\1}", source), token.at)
            case _, "(":
                return self._group()
            case _, ".":
                return CharacterClass(ALL)
        self._at -= 1
        raise self._unexpected("where a rule's name, a string, a set or a group should be")

    def _group(self) -> Pattern:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._unexpected(f"in groups deeper than the limit of {MAX_NESTING}")
        inner = self._alternatives()
        if not self._skip(")"):
            raise self._unexpected("where ')' should be")
        self._depth -= 1
        return inner
