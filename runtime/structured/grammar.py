"""Compiles the grammar of a request into the form that the engines take, and applies every limit.

`compiled` can take long and much memory for a hostile grammar, so it runs in a child process (compiler.py)."""

from __future__ import annotations

import json
from functools import cache
from hashlib import blake2b
from json.encoder import encode_basestring

import msgspec
import numpy as np

from runtime.base.types import CallboardError, Grammar, GrammarSpec
from runtime.structured import calls, channels, rules, tags
from runtime.structured.matching.lazy import LazyEngine
from runtime.structured.matching.matcher import Matcher
from runtime.structured.pattern import (
    MAX_STATES,
    Choice,
    GrammarError,
    Name,
    Repeat,
    Sequence,
    literal,
    literal_text,
    mapped,
    plain,
    size,
)
from runtime.structured.readers.regex import whole
from runtime.structured.rules import Rule, Shortest, Special, Terminal, sequence, terminal
from runtime.structured.schema import keywords
from runtime.structured.schema import writer as schema
from runtime.structured.schema.merge import TerminalChecks
from runtime.text.vocabulary import BYTES, MOST_SPECIAL, SPECIAL_BYTES

MAX_BYTES = keywords.MAX_BYTES  # limit for one specification
_BRACKETS = terminal("\\x{7d}"), terminal("\\x{5d}")
_UNSATISFIABLE = "cannot be satisfied: no text fits it"


@cache
def _bytes_engine() -> LazyEngine:
    """The engine that checks grammars, with one token a byte and some special tokens. It has threads, which a fork
    would lose, so the import of this module must not make it."""
    return LazyEngine(SPECIAL_BYTES)


def grammar_of(json_schema: object) -> Grammar:
    """Return the value of `SamplingParams.grammar` for a trusted JSON Schema. Raises GrammarError.

    A hostile schema can take long and much memory."""
    return compiled(GrammarSpec("json", json.dumps(json_schema)))


def compiled(spec: GrammarSpec) -> Grammar:
    """Compile a specification. Raises GrammarError; its subject is the specification."""
    if len(spec.text) > MAX_BYTES:
        raise GrammarError(f"has {len(spec.text)} bytes; the limit is {MAX_BYTES} bytes")
    ignored: list[str] = []
    try:
        written = rules.pruned(_rules(spec, ignored))
        if spec.after:
            written = _after_free_text(written, spec)
        lark, expression = rules.lark(written), rules.expression(written)
        checked = rules.lark(_with_few_ids(written)) if rules.special_ids(written) else lark
    except RecursionError:
        raise GrammarError(f"nests deeper through its references than the limit of {keywords.MAX_DEPTH}") from None
    if reason := _fault(checked):
        raise GrammarError(reason)
    return Grammar(blake2b(lark.encode(), digest_size=16).hexdigest(), lark, expression, tuple(sorted(ignored)))


def _after_free_text(written: dict[str, Rule], spec: GrammarSpec) -> dict[str, Rule]:
    special = dict(spec.special)
    mark_id = special.get(spec.after)
    if mark_id is None:
        free = f"(?s:.*){literal_text(spec.after)}"
        marked: Rule = Sequence((Shortest(free), rules.SPACES, Name("rest")))
        unmarked: Rule = Terminal(("(?s:.*)",), (f"{free}(?s:.*)",))
    else:
        others = [Special(i) for _, i in spec.special if i != mark_id]
        unmarked = Repeat(Choice((terminal("(?s:.+)"), *others)), 0, None)
        marked = Sequence((unmarked, Special(mark_id), rules.SPACES, Name("rest")))
    structure = {
        "rest" if name == "start" else name: mapped(rule, lambda r: Name("rest") if r == Name("start") else r)
        for name, rule in written.items()
    }
    if spec.opens:
        begin = sequence(rules.SPACES, rules.marked(spec.opens, special))
        return {"start": Choice((Name("rest"), sequence(begin, marked))), **structure}
    return {"start": Choice((unmarked, marked)) if spec.may_stay_free else marked, **structure}


def _with_few_ids(written: dict[str, Rule]) -> dict[str, Rule]:
    """Return rules with the special tokens of the vocabulary that checks grammars. Raises GrammarError."""
    ids = rules.special_ids(written)
    if len(ids) >= MOST_SPECIAL:  # the engine needs a spare one
        raise GrammarError(f"has {len(ids)} special tokens; the limit is {MOST_SPECIAL - 1}")
    new = {i: Special(len(BYTES.tokens) + at) for at, i in enumerate(ids)}
    return {name: mapped(rule, lambda r: new[r.id] if isinstance(r, Special) else r) for name, rule in written.items()}


def _rules(spec: GrammarSpec, ignored: list[str], checks: TerminalChecks | None = None) -> dict[str, Rule]:
    checks = checks or _TerminalChecks()
    match spec.kind:
        case "channels":
            turn = msgspec.json.decode(spec.text, type=channels.Channels)
            return channels.rules_of(turn, checks, ignored, lambda answer: _rules(answer, ignored, checks))
        case "json":
            found = schema.rules_of(schema.read(spec.text), checks, strict=spec.strict, ignored=ignored)
            if not any(leaf in _BRACKETS for leaf in rules.leaves(found)):
                return found  # a text that is compared, as a choice is
            return {**found, "start": sequence(found["start"], rules.SPACES)}
        case "regex":
            return {"start": terminal(plain(whole(spec.text)))}
        case "choice":
            options = Choice(tuple(literal(text) for text in dict.fromkeys(json.loads(spec.text))))
            if (states := size(options)) > MAX_STATES:
                raise GrammarError(f"has choices of {states} characters; the limit is {MAX_STATES}")
            return {"start": terminal(plain(options))}
        case "without":
            unwanted = tuple(f"(?s:.*){literal_text(text)}(?s:.*)" for text in json.loads(spec.text))
            return {"start": Terminal(("(?s:.*)",), unwanted)}
        case "grammar":
            return tags.grammar_rules(spec.text)
        case "tags":
            return tags.rules_of(spec.text, checks, ignored)
    return calls.rules_of(msgspec.json.decode(spec.text, type=calls.Calls), checks, spec.strict, ignored)


class _TerminalChecks(TerminalChecks):
    """Answers of llguidance about terminals, each computed once."""

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
                matcher = _bytes_engine().matcher(rules.lark({"start": terminal(expression)}))
                self._matchers[expression] = matcher
            output = [*encode_basestring(text).encode(), SPECIAL_BYTES.eos_ids[0]]
            return matcher.allowed(output) == len(output)
        except CallboardError as e:
            raise GrammarError(f"cannot be used: {e}") from None


def _fault(lark: str) -> str:
    """Return the reason why no output can begin; "" if one can. Raises GrammarError at a limit."""
    mask = np.zeros(SPECIAL_BYTES.num_words, np.int32)
    try:
        _bytes_engine().matcher(lark).fill(mask)
    except CallboardError as e:
        if "NoExtension" in str(e):  # llguidance's stop reason for a grammar that no text can continue
            return _UNSATISFIABLE
        raise GrammarError(f"cannot be used: {e}") from None
    return "" if mask.any() else _UNSATISFIABLE
