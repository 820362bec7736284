"""Grammars in Lark's form. llguidance reads them; this file checks them before and spells them for JSON strings.

llguidance cuts a text into terminals like Lark: each one takes as much text as it can. The checks refuse tokens, inline
JSON Schemas and a rule's attributes other than `capture` and `max_tokens`. Priorities, `!` before a rule, `capture` and
an empty `%llguidance {}` become spaces: they change no text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import llguidance

from runtime.structured.pattern import (
    MAX_REPEAT,
    CharacterClass,
    GrammarError,
    Pattern,
    escaped,
    in_any_case,
    literal,
    plain,
    ranges,
    shown,
)
from runtime.structured.readers.regex import whole
from runtime.structured.readers.tokens import COUNT, STRING, Token, error_at, pattern_at, string_at, tokens_of

_FORMS = re.compile(
    rf"(?P<space>(?:\s|//[^\n]*|\#[^\n]*)+)|(?P<name>[?!]*_?(?:[a-z][a-z0-9_-]*|[A-Z][A-Z0-9_]*)\b)"
    rf"|(?P<string>{STRING}i?)|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)|(?P<count>{COUNT})|(?P<number>-?\d+)"
    r"|(?P<directive>%[a-z]+)|(?P<limit>\[max_tokens=\d+\])|(?P<mark>->|\.\.|[|()\[\]*+?:!.,~])"
)
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): (.*)")  # the place in an llguidance error
_EMPTY_OPTIONS = re.compile(r"\s*%llguidance\s*\{\s*\}")  # guidance writes it before each grammar
_ATTRIBUTES = re.compile(rf"(?m)(?<=\w)\[((?:{STRING}|[^\]\"\n])+)\](?=[ \t]*:)")
_ATTRIBUTE = re.compile(rf"\s*(\w+)((?:{STRING}|[^,\"])*)(?:,|$)")
_DIGITS = re.compile(r"\d+")
# Lark's common terminals, as regular expressions.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "FLOAT": r"[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_FLOAT": r"[+-]?(?:[0-9]+[eE][+-]?[0-9]+|(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)",
    "NUMBER": r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*(?:[^*]|\*+[^*\/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}


def read_lark(text: str) -> str:
    """Return a grammar as llguidance reads it, with every token in its place. Raises GrammarError."""
    if options := _EMPTY_OPTIONS.match(text):
        text = re.sub(r"[^\n]", " ", options[0]) + text[options.end() :]
    text = _ATTRIBUTES.sub(_limit, text)
    tokens = tokens_of(text, _FORMS)
    for token, after, later in zip(tokens, tokens[1:], [*tokens[2:], tokens[-1]], strict=False):
        if token.kind == "directive" and token.text not in ("%ignore", "%import"):
            raise error_at(text, f"has {token.text}, which is not supported,", token.at)
        if token.text == "%import" and after.text != "common":
            raise error_at(text, f"imports from {shown(after.text)}; only common is supported,", after.at)
        if token.kind in ("count", "number") and (most := max(map(int, _DIGITS.findall(token.text)))) > MAX_REPEAT:
            raise error_at(text, f"repeats {most} times, over the limit of {MAX_REPEAT},", token.at)
        if token.kind == "name" and token.text.startswith(("!", "?!")):
            at = text.index("!", token.at)
            text = f"{text[:at]} {text[at + 1 :]}"
        if token.kind == "name" and token.begins_line and after.text == "." and later.kind == "number":
            end = later.at + len(later.text)
            text = text[: after.at] + " " * (end - after.at) + text[end:]
    if problem := llguidance.LLMatcher.validate_grammar(text).partition("\n")[0]:
        place = _PLACE.match(problem)
        where = f" at line {place[1]}, column {place[2]}" if place else ""
        raise GrammarError(f"cannot be read{where}: {place[3] if place else problem}")
    return text


def _limit(attributes: re.Match[str]) -> str:
    """Return the attributes of a rule without its capture, at the same length. Raises GrammarError."""
    kept = ""
    for name, value in _ATTRIBUTE.findall(attributes[1]):
        if name == "max_tokens" and (number := re.fullmatch(r"\s*=\s*(\d+)\s*", value)):
            kept = f"[max_tokens={number[1]}]"
        elif name != "capture":
            problem = f"has the attribute {name}; a rule may have capture and max_tokens,"
            raise error_at(attributes.string, problem, attributes.start(1))
    return kept.ljust(len(attributes[0]))


def in_json_string(text: str) -> str:
    """Return a grammar for the same texts between a JSON string's quotes. Raises GrammarError.

    `text` comes from `read_lark`. Each string, expression and imported terminal becomes an expression for its escaped
    form. Rules stay as they are: they only concatenate, alternate and repeat terminals."""
    written, end = [], 0
    for at, after, new in _replaced(text, tokens_of(text, _FORMS)):
        written += [text[end:at], new]
        end = after
    return "".join([*written, text[end:]])


def _replaced(text: str, tokens: list[Token]) -> Iterator[tuple[int, int, str]]:
    """Yield the changes for `in_json_string`: begin and end of each changed part, and its new text."""
    i = 0
    while i < len(tokens):
        token, i = tokens[i], i + 1
        if token.kind == "string" and tokens[i].text == "..":
            ends = [string_at(text, each.text, each.at) for each in (token, tokens[i + 1])]
            characters = CharacterClass(ranges([(ord(ends[0]), ord(ends[1]))]))
            yield token.at, tokens[i + 1].at + len(tokens[i + 1].text), _terminal(characters)
            i += 2
        elif token.kind == "string":
            found: Pattern = literal(string_at(text, token.text.removesuffix("i"), token.at))
            found = in_any_case(found) if token.text.endswith("i") else found
            yield token.at, token.at + len(token.text), _terminal(found)
        elif token.kind == "regex":
            source, _, flags = token.text[1:].rpartition("/")
            if set(flags) - {"i"}:
                raise error_at(text, f"has the flags {flags!r} in a JSON string; only i is supported,", token.at)
            found = pattern_at(text, source.replace("\\/", "/"), token.at)
            yield token.at, token.at + len(token.text), _terminal(in_any_case(found) if flags else found)
        elif token.text == "%import":
            end = next(j for j in range(i, len(tokens)) if tokens[j].begins_line)
            names = [each.text for each in tokens[i + 1 : end] if each.kind == "name"]
            pairs = [(names[0], names[-1])] if "->" in text[token.at : tokens[end].at] else [(n, n) for n in names]
            definitions = [f"{alias}: {_terminal(whole(_COMMON[name]))}" for name, alias in pairs]
            yield token.at, tokens[end].at, "\n".join([*definitions, ""])
            i = end


def _terminal(pattern: Pattern) -> str:
    return f"/{expression}/" if (expression := plain(escaped(pattern))) else '""'
