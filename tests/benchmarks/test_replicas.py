"""The conversations that measure several engines behind one endpoint."""

import asyncio
import time

import pytest

from benchmarks.serving.replicas import figures, ids_of, play
from benchmarks.simulate.traces import Conversation, Part
from benchmarks.simulate.traces import Turn as Planned
from serve_app.bench.client import Turn


def test_only_the_measured_time_counts():
    shared, asked = Part(1, 40), []
    conversations = [
        Conversation(0.0, [Planned([shared, Part(2, 5)], 3), Planned([Part(3, 5)], 3)]),
        Conversation(0.1, [Planned([shared, Part(4, 5)], 3), Planned([Part(5, 5)], 3, pause_s=9.0)]),
    ]

    async def ask(turn: Turn) -> None:
        asked.append(turn)
        turn.sent = time.perf_counter()
        await asyncio.sleep(0.05)
        turn.events += [time.perf_counter()] * 2
        turn.num_tokens = 3

    begin, seen = asyncio.run(play(conversations, 0.4, ask))
    assert seen == asked
    first, second, other = asked if asked[1].prompt[:45] == asked[0].prompt else (asked[0], asked[2], asked[1])
    assert [len(turn.prompt) for turn in (first, second, other)] == [45, 53, 45]
    assert first.prompt[:40] == other.prompt[:40] == ids_of(shared)
    assert first.prompt[40:] != other.prompt[40:]
    assert second.prompt[-5:] == ids_of(Part(3, 5))
    for turn, at in ((first, -0.2), (second, 0.2), (other, 0.02)):
        turn.sent, turn.events = begin + at, [begin + at + 0.05, begin + at + 0.06]
    late = Turn([1], 3, sent=begin - 0.7)  # requested before, and never received
    found = figures(begin, 0.3, [*seen, late])
    assert found["requests"] == 1
    assert found["output_tok_s"] == found["output_tok_s_in_time"] == pytest.approx(3 / 0.2)
    assert found["late"] == 0.0
