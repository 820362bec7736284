"""Calls of Gemma 4: `<|tool_call>call:f{a:1,b:<|"|>text<|"|>}<tool_call|>`."""

from __future__ import annotations

import re

from runtime.text.tool_calls.argument_form import ArgumentForm
from runtime.text.tool_calls.json_objects import HERMES
from runtime.text.tool_calls.name_first import PlainArgumentsParser, name_up_to
from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, ToolFormat
from runtime.text.tool_calls.written_values import as_json, json_text

_QUOTE = '<|"|>'  # around a text
_KEY = re.compile(r',?\s*(?:<\|"\|>|")?([^<>:,{}\[\]"]+)(?:<\|"\|>|")?\s*:\s*')
_END_OF_QUOTED = re.compile(re.escape(_QUOTE))
_TOKEN = re.compile(
    r'\s*(?:<\|"\|>(.*?)<\|"\|>|("(?:[^"\\]|\\.)*")|([{}\[\],:])|([^\s{}\[\],:<"][^{}\[\],:<"]*)|(.))', re.DOTALL
)
_OUTSIDE_TEXT = re.compile(r'<\|"\|>|["{}\[\],<]')
_IN_TEXT = {_QUOTE: _END_OF_QUOTED, '"': re.compile(r'"|\\.', re.DOTALL)}
_MAX_DEPTH = 64


class Gemma4Parser(PlainArgumentsParser):
    """A text is returned as it arrives, any other value when it is complete."""

    head = re.compile(rf"\s*(?:call)?:\s*{name_up_to('<{')}\s*\{{")
    ends = ("<tool_call|>",)
    _value_end: _ValueEnd

    def _key(self, final: bool) -> bool:
        text = self._held = self._held.lstrip()
        if key := _KEY.match(text, 0, MAX_HEAD_CHARS):
            rest = text[key.end() :]
            if rest != _QUOTE and _QUOTE.startswith(rest) and not final:  # the value may begin with a quote
                return False
            self._give_key(key[1].strip())
            self._held = rest
            self._state, self._value_end = self._value_text, _ValueEnd()
            if self._held.startswith(_QUOTE):
                self._give('"')
                self._held = self._held.removeprefix(_QUOTE)
                self._state = self._quoted
            return True
        if text[:1] not in ("}", "<") and not final and len(text) < MAX_HEAD_CHARS:
            return False
        self._give_end()
        self._held = text.removeprefix("}")
        return self._after_arguments(final)

    def _quoted(self, final: bool) -> bool:
        text, ended = self._up_to(_END_OF_QUOTED, (_QUOTE,), final)
        self._give(json_text(text))
        if ended:
            self._give('"')
            self._state = self._key
        return ended

    def _value_text(self, final: bool) -> bool:
        end = self._value_end.find(self._held)
        if end is None:
            if final:
                self._held = ""
            return False
        value, _ = _json_of(_tokens(self._held[:end]), 0)
        self._give(value if value[:1] in '{["' else as_json(value, self._types))
        self._held = self._held[end:]
        self._state = self._key
        return True


def _tokens(text: str) -> list[tuple[str, str]]:
    """The texts, marks and words of a value, each with its kind."""
    tokens = []
    for quoted, json_string, mark, word, other in _TOKEN.findall(text):
        if mark:
            tokens.append(("mark", mark))
        elif word or other:
            tokens.append(("word", (word or other).strip()))
        else:
            tokens.append(("json", json_string or f'"{json_text(quoted)}"'))
    return [token for token in tokens if token[1]]


class _ValueEnd:
    """Searches a value's end in a text that grows: a comma or a bracket that does not belong to it."""

    def __init__(self) -> None:
        self._at, self._depth, self._quote = 0, 0, ""  # the place reached, open brackets, the quote of an open text

    def find(self, text: str) -> int | None:
        """Return the end; None if it is not there yet."""
        while match := (_IN_TEXT[self._quote] if self._quote else _OUTSIDE_TEXT).search(text, self._at):
            token, start = match[0], match.start()
            if token == "<" and _QUOTE.startswith(text[start:]):  # perhaps a quote
                self._at = start
                return None
            if not (self._quote or self._depth) and token in ("}", "]", ",", "<"):
                return start
            self._at = match.end()
            if token in (_QUOTE, '"'):
                self._quote = "" if self._quote else token
            elif not self._quote:
                self._depth += (token in ("{", "[")) - (token in ("}", "]"))
        self._at = max(self._at, len(text) - len(_QUOTE) + 1 if self._quote else len(text))
        return None


def _json_of(tokens: list[tuple[str, str]], at: int, depth: int = 0) -> tuple[str, int]:
    """The JSON of the value at `at`, and the index after the value. Nothing at all is null."""
    if at >= len(tokens) or depth > _MAX_DEPTH:
        return "null", len(tokens)
    kind, token = tokens[at]
    if kind != "mark":
        return (token if kind == "json" or depth == 0 else as_json(token, frozenset())), at + 1
    if token not in "{[":
        return "null", at + 1
    at, parts, close = at + 1, list[str](), "}" if token == "{" else "]"
    while at < len(tokens) and tokens[at] != ("mark", close):
        if tokens[at] == ("mark", ","):
            at += 1
            continue
        key = ""
        if token == "{":
            key_token = tokens[at]
            key = (key_token[1] if key_token[0] == "json" else f'"{json_text(key_token[1])}"') + ": "
            at += 2
        value, at = _json_of(tokens, at, depth + 1)
        parts.append(key + value)
    return token + ", ".join(parts) + close, at + 1


GEMMA4 = ToolFormat(
    Gemma4Parser,
    mark="<|tool_call>",
    marks=("<|tool_call>", "<tool_call|>", _QUOTE),
    begin="<|tool_call>call:",
    to_arguments="{",
    arguments=ArgumentForm("", ":", "", separator=",", stops=(_QUOTE,), quote=_QUOTE, is_sorted=True),
    end="}<tool_call|>",
    again="<|tool_call>call:",
    json_form=HERMES,
)
