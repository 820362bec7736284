"""Structural tags: free text with regions that follow grammars, as XGrammar, vLLM and SGLang write them.

Free text goes up to a trigger. The trigger begins a region: the rest of a tag's `begin`, content in its own
format, and the tag's `end`. Free text follows again."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from runtime.structured.pattern import (
    Choice,
    GrammarError,
    Name,
    Pattern,
    Repeat,
    Sequence,
    literal,
    literal_text,
    plain,
    shown,
)
from runtime.structured.readers import context_free
from runtime.structured.readers.ebnf import START, read_ebnf
from runtime.structured.readers.lark import read_lark
from runtime.structured.readers.regex import whole
from runtime.structured.rules import (
    NOTHING,
    SPACES,
    LarkGrammar,
    Rule,
    Shortest,
    Terminal,
    choice,
    optional,
    sequence,
    terminal,
    text,
)
from runtime.structured.schema import writer as schema
from runtime.structured.schema.merge import TerminalChecks

_ANY = "(?s:.*)"
MAX_NESTED = 32  # formats within formats


class _Format(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """A format of text; the field `type` names its class."""


class ConstString(_Format, tag="const_string"):
    value: str


class JsonValue(_Format, tag="json_schema"):
    json_schema: dict[str, Any] | bool


class Expression(_Format, tag="regex"):
    pattern: str


class GrammarFormat(_Format, tag="grammar"):
    grammar: str


class AnyText(_Format, tag="any_text"):
    """Free text, up to the end of the tag around it."""


class Elements(_Format, tag="sequence"):
    elements: list[Format]


class Options(_Format, tag="or"):
    elements: list[Format]


class Tag(_Format, tag="tag"):
    begin: str
    content: Format
    end: str


class TriggeredTags(_Format, tag="triggered_tags"):
    """Free text with tags. The beginning of each tag starts with a trigger. Free text contains no trigger."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False  # the text begins with a tag
    stop_after_first: bool = False  # the text ends with the first tag


class SeparatedTags(_Format, tag="tags_with_separator"):
    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonValue
    | Expression
    | GrammarFormat
    | AnyText
    | Elements
    | Options
    | Tag
    | TriggeredTags
    | SeparatedTags
)


def grammar_rules(source: str, end: str = "", prefix: str = "") -> dict[str, Rule]:
    """Return the rules of a grammar and the text after it, the first one `prefix` + "start". The grammar is EBNF if it
    has "::=", else Lark. Raises GrammarError with the line and the column."""
    if "::=" not in source:
        rule = LarkGrammar(read_lark(source))
        return {f"{prefix}start": Sequence((rule, text(end))) if end else rule}
    whole_text: Pattern = Sequence((Name(START), literal(end)))
    grammar = {**read_ebnf(source), "": whole_text}
    return context_free.rules_of(grammar, "" if end else START, prefix)


def rules_of(source: str, checks: TerminalChecks, ignored: list[str]) -> dict[str, Rule]:
    """Return the rules of a format, given as JSON. Raises GrammarError."""
    try:
        form = msgspec.json.decode(source, type=Format)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as e:
        raise GrammarError(f"cannot be read: {e}") from None
    writer = _Writer(checks, ignored)
    start = writer.write(form, "", "")
    return {"start": sequence(start, SPACES) if _may_go_on(form) else start, **writer.rules}


def _may_go_on(form: Format) -> bool:
    """Return True if a text may end where it may also go on, so that white space there would decide."""
    match form:
        case Elements(elements):
            return bool(elements) and _may_go_on(elements[-1])
        case Options(elements):
            return any(map(_may_go_on, elements))
        case SeparatedTags():
            return not form.stop_after_first
    return isinstance(form, JsonValue)


