"""Grammars as clients write them: what all forms share, and EBNF (llama.cpp's GBNF, SGLang's and XGrammar's).

A grammar says which texts there are, character by character, and any way of reading a text will do: Lark's priorities,
aliases and names of kept rules say nothing here. What a grammar looks ahead or behind to is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from runtime.structured.pattern import (
    ALL,
    MAX_NESTING,
    MAX_REPEAT,
    Alternation,
    CharacterClass,
    Concatenation,
    GrammarError,
    Pattern,
    Reference,
    Repetition,
    literal,
    shown,
    whole,
)
from runtime.structured.rules import MAX_RULES

COUNT = r"\{\s*\d*\s*(?:,\s*\d*\s*)?\}"
STRING = r'"(?:\\.|[^"\\\n])*"'


@dataclass(frozen=True, slots=True)
class GrammarText:
    """The rules of a grammar; each reference leads to one of them."""

    rules: dict[str, Pattern]
    start: str


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    at: int
    begins_line: bool


class Reader:
    """The part that both forms share: options of sequences of repeated items."""

    tokens: re.Pattern[str]

    def __init__(self, text: str) -> None:
        self._text = text
        self.rules: dict[str, Pattern] = {}
        self._places: dict[str, int] = {}  # where each rule is first referred to
        self._depth = 0
        self._at = 0
        self._tokens = self._cut()

    def finish(self, start: str) -> GrammarText:
        for name, at in self._places.items():
            if name not in self.rules:
                raise self._error(f"refers to {shown(name)}, which is not defined,", at)
        if start not in self.rules:
            raise GrammarError(f"has no rule {start!r}, with which it would begin")
        return GrammarText(self.rules, start)

    def define(self, name: str, pattern: Pattern, at: int) -> None:
        if name in self.rules:
            raise self._error(f"defines {shown(name)} again", at)
        if len(self.rules) == MAX_RULES:
            raise GrammarError(f"has over {MAX_RULES} rules, the limit")
        self.rules[name] = pattern

    # ---- tokens -----------------------------------------------------------------------------------------------------

    def _cut(self) -> list[Token]:
        found: list[Token] = []
        at, begins_line = 0, True
        while at < len(self._text):
            if not (match := self.tokens.match(self._text, at)):
                raise self._error(f"has {shown(self._text[at : at + 10])}, which is not understood,", at)
            if match.lastgroup == "space":
                begins_line = begins_line or "\n" in match[0]
            else:
                found.append(Token(str(match.lastgroup), match[0], at, begins_line))
                begins_line = False
            at = match.end()
        found.append(Token("end", "", at, True))
        return found

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

    def _expect(self, text: str) -> None:
        if not self._skip(text):
            raise self._unexpected(f"where {text!r} should be")

    def _error(self, problem: str, at: int) -> GrammarError:
        line = self._text.count("\n", 0, at) + 1
        column = at - self._text.rfind("\n", 0, at)
        return GrammarError(f"{problem} at line {line}, column {column}")

    def _unexpected(self, why: str) -> GrammarError:
        token = self._peek()
        what = "ends" if token.kind == "end" else f"has {shown(token.text)}"
        return self._error(f"{what} {why}", token.at)

    # ---- expressions ------------------------------------------------------------------------------------------------

    def _expression(self) -> Pattern:
        options = [self._sequence()]
        while self._skip("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Alternation(tuple(options))

    def _sequence(self) -> Pattern:
        parts = []
        while (atom := self._atom()) is not None:
            parts.append(self._repeated(atom))
        return parts[0] if len(parts) == 1 else Concatenation(tuple(parts))

    def _repeated(self, part: Pattern) -> Pattern:
        while not self._ends_rule():
            token = self._peek()
            if token.text in _TIMES:
                least, most = _TIMES[token.text]
            elif token.kind == "count":
                first, comma, last = token.text.strip("{} \n\t").replace(" ", "").partition(",")
                least = int(first or 0)
                most = int(last) if last else None if comma else least
            else:
                return part
            part = self._times(part, least, most, token)
            self._at += 1
        return part

    def _times(self, part: Pattern, least: int, most: int | None, token: Token) -> Pattern:
        if max(least, most or 0) > MAX_REPEAT:
            raise self._error(f"repeats {max(least, most or 0)} times, over the limit of {MAX_REPEAT},", token.at)
        if most is not None and most < least:
            raise self._error(f"repeats at least {least} and at most {most} times", token.at)
        return Repetition(part, least, most)

    def _group(self, close: str) -> Pattern:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise self._unexpected(f"in groups deeper than the limit of {MAX_NESTING}")
        inner = self._expression()
        self._expect(close)
        self._depth -= 1
        return inner

    def _refer(self, token: Token) -> Reference:
        self._places.setdefault(token.text, token.at)
        return Reference(token.text)

    def _pattern(self, source: str, at: int) -> Pattern:
        """A regular expression of the whole of its text."""
        try:
            return whole(source)
        except GrammarError as e:
            raise self._error(f"{e},", at) from None

    def _ends_rule(self) -> bool:
        raise NotImplementedError

    def _atom(self) -> Pattern | None:
        """The next item of a sequence; None at its end."""
        raise NotImplementedError


_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "a": "\a", "0": "\0"}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)


def _unescaped(text: str) -> str:
    """The text of a string without its quotes; raises ValueError for an escape that is not known."""

    def char(match: re.Match[str]) -> str:
        if match[4] is None:
            return chr(int(match[1] or match[2] or match[3], 16))
        if match[4].isalnum() and match[4] not in _ESCAPES:
            raise ValueError(match[0])
        return _ESCAPES.get(match[4], match[4])

    return _ESCAPE.sub(char, text)


def text_of(reader: Reader, token: Token, quoted: str) -> str:
    try:
        text = _unescaped(quoted[1:-1])
        text.encode()
    except ValueError as e:  # or half a character
        raise reader._error(f"has the string {shown(quoted)} with a wrong escape ({shown(str(e))})", token.at) from None
    return text


# ---- EBNF ------------------------------------------------------------------------------------------------------------


class _Ebnf(Reader):
    tokens = re.compile(
        rf"(?P<space>(?:\s|\#[^\n]*)+)|(?P<name>[A-Za-z0-9_][A-Za-z0-9_-]*)|(?P<string>{STRING})"
        rf"|(?P<set>\[(?:\\.|[^\]\\])*\])|(?P<count>{COUNT})|(?P<mark>::=|[|()*+?.])",
        re.DOTALL,
    )

    def read(self) -> GrammarText:
        while self._peek().kind != "end":
            name = self._peek()
            if name.kind != "name":
                raise self._unexpected("where the name of a rule should be")
            self._at += 1
            self._expect("::=")
            self.define(name.text, self._expression(), name.at)
            if not self._ends_rule():
                raise self._unexpected("where the next rule should begin")
        return self.finish("root")

    def _ends_rule(self) -> bool:
        token = self._peek()
        return token.kind == "end" or (token.kind == "name" and self._peek(1).text == "::=")

    def _atom(self) -> Pattern | None:
        if self._ends_rule() or self._peek().text in ("|", ")"):
            return None
        token = self._take()
        match token.kind, token.text:
            case "name", _:
                return self._refer(token)
            case "string", text:
                return literal(text_of(self, token, text))
            case "set", text:
                return self._pattern(_ESCAPED_U.sub(r"\\u{\1}", text), token.at)
            case _, "(":
                return self._group(")")
            case _, ".":
                return CharacterClass(ALL)
        self._at -= 1
        raise self._unexpected("where a rule's name, a string, a set or a group should be")


_ESCAPED_U = re.compile(r"\\U(?:00)?([0-9a-fA-F]{6})")


def read_ebnf(text: str) -> GrammarText:
    """A grammar of rules `name ::= ...`, which begins with `root`; raises GrammarError."""
    return _Ebnf(text).read()
