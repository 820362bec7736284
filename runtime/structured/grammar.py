"""Compiles the grammar that a client asks for into the form that the engines take, and applies every limit.

`compiled` can take long and much memory for a hostile grammar: it belongs into a child process (child.py).
"""

from __future__ import annotations

import json
from functools import cache
from hashlib import blake2b
from json.encoder import encode_basestring
from typing import Any

import msgspec
import numpy as np

from runtime.spec.types import CallboardError, Grammar, GrammarSpec
from runtime.structured import call_arguments, rules, tags
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.matching.matcher import Matcher
from runtime.structured.matching.vocabulary import BYTES
from runtime.structured.pattern import (
    MAX_STATES,
    Alternation,
    Concatenation,
    GrammarError,
    Reference,
    Repetition,
    escaped,
    literal,
    literal_text,
    plain,
    size,
    whole,
)
from runtime.structured.readers import context_free
from runtime.structured.readers.lark import read_lark
from runtime.structured.rules import (
    NOTHING,
    Choice,
    Name,
    Repeat,
    Rule,
    Sequence,
    Shortest,
    Terminal,
    choice,
    sequence,
    terminal,
)
from runtime.structured.schema import keywords
from runtime.structured.schema import writer as schema
from runtime.structured.schema.normalize import Terms
from runtime.structured.tags import read_grammar
from runtime.text.tool_calls.argument_form import ArgumentForm

MAX_BYTES = keywords.MAX_BYTES  # of a specification
_NO_TEXT = "cannot be satisfied: no text fits it"
_SPACES = "[\\x{a}\\x{20}]{0,2}"  # before a call
_PYTHON_ARGUMENTS = r"""([^()"']|"([^"\\]|\\(?s:.))*"|'([^'\\]|\\(?s:.))*')*"""  # any, but for tuples


@cache
def _bytes_engine() -> LazyEngine:
    """The engine that checks grammars, which mean the same in any vocabulary. It has threads, which a fork would lose,
    so that importing this module must not make it."""
    return LazyEngine(BYTES)


class Calls(msgspec.Struct):
    """Calls of functions, from within the first one on: the prompt ends with its opening, some of it or none."""

    functions: dict[str, Any]  # the schemas of their arguments, by name
    inputs: dict[str, tuple[str, str]]  # syntax and grammar of the text that is a function's one argument, `input`
    lenient: list[str]  # functions that take any object where their schema is not supported
    unbound: list[str]  # functions whose arguments are any text up to the last mark of a call's end
    named: bool  # the opening names the (only) function
    to_arguments: str  # what is between a function's name and its arguments
    end: str  # what follows a call's arguments
    again: str  # how another call begins, as far as the first is begun; "": there is just one
    close: str  # what follows the last call
    begin: str = ""  # the rest of the opening
    arguments: ArgumentForm | None = None  # how arguments are written; None: as one JSON object
    answer: str = ""  # a JSON Schema: the output may be such a value instead
    no_text: list[str] = []  # regular expressions: it may be a text instead that matches none of them; none: it may not


def grammar_of(json_schema: object) -> Grammar:
    """The value of `SamplingParams.grammar` for a JSON Schema; raises GrammarError. Only for trusted schemas: a
    hostile one can take long and much memory."""
    return compiled(GrammarSpec("json", json.dumps(json_schema)))


def compiled(spec: GrammarSpec) -> Grammar:
    """Raises GrammarError, a sentence about the specification without its subject."""
    if len(spec.text) > MAX_BYTES:
        raise GrammarError(f"has {len(spec.text)} bytes; the limit is {MAX_BYTES} bytes")
    ignored: list[str] = []
    try:
        written = rules.pruned(_rules(spec, ignored))
        if spec.after:
            written = _after_free_text(written, spec)
        text, expression = rules.lark(written), rules.expression(written)
    except RecursionError:
        raise GrammarError(f"nests deeper through its references than the limit of {keywords.MAX_DEPTH}") from None
    if reason := _fault(text):
        raise GrammarError(reason)
    return Grammar(blake2b(text.encode(), digest_size=16).hexdigest(), text, expression, tuple(sorted(ignored)))


def _after_free_text(written: dict[str, Rule], spec: GrammarSpec) -> dict[str, Rule]:
    free = f"(?s:.*){literal_text(spec.after)}"
    marked = Sequence((Shortest(free), terminal(_SPACES), Name("rest")))
    unmarked = Terminal(("(?s:.*)",), (f"{free}(?s:.*)",))
    start = Choice((unmarked, marked)) if spec.may_stay_free else marked
    return {**written, "start": start, "rest": written["start"]}


def _rules(spec: GrammarSpec, ignored: list[str]) -> dict[str, Rule]:
    terms = _Terms()
    match spec.kind:
        case "json":
            return schema.rules_of(schema.read(spec.text), terms, strict=spec.strict, ignored=ignored)
        case "regex":
            return {"start": terminal(plain(whole(spec.text)))}
        case "choice":
            options = Alternation(tuple(literal(text) for text in dict.fromkeys(json.loads(spec.text))))
            if (states := size(options)) > MAX_STATES:
                raise GrammarError(f"has choices of {states} characters; the limit is {MAX_STATES}")
            return {"start": terminal(plain(options))}
        case "without":
            unwanted = tuple(f"(?s:.*){literal_text(text)}(?s:.*)" for text in json.loads(spec.text))
            return {"start": Terminal(("(?s:.*)",), unwanted)}
        case "grammar":
            grammar = read_grammar(spec.text)
            return context_free.rules_of(grammar.rules, grammar.start)
        case "tags":
            return tags.rules_of(spec.text, terms, ignored)
    return _calls(msgspec.json.decode(spec.text, type=Calls), terms, spec.strict, ignored)


