"""The grammar of an answer in channels (runtime/structured/channels.py)."""

from __future__ import annotations

import msgspec

from runtime.base.types import GrammarSpec
from runtime.output.call_grammar import calls_in_json
from runtime.output.options import ChatOptions
from runtime.output.response_format import RequestedGrammar
from runtime.structured.channels import Channels, Place
from runtime.text.tokenizer import Tokenizer
from runtime.text.tool_calls.harmony import CHANNEL_MARKS, END_MARKS

_CHANNELS: tuple[Place, ...] = ("analysis", "commentary", "final")


def channel_marks(tokenizer: Tokenizer) -> dict[str, int] | None:
    """Return the channel marks' ids; None unless all are special tokens. A vocabulary may lack <|return|>."""
    ids = {mark: tokenizer.token_to_id(mark) for mark in CHANNEL_MARKS}
    marks = {mark: i for mark, i in ids.items() if i is not None and i in tokenizer.special_ids}
    return marks if marks.keys() >= set(CHANNEL_MARKS) - {"<|return|>"} else None


def place_of(begun: str) -> Place | None:
    """Return the place where a prompt ends. `begun` is its part after the model's turn last began.

    None means any other place, such as half a header."""
    *_, last = begun.rpartition("<|start|>")
    if last != begun:  # another turn has begun since
        return "boundary" if last.rstrip().endswith(END_MARKS) else None
    header, mark, content = begun.rpartition("<|message|>")
    if not mark:
        return None if begun.strip() else "header"
    if content.rstrip().endswith(END_MARKS):
        return "boundary"
    return next((channel for channel in _CHANNELS if header.endswith(f"<|channel|>{channel}")), None)


def channel_grammar(
    options: ChatOptions, marks: dict[str, int], place: Place, reasons: bool, most_calls: int | None
) -> RequestedGrammar:
    """Return the grammar of a turn that continues from `place`.

    Args:
        marks: the marks' ids.
        reasons: the turn may have reasoning.
        most_calls: the highest number of calls; None if unlimited."""
    answer, tools = options.requested_grammar(), options.offered_tools()
    forced = options.forced_call()
    if forced is not None:
        tools = [tool for tool in tools if forced.name in (None, tool.function.name)]
    must_call = forced is not None and place != "final"
    calls = calls_in_json(tools, may_repeat=most_calls is None) if tools else None
    turn = Channels(marks, calls, None if answer is None else answer.spec, reasons, must_call, place)
    spec = GrammarSpec("channels", msgspec.json.encode(turn).decode())
    return RequestedGrammar(spec, answer.field if answer is not None else "tools" if tools else "messages")
