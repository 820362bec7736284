"""Rules for lists and objects within arguments that are written one by one, in the format's own notation.

Gemma 4 writes `[<|"|>a<|"|>]` and `{b:1}`, without spaces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.structured.pattern import Name, Repeat
from runtime.structured.rules import Rule, choice, sequence, terminal, text
from runtime.structured.schema import numbers
from runtime.text.tool_calls.argument_form import SAYS_NOTHING, ArgumentForm, can_stand_bare, is_closed

_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}


@dataclass(frozen=True, slots=True)
class Notation:
    """Writes the rules of a format with quoted texts."""

    form: ArgumentForm
    quoted: Callable[[Mapping[str, Any]], Rule]  # the rule of a text, by its schema
    written: dict[str, Rule]  # takes the rules of objects

    def value(self, schema: Any, name: str) -> Rule | None:
        """Return the rule of a value; None for a schema that only JSON can follow.

        Args:
            name: begins the names of new rules."""
        if not isinstance(schema, Mapping):
            return None
        of = {key: value for key, value in schema.items() if key not in SAYS_NOTHING and key != "type"}
        match schema.get("type"):
            case "string" if can_stand_bare(self.form, schema):
                return self.quoted(schema)
            case "boolean" if not of:
                return terminal("(?:true|false)")
            case "integer" | "number" as kind if of.keys() <= _OF_NUMBERS:
                return numbers.rule({"type": kind, **of}, "")
            case "array" if of.keys() == {"items"}:
                return self._list(of["items"], name)
            case "object" if is_closed(schema):
                return self._object(of.get("properties", {}), of.get("required", []), name)
        return None

    def _list(self, items: Any, name: str) -> Rule | None:
        item = self.value(items, name)
        if item is None:
            return None
        more = Repeat(sequence(text(self.form.separator), item), 0, None)
        return choice([text("[]"), sequence(text("["), item, more, text("]"))])

    def _object(self, properties: Mapping[str, Any], required: list[str], name: str) -> Rule | None:
        rest: dict[bool, Rule] = {False: text("}"), True: text("}")}  # key: a property precedes
        for i, key in enumerate(sorted(properties, key=str.lower, reverse=True)):
            value = self.value(properties[key], f"{name}o{i}")
            if value is None:
                return None
            for has_one in (False, True):
                begin = text((self.form.separator if has_one else "") + key + self.form.to_value)
                given = sequence(begin, value, rest[True])
                self.written[f"{name}{'ab'[has_one]}{i}"] = given if key in required else choice([given, rest[has_one]])
            rest = {False: Name(f"{name}a{i}"), True: Name(f"{name}b{i}")}
        return sequence(text("{"), rest[False])