def _calls(calls: Calls, terms: Terms, answer_strict: bool | None, ignored: list[str]) -> dict[str, Rule]:
    written: dict[str, Rule] = {}
    bodies: list[tuple[str, Rule]] = []  # of calls: the expression that they begin with, and the rest
    for i, (name, parameters) in enumerate(calls.functions.items()):
        opening = literal_text("" if calls.named else name + calls.to_arguments) + "\\x{20}?"
        if name in calls.unbound:
            bodies.append((opening, _unbound(calls)))
            continue
        arguments = {"allOf": [{"type": "object"}, {"$ref": "#"}]}
        try:
            root = schema.read(json.dumps(parameters))
            strict, unheeded = name not in calls.lenient, list[str]()
            if calls.arguments is None:
                found = schema.rules_of(root, terms, arguments, f"f{i}", strict, unheeded)
            else:
                found = call_arguments.rules_of(calls.arguments, root, terms, f"f{i}", strict, unheeded)
            ignored += (f".{name}{path}" for path in unheeded)
            if name in calls.inputs:
                found = _input(*calls.inputs[name], f"f{i}")
        except GrammarError as e:
            if name in calls.inputs:
                raise GrammarError(f"has a custom tool {name} whose format cannot be enforced: the grammar {e}") from e
            if name not in calls.lenient:
                raise GrammarError(f"has a function {name} whose parameters cannot be enforced: the schema {e}") from e
            if calls.arguments is None:
                found = schema.rules_of({}, terms, arguments, f"f{i}")
            else:
                root = call_arguments.without_details(parameters)
                found = call_arguments.rules_of(calls.arguments, root, terms, f"f{i}", False, [])
        written |= found
        bodies.append((opening, sequence(Name(f"f{i}start"), _text(calls.end))))
    written["call"] = _one_of(bodies)
    more = Repeat(sequence(_text(calls.again), Name("call")), 0, None) if calls.again else NOTHING
    # llguidance takes the longest terminal and does not go back: beside free text, the terminal that begins a call must
    # reach to where the text cannot be free any more, which is behind the function's name.
    first = _one_of(bodies, _SPACES + literal_text(calls.begin)) if calls.no_text else None
    start = sequence(first or sequence(_text(calls.begin), Name("call")), more, _text(calls.close))
    if calls.answer:
        written |= schema.rules_of(schema.read(calls.answer), terms, None, "a", answer_strict, ignored)
        start = choice([start, Name("astart")])
    if calls.no_text:
        start = choice([start, Terminal(("(?s:.*)",), tuple(calls.no_text))])
    return {"start": start, **written}


def _one_of(bodies: list[tuple[str, Rule]], before: str = "") -> Rule:
    return choice(sequence(terminal(before + opening), rest) for opening, rest in bodies)


def _unbound(calls: Calls) -> Rule:
    """Arguments that are written one by one, whatever they are, and the end of the call."""
    if calls.arguments is not None and not calls.arguments.stops:
        return terminal(_PYTHON_ARGUMENTS + literal_text(calls.end))
    *_, last_line = calls.end.splitlines()
    return Shortest(f"(?s:.*){literal_text(last_line)}")


def _input(syntax: str, definition: str, prefix: str) -> dict[str, Rule]:
    """The rules of an object whose one property, `input`, is a text that follows a grammar."""
    if syntax == "regex":
        rules_of_text, start = {"text": whole(definition)}, "text"
    else:
        grammar = read_lark(definition)
        rules_of_text, start = dict(grammar.rules), grammar.start
    space = Repetition(literal(" "), 0, 1)
    parts = literal('{"input":'), space, literal('"'), Reference(start), literal('"}')
    rules_of_json = {name: escaped(pattern) for name, pattern in rules_of_text.items()}
    return context_free.rules_of(rules_of_json | {"": Concatenation(parts)}, "", prefix)


def _text(text: str) -> Rule:
    return terminal(literal_text(text)) if text else NOTHING


class _Terms(Terms):
    """Answers of llguidance about terminals; each is asked once."""

    def __init__(self) -> None:
        self._fits: dict[Terminal, bool] = {}
        self._matchers: dict[str, Matcher] = {}

    def fits(self, terminal: Terminal) -> bool:
        if terminal not in self._fits:
            self._fits[terminal] = not _fault(rules.lark({"start": terminal}))
        return self._fits[terminal]

    def matches(self, expression: str, text: str) -> bool:
        try:
            if (matcher := self._matchers.get(expression)) is None:
                matcher = self._matchers[expression] = _bytes_engine().matcher(
                    rules.lark({"start": terminal(expression)})
                )
            output = [*encode_basestring(text).encode(), BYTES.eos_ids[0]]
            return matcher.allowed(output) == len(output)
        except CallboardError as e:
            raise GrammarError(f"cannot be used: {e}") from None


def _fault(lark: str) -> str:
    """The reason why no output can even begin; "" if one can. Raises GrammarError if a limit is in the way."""
    mask = np.zeros(BYTES.num_words, np.int32)
    try:
        _bytes_engine().matcher(lark).fill(mask)
    except CallboardError as e:
        if "NoExtension" in str(e):  # llguidance's word for a grammar that no text can go on in
            return _NO_TEXT
        raise GrammarError(f"cannot be used: {e}") from None
    return "" if mask.any() else _NO_TEXT
