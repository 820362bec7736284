"""Calls as JSON objects.

HERMES   <tool_call>\n{"name": "f", "arguments": {…}}\n</tool_call>   any number, anywhere       (Hermes, Qwen)
LLAMA3   {"name": "f", "parameters": {…}}; {…}                      at the start, or after <|python_tag|>"""

from __future__ import annotations

import json
import re

import msgspec

from runtime.text.tool_calls.parser import MAX_HEAD_CHARS, MAX_SPACES, JsonValue, ToolCallParser, ToolFormat
from runtime.text.tool_calls.written_values import dumped

_HEAD = re.compile(
    r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"[^"\\]*"\s*,\s*)?"(?:tool_)?name"\s*:\s*"([^"\\]*)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\{\s*(?:"([a-z_]*)([^a-z_])|[^"\s])')
_KEYS = {"name", "type", "id", "arguments", "parameters", "tool_name", "tool_call_id"}
_MAX_HALF_CHARS = 64 << 10  # largest object for Python's own parser
_NONE = {"null", '""', "[]", "false", "0"}  # written by some models for empty arguments
_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SPACES, _SPACES_AND_BRACKET = re.compile(r"\s*"), re.compile(r"\s*(?:\[\s*)?")


class JsonObjectParser(ToolCallParser):
    """Parses calls with any order of keys. In the usual order, it returns the arguments as they arrive."""

    def _opening(self, final: bool) -> bool:
        """At the place where a call's object must begin."""
        form, text = self._form, self._held
        lead = (_SPACES_AND_BRACKET if form.close else _SPACES).match(text, self._at)
        assert lead is not None, "it matches the empty text"
        num_before, start = lead.end() - lead.start(), lead.end()
        if num_before <= MAX_SPACES and text[start : start + 1] == "{":
            self._at = self._scanned = start
            self._value = JsonValue()
            self._state = self._object
            return True
        if final and self.num_calls and text.strip() == form.separator:
            self._held = ""
        if final or start < len(text) or num_before > MAX_SPACES:
            return self._give_back(self._at)
        return False

    def _object(self, final: bool) -> bool:
        """Inside an object that may be a call."""
        text, start = self._held, self._at
        head_end = start + MAX_HEAD_CHARS
        if (head := _HEAD.match(text, start, head_end)) and self._may_call(head[1]):
            self._begin(head[1])
            self._held = text[head.end() :]
            self._state = self._begun_arguments
            return True
        key = _FIRST_KEY.match(text, start, head_end)
        if (len(text) >= head_end) if key is None else (key[1] not in _KEYS or key[2] != '"'):
            return self._give_back(start + 1)
        self._scanned, ended = self._value.read(text, self._scanned)
        if not ended:
            return self._give_back(len(text)) if final else False
        if self._value.depth or (call := self._whole(text[start : self._scanned])) is None:
            return self._give_back(self._scanned)
        self._begin(call[0])
        self._give(call[1])
        self._held = text[self._scanned :]
        return self._end(self._after_object)

    def _after_arguments(self, final: bool) -> bool:
        text = self._held = self._held.lstrip()
        if not text:
            return False
        if text[0] == ",":
            self._value = JsonValue(depth=1)
            self._state = self._other_keys
            return True
        self._held = text.removeprefix("}")
        return self._end(self._after_object)

    def _other_keys(self, final: bool) -> bool:
        """In the keys after a call's arguments, such as `"type"` or `"id"`, which are ignored."""
        end, ended = self._value.read(self._held, 0)
        self._held = self._held[end:]
        return self._end(self._after_object) if ended else False

    def _after_object(self, final: bool) -> bool:
        """At an optional end mark."""
        if self._skips(self._form.end.removeprefix("}").lstrip(), final) is None:
            return False
        self._state = self._after_call
        return True

    def _after_call(self, final: bool) -> bool:
        self._held = self._held.lstrip()
        if not self._held:
            return False
        first, separator = self._held[0], self._form.separator
        self._state = self._after_list
        if separator and first in (separator, "{"):
            self._at = int(first == separator)
            self._state = self._opening
        return True

    def _after_list(self, final: bool) -> bool:
        """At an optional end of a list, and at the mark behind it."""
        close = self._form.close.strip()
        if self._skips(close[:1] if close[:1] == "]" else "", final) is None:
            return False
        self._state = self._after_close
        return True

    def _after_close(self, final: bool) -> bool:
        if self._skips(self._form.close.strip().removeprefix("]"), final) is None:
            return False
        return self._after_calls(final)

    def _whole(self, text: str) -> tuple[str, str] | None:
        """Return name and arguments of a call with keys in another order; None if the object is not a call."""
        try:
            call = {key: bytes(value).decode() for key, value in _decoder.decode(text).items()}
        except (ValueError, RecursionError):
            if (whole_call := _with_half_characters(text)) is None:
                return None
            call = whole_call
        name = json.loads(call.get("name", call.get("tool_name", "null")))
        if not self._may_call(name):
            return None
        arguments = call.get("arguments", call.get("parameters", "{}"))
        if arguments in _NONE:
            return name, "{}"
        if arguments[0] == '"':  # JSON in a string, possibly with an escaped lone surrogate
            arguments = json.loads(arguments).encode("utf-8", "replace").decode()
        return name, arguments


def _with_half_characters(text: str) -> dict[str, str] | None:
    """Return the fields of an object as JSON, with escaped lone surrogates; None if the text is not JSON."""
    if "\\u" not in text or len(text) > _MAX_HALF_CHARS:
        return None
    try:
        return {key: dumped(value) for key, value in json.loads(text).items()}
    except (ValueError, RecursionError):  # JSON cannot represent some numbers either
        return None


_BEGIN = '{"name": "'
HERMES = ToolFormat(
    JsonObjectParser,
    mark="<tool_call>",
    marks=("<tool_call>", "</tool_call>"),
    begin="<tool_call>\n" + _BEGIN,
    to_arguments='", "arguments":',
    end="}\n</tool_call>",
    again="\n<tool_call>\n" + _BEGIN,
    ends_reasoning=True,
)
LLAMA3 = ToolFormat(
    JsonObjectParser,
    mark="<|python_tag|>",
    marks=("<|python_tag|>",),
    bare=r'\s*\{\s*"(type|id|name|arguments|parameters)"',
    begin=_BEGIN,
    to_arguments='", "parameters":',
    end="}",
    again="; " + _BEGIN,
    separator=";",
)