class _Writer:
    """Writes formats as rules."""

    def __init__(self, checks: TerminalChecks, ignored: list[str]) -> None:
        self.rules: dict[str, Rule] = {}
        self._checks, self._ignored = checks, ignored
        self._num_names = 0

    def write(self, form: Format, end: str, where: str) -> Rule:
        """Return the rule of a format and the text after it."""
        if where.count("/") > 2 * MAX_NESTED:
            raise GrammarError(f"nests formats deeper than the limit of {MAX_NESTED}")
        try:
            return self._written(form, end, where)
        except GrammarError as e:
            if isinstance(form, JsonValue | Expression | GrammarFormat):
                raise GrammarError(f"has a {form.__struct_config__.tag} at {where or '/'} that {e}") from None
            raise

    def _written(self, form: Format, end: str, where: str) -> Rule:
        match form:
            case ConstString(value):
                return text(value + end)
            case JsonValue(of):
                name = self._name()
                found = schema.rules_of(schema.read(json.dumps(of)), self._checks, None, name, None, self._ignored)
                self.rules |= found
                return sequence(Name(f"{name}start"), SPACES if end else NOTHING, text(end))
            case Expression(pattern):
                expression = plain(whole(pattern))
                return Shortest(expression + literal_text(end)) if end else terminal(expression)
            case GrammarFormat(grammar):
                name = self._name()
                self.rules |= grammar_rules(grammar, end, name)
                return Name(f"{name}start")
            case AnyText():
                return Shortest(_ANY + literal_text(end)) if end else terminal(_ANY)
            case Elements(elements):
                last = len(elements) - 1
                for i, each in enumerate(elements[:-1]):
                    if isinstance(each, AnyText | TriggeredTags):
                        raise GrammarError(
                            f"has free text at {where}/elements/{i}, which is supported only as the last"
                        )
                parts = [self.write(e, end * (i == last), f"{where}/elements/{i}") for i, e in enumerate(elements)]
                return _joined(*parts) if parts else text(end)
            case Options(elements):
                return _one_of([self.write(each, end, f"{where}/elements/{i}") for i, each in enumerate(elements)])
            case Tag():
                return _joined(text(form.begin), self._rest(form, where), text(end))
            case TriggeredTags():
                if end:
                    raise GrammarError(f"has tags in free text within a tag, at {where}, which is not supported")
                return self._triggered(form, where)
            case SeparatedTags(tags, separator):
                rests = [self._named(self._rest(tag, f"{where}/tags/{i}")) for i, tag in enumerate(tags)]
                one = choice(Sequence((text(tag.begin), rest)) for tag, rest in zip(tags, rests, strict=True))
                # One terminal up to where the tags' ends differ.
                between = sequence(SPACES, text(separator), SPACES if separator.isspace() else NOTHING)
                more = Repeat(
                    choice(sequence(between, text(t.begin), rest) for t, rest in zip(tags, rests, strict=True)), 0, None
                )
                all_tags = one if form.stop_after_first else Sequence((one, more))
                spaces = SPACES if end and not form.stop_after_first else NOTHING
                return sequence(all_tags if form.at_least_one else optional(all_tags), spaces, text(end))

    def _rest(self, tag: Tag, where: str) -> Rule:
        """Return the rule of a tag without its beginning."""
        return self.write(tag.content, tag.end, f"{where}/content")

    def _triggered(self, form: TriggeredTags, where: str) -> Rule:
        if not form.triggers or "" in form.triggers:
            raise GrammarError(f"has no triggers or an empty one at {where or '/'}")
        rests = [self._named(self._rest(tag, f"{where}/tags/{i}")) for i, tag in enumerate(form.tags)]
        for i, tag in enumerate(form.tags):
            if not tag.begin.startswith(tuple(form.triggers)):
                begin = shown(tag.begin)
                raise GrammarError(f"has the beginning {begin} at {where}/tags/{i}, which begins with no trigger")
        after = Name(self._name())
        options: list[Rule] = []
        for trigger in dict.fromkeys(form.triggers):
            begun = [
                Sequence((text(tag.begin.removeprefix(trigger)), rest))
                for tag, rest in zip(form.tags, rests, strict=True)
                if tag.begin.startswith(trigger)
            ]
            if begun:
                region = (Shortest(_ANY + literal_text(trigger)), choice(begun))
                options.append(Sequence((*region, NOTHING if form.stop_after_first else after)))
        some_trigger = "|".join(map(literal_text, form.triggers))
        free = Terminal((_ANY,), (f"{_ANY}(?:{some_trigger}){_ANY}",))
        self.rules[after.name] = Choice((free, *options))
        if not form.at_least_one:
            return after
        first = choice(Sequence((text(tag.begin), rest)) for tag, rest in zip(form.tags, rests, strict=True))
        return Sequence((first, NOTHING if form.stop_after_first else after))

    def _name(self) -> str:
        self._num_names += 1
        return f"x{self._num_names}"

    def _named(self, rule: Rule) -> Rule:
        name = self._name()
        self.rules[name] = rule
        return Name(name)


def _joined(*parts: Rule) -> Rule:
    """Return one rule after another. An expression and what follows it become one, which decides where it ends."""
    match sequence(*parts):
        case Sequence((*before, Terminal((expression,), ()), Shortest(rest))):
            return sequence(*before, Shortest(expression + rest))
        case joined:
            return joined


def _one_of(options: list[Rule]) -> Rule:
    """Return a choice. Expressions become one: with what follows, it decides which of them it is."""
    if options and all(isinstance(each, Terminal) and len(each.all_of) == 1 and not each.none_of for each in options):
        return terminal("(?:" + "|".join(each.all_of[0] for each in options if isinstance(each, Terminal)) + ")")
    return choice(options)
