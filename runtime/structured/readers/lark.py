"""Grammars in Lark's form. Lark's priorities, aliases and names of kept rules do not change which texts there are."""

from __future__ import annotations

import re
from functools import cache

from runtime.structured.pattern import (
    Alternation,
    CharacterClass,
    Concatenation,
    Pattern,
    Ranges,
    Reference,
    Repetition,
    literal,
    ranges,
    shown,
)
from runtime.structured.readers.ebnf import COUNT, STRING, GrammarText, Reader, Token, text_of


def read_lark(text: str) -> GrammarText:
    """A grammar in Lark's form, which begins with `start`; raises GrammarError."""
    return _Lark(text).read()


class _Lark(Reader):
    tokens = re.compile(
        rf"(?P<space>(?:\s|//[^\n]*|\#[^\n]*)+)|(?P<name>_?(?:[a-z][a-z0-9_-]*|[A-Z][A-Z0-9_]*)\b)"
        rf"|(?P<string>{STRING}i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)|(?P<count>{COUNT})|(?P<number>-?\d+)"
        r"|(?P<directive>%[a-z]+)|(?P<mark>->|\.\.|[|()\[\]*+?:!.,~])",
    )

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._ignored: list[Pattern] = []
        self._is_terminal = False  # the rule that is being read

    def read(self) -> GrammarText:
        while self._peek().kind != "end":
            if self._peek().kind == "directive":
                self._directive(self._take())
            else:
                self._rule()
            if not self._peek().begins_line:
                raise self._unexpected("where a new line should be")
        grammar = self.finish("start")
        ignored = Repetition(Alternation(tuple(self._ignored)), 0, None) if self._ignored else Concatenation(())
        start = Concatenation((Reference(_IGNORED), Reference(grammar.start)))
        return GrammarText({**grammar.rules, _IGNORED: ignored, _START: start}, _START)

    def _rule(self) -> None:
        while self._peek().text in ("?", "!"):
            self._at += 1
        name = self._peek()
        if name.kind != "name":
            raise self._unexpected("where a rule should begin")
        self._at += 1
        if self._skip("."):  # a priority
            self._at += self._peek().kind == "number"
        if self._peek().text != ":":
            raise self._unexpected("where ':' should be; templates and attributes of rules are not supported,")
        self._at += 1
        self._is_terminal = _names_terminal(name.text)
        self.define(name.text, self._expression(), name.at)

    def _directive(self, token: Token) -> None:
        match token.text:
            case "%ignore":
                self._is_terminal = True
                self._ignored.append(self._expression())
            case "%import":
                self._import()
            case _:
                raise self._error(f"has {token.text}, which is not supported,", token.at)

    def _import(self) -> None:
        if self._take().text != "common":
            self._at -= 1
            raise self._unexpected("to import from; only common is supported,")
        if self._skip("."):
            wanted = [self._take()]
        else:
            self._expect("(")
            wanted = [self._take()]
            while self._skip(","):
                wanted.append(self._take())
            self._expect(")")
        for token in wanted:
            if (found := _common().get(token.text)) is None:
                raise self._error(f"imports {shown(token.text)}, which common has not,", token.at)
            name = self._take() if self._skip("->") else token
            self.define(name.text, found, name.at)

    def _ends_rule(self) -> bool:
        token = self._peek()
        return token.kind == "end" or (not self._depth and token.begins_line and token.text != "|")

    def _atom(self) -> Pattern | None:
        if self._skip("->"):
            self._at += 1  # an alias of the option
        if self._ends_rule() or self._peek().text in ("|", ")", "]"):
            return None
        token = self._take()
        match token.kind, token.text:
            case "name", name:
                return self._spaced(self._refer(token)) if _names_terminal(name) else self._refer(token)
            case "string", text:
                return self._spaced(self._string(token, text))
            case "regex", text:
                source, _, flags = text[1:].rpartition("/")
                if set(flags) - set("imu"):
                    raise self._error(f"has the flags {flags!r}; only i is supported,", token.at)
                found = self._pattern(source.replace("\\/", "/"), token.at)
                return self._spaced(_in_any_case(found) if "i" in flags else found)
            case _, "(":
                return self._group(")")
            case _, "[":
                return Repetition(self._group("]"), 0, 1)
        self._at -= 1
        raise self._unexpected("where a name, a string, an expression or a group should be")

    def _spaced(self, terminal: Pattern) -> Pattern:
        """A terminal, after which ignored texts may follow in a rule."""
        return terminal if self._is_terminal else Concatenation((terminal, Reference(_IGNORED)))

    def _string(self, token: Token, quoted: str) -> Pattern:
        text = text_of(self, token, quoted.removesuffix("i"))
        if self._peek().text != "..":
            return _in_any_case(literal(text)) if quoted.endswith("i") else literal(text)
        self._at += 1
        end = self._take()
        last = text_of(self, end, end.text) if end.kind == "string" else ""
        if len(text) != 1 or len(last) != 1 or text > last:
            raise self._error("has a range that is none", token.at)
        return CharacterClass(ranges([(ord(text), ord(last))]))

    def _repeated(self, part: Pattern) -> Pattern:
        part = super()._repeated(part)
        if self._peek().text == "~" and not self._ends_rule():
            self._at += 1
            token = self._take()
            last = self._take() if self._skip("..") else token
            if token.kind != "number" or last.kind != "number":
                raise self._error("has no numbers after '~'", token.at)
            part = self._times(part, int(token.text), int(last.text), token)
        return part


