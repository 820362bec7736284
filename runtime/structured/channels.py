"""Turns in channels: the rules for an answer in gpt-oss's format, harmony. Its marks are special tokens.

    (a message that is not the last)* (the final message | a call)

A turn follows `<|start|>assistant` of its prompt. Every other message has this beginning of its own:

    reasoning   <|channel|>analysis<|message|>TEXT<|end|>
    preamble    <|channel|>commentary<|message|>TEXT<|end|>
    call        <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>
    final       <|channel|>final<|message|>TEXT<|return|>

A call's recipient may also stand before its channel, and its type may be ` json`. A call that ends with `<|end|>` is
followed by another one. A text never spells out a mark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from runtime.base.types import GrammarSpec
from runtime.structured.calls import Calls, arguments_of
from runtime.structured.pattern import GrammarError, Name, Repeat, literal_text, mapped
from runtime.structured.rules import NOTHING, SPACES, Rule, Special, Wide, choice, sequence, terminal, text
from runtime.structured.schema.merge import TerminalChecks

Place = Literal["header", "boundary", "analysis", "commentary", "final"]
_ANSWER = "answer_"  # precedes the names of the answer's rules


class Channels(msgspec.Struct):
    """A turn of one request."""

    marks: dict[str, int]  # ids of the special tokens
    calls: Calls | None = None  # None for a turn without calls
    answer: GrammarSpec | None = None  # grammar of the final message; None if it is free
    reasons: bool = True  # the turn may have reasoning
    must_call: bool = False  # the turn ends with a call
    place: Place = "header"  # where the prompt ends: in a header, between messages or in a message's text


def rules_of(
    turn: Channels,
    checks: TerminalChecks,
    ignored: list[str],
    rules_of_answer: Callable[[GrammarSpec], dict[str, Rule]],
) -> dict[str, Rule]:
    """Return the rules of a turn. Raises GrammarError."""
    writer = _Writer(turn)
    written: dict[str, Rule] = {"free": Wide(_text_without(turn.marks))}
    if turn.answer is not None:
        written |= _renamed(rules_of_answer(turn.answer))
    written["final"] = sequence(Name("free" if turn.answer is None else f"{_ANSWER}start"), writer.mark("<|return|>"))
    written["next"] = sequence(writer.mark("<|end|>"), writer.mark("<|start|>"), text("assistant"))
    ends: list[Rule] = []
    if not turn.must_call:
        ends.append(sequence(writer.begin("final"), Name("final")))
    if turn.calls is not None:
        for i, (name, parameters) in enumerate(turn.calls.functions.items()):
            written |= arguments_of(turn.calls, name, parameters, f"f{i}", checks, ignored)
        written["call"] = writer.call(turn.calls)
        ends.append(writer.calls(turn.calls))
    if not ends:
        raise GrammarError("cannot be satisfied: no message may end the turn")
    turn_rule = sequence(writer.before(), choice(ends))
    match turn.place:
        case "header":
            start = turn_rule
        case "boundary":
            start = sequence(writer.mark("<|start|>"), text("assistant"), turn_rule)
        case "final":
            start = Name("final")
        case _:
            start = sequence(Name("free"), Name("next"), turn_rule)
    return {"start": start, **written}


class _Writer:
    """Writes the messages of a turn."""

    def __init__(self, turn: Channels) -> None:
        self._turn = turn

    def mark(self, mark: str) -> Rule:
        """Return the rule of a mark. Without <|return|>, the final message ends with EOS."""
        if mark == "<|return|>" and mark not in self._turn.marks:
            return NOTHING
        return Special(self._turn.marks[mark])

    def begin(self, channel: str) -> Rule:
        return sequence(self.mark("<|channel|>"), text(channel), self.mark("<|message|>"))

    def before(self) -> Rule:
        """Return the rule of the messages before the last."""
        channels = ["analysis"] * self._turn.reasons + ["commentary"] * (self._turn.calls is not None)
        if not channels:
            return NOTHING
        channel = terminal("|".join(channels) if len(channels) == 1 else f"({'|'.join(channels)})")
        message = sequence(self.mark("<|channel|>"), channel, self.mark("<|message|>"), Name("free"), Name("next"))
        return Repeat(message, 0, None)

    def call(self, calls: Calls) -> Rule:
        """Return the rule of a call, without its end."""
        channel, constrain = self.mark("<|channel|>"), self.mark("<|constrain|>")
        kind = choice([sequence(text(" "), constrain, text("json")), text(" json")])
        each = []
        for i, name in enumerate(calls.functions):
            recipient = text(f" to=functions.{name}")
            heads = (
                sequence(channel, text(f"commentary to=functions.{name}")),
                sequence(recipient, channel, text("commentary")),
            )
            each.append(sequence(choice(heads), kind, self.mark("<|message|>"), Name(f"f{i}start"), SPACES))
        return choice(each)

    def calls(self, calls: Calls) -> Rule:
        """Return the rule of the calls that end a turn."""
        more: Rule = NOTHING
        if calls.again:
            more = Repeat(sequence(Name("next"), self.before(), Name("call")), 0, None)
        return sequence(Name("call"), more, self.mark("<|call|>"))


def _renamed(rules: dict[str, Rule]) -> dict[str, Rule]:
    """Return rules with other names."""
    return {
        _ANSWER + name: mapped(rule, lambda r: Name(_ANSWER + r.name) if isinstance(r, Name) else r)
        for name, rule in rules.items()
    }


def _text_without(marks: Iterable[str]) -> str:
    """Return an expression for texts that contain none of the marks. A mark has "<" at its beginning alone."""
    node: _Node = {}
    for mark in marks:
        at = node
        for char in mark[1:]:
            at = at.setdefault(char, {})
    return f"[^<]*(<{_not_beginning(node)})*"


_Node = dict[str, "_Node"]  # a node in the tree of marks; children by their next character


def _not_beginning(node: _Node) -> str:
    """Return the expression of the texts without "<" that begin with no path from a node to a leaf."""
    others = "[^<" + "".join(map(literal_text, node)) + "][^<]*"
    begun = (literal_text(char) + _not_beginning(after) for char, after in node.items() if after)
    return f"({'|'.join((others, *begun))})?"