_IGNORED, _START = "%ignore", "%start"  # no grammar has such names


def _names_terminal(name: str) -> bool:
    return name.lstrip("_")[:1].isupper()


def _in_any_case(pattern: Pattern) -> Pattern:
    match pattern:
        case CharacterClass(these):
            return CharacterClass(ranges((*these, *_cased(these, 65, 32), *_cased(these, 97, -32))))
        case Concatenation(parts):
            return Concatenation(tuple(map(_in_any_case, parts)))
        case Alternation(parts):
            return Alternation(tuple(map(_in_any_case, parts)))
        case Repetition(part, least, most):
            return Repetition(_in_any_case(part), least, most)
    return pattern


def _cased(these: Ranges, first: int, shift: int) -> list[tuple[int, int]]:
    """ASCII's letters from `first` on, moved."""
    pairs = [(max(low, first), min(high, first + 25)) for low, high in these]
    return [(low + shift, high + shift) for low, high in pairs if low <= high]


_COMMON = r"""
DIGIT: "0".."9"
HEXDIGIT: "a".."f"|"A".."F"|DIGIT
INT: DIGIT+
SIGNED_INT: ["+"|"-"] INT
DECIMAL: INT "." INT? | "." INT
_EXP: ("e"|"E") SIGNED_INT
FLOAT: INT _EXP | DECIMAL _EXP?
SIGNED_FLOAT: ["+"|"-"] FLOAT
NUMBER: FLOAT | INT
SIGNED_NUMBER: ["+"|"-"] NUMBER
ESCAPED_STRING: /"(?:[^"\\\n]|\\[^\n])*"/
LCASE_LETTER: "a".."z"
UCASE_LETTER: "A".."Z"
LETTER: UCASE_LETTER | LCASE_LETTER
WORD: LETTER+
CNAME: ("_"|LETTER) ("_"|LETTER|DIGIT)*
WS_INLINE: (" "|/\t/)+
WS: /[ \t\f\r\n]/+
CR: /\r/
LF: /\n/
NEWLINE: (CR? LF)+
SH_COMMENT: /#[^\n]*/
CPP_COMMENT: /\/\/[^\n]*/
C_COMMENT: "/*" /(?:[^*]|\*+[^*\/])*\*+/ "/"
SQL_COMMENT: /--[^\n]*/
"""


@cache
def _common() -> dict[str, Pattern]:
    """Lark's common terminals."""
    reader = _Lark(_COMMON)
    while reader._peek().kind != "end":
        reader._rule()
    found: dict[str, Pattern] = {}
    for name, pattern in reader.rules.items():
        found[name] = _inlined(pattern, found)
    return found


def _inlined(pattern: Pattern, known: dict[str, Pattern]) -> Pattern:
    match pattern:
        case Reference(name):
            return known[name]
        case Concatenation(parts):
            return Concatenation(tuple(_inlined(part, known) for part in parts))
        case Alternation(parts):
            return Alternation(tuple(_inlined(part, known) for part in parts))
        case Repetition(part, least, most):
            return Repetition(_inlined(part, known), least, most)
    return pattern
