"""Several engines behind one endpoint: the requests served in time, by how they are routed, over HTTP.

    python -m benchmarks.serving.replicas --serve /tmp/llama-3.1-8b --replicas 4 --rates 8 12 16 --seconds 60

Conversations of the simulator's generators (traces.py) start at each rate, for each policy with a server of its own. A
first token within a second is in time. `late` is the share of requests without one, and `output_tok_s_in_time` counts
the others' tokens. The first third of the seconds fills the caches and is not counted. An answer is in the next prompt
as invented ids of the same length, so only text that clients sent can be shared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from benchmarks.library.measure import Results, new_parser
from benchmarks.library.servers import served
from benchmarks.simulate.scenarios import MOST_TTFT_S
from benchmarks.simulate.traces import GENERATED, Conversation, Part
from serve_app.bench.client import Client, Turn

_FIRST_ID, _NUM_IDS = 1000, 29_000  # in every measured model's vocabulary


def ids_of(part: Part) -> list[int]:
    """The tokens of a part, as ids that any model has."""
    return [_FIRST_ID + token % _NUM_IDS for token in part.tokens()]


async def converse(
    conversation: Conversation, number: int, until: float, ask: Callable[[Turn], Awaitable[None]], seen: list[Turn]
) -> None:
    """The turns of one conversation that begin before `until`, by time.perf_counter."""
    prompt: list[int] = []
    for i, turn in enumerate(conversation.turns):
        await asyncio.sleep(turn.pause_s)
        if time.perf_counter() > until:
            return
        prompt += (token for part in turn.parts for token in ids_of(part))
        seen.append(asked := Turn(list(prompt), turn.output_len))
        await ask(asked)
        prompt += ids_of(Part((1 << 20) + 8 * number + i, turn.output_len))


async def play(
    conversations: list[Conversation], seconds: float, ask: Callable[[Turn], Awaitable[None]]
) -> tuple[float, list[Turn]]:
    """The time of the start, and all requests within `seconds`; conversations still running then are abandoned."""
    begin, seen, tasks = time.perf_counter(), list[Turn](), list[asyncio.Task[None]]()
    for number, conversation in enumerate(conversations):
        await asyncio.sleep(begin + conversation.start - time.perf_counter())
        tasks.append(asyncio.create_task(converse(conversation, number, begin + seconds, ask, seen)))
    await asyncio.sleep(begin + seconds - time.perf_counter())
    for task in tasks:
        if task.done():
            task.result()
        task.cancel()
    await asyncio.wait(tasks)
    return begin, seen


def figures(begin: float, seconds: float, seen: list[Turn]) -> dict[str, Any]:
    """Figures of the requests and tokens in the last two thirds. A first token missing at the end is late if there was
    time for it."""
    start, end = begin + seconds / 3, begin + seconds
    num_tokens = num_in_time = 0.0
    first_s = []
    for turn in seen:
        per_event = turn.num_tokens / len(turn.events) if turn.num_tokens else 1.0  # known when it has ended
        tokens = per_event * sum(start <= at <= end for at in turn.events)
        ttft = (turn.events[0] if turn.events else end) - turn.sent
        num_tokens += tokens
        num_in_time += tokens if ttft <= MOST_TTFT_S else 0.0
        if turn.sent >= start and (turn.events or ttft > MOST_TTFT_S):
            first_s.append(ttft)
    p50, p90, p99 = np.percentile(first_s, [50, 90, 99]) * 1e3 if first_s else (0.0, 0.0, 0.0)
    return {
        "requests": len(first_s),
        "output_tok_s": num_tokens / (end - start),
        "output_tok_s_in_time": num_in_time / (end - start),
        "late": float(np.mean([s > MOST_TTFT_S for s in first_s])) if first_s else 0.0,
        "ttft_ms": {"p50": float(p50), "p90": float(p90), "p99": float(p99)},
    }


def main() -> None:
    parser = new_parser(__doc__ or "", model=False)
    parser.add_argument("--serve", required=True, metavar="MODEL", help="as callboard serve takes it")
    parser.add_argument("--label", default="", help="goes into the results: which model")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--policies", nargs="+", default=["prefix", "least-load"])
    parser.add_argument("--workload", choices=list(GENERATED), default="assistants")
    parser.add_argument("--rates", nargs="+", type=float, default=[8.0, 12.0, 16.0], help="conversations a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="at each rate")
    parser.add_argument("--flags", nargs=argparse.REMAINDER, default=[], help="for callboard serve; must come last")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exit that ends the server too
    results = Results("replicas", args.out)
    for policy in args.policies:
        flags = ["--num-replicas", str(args.replicas), "--routing-policy", policy, *args.flags]
        with served(args.serve, flags) as url, contextlib.suppress(KeyboardInterrupt):
            for seed, rate in enumerate(args.rates):
                conversations = list(GENERATED[args.workload].generate([(args.seconds, rate)], seed))
                seen = asyncio.run(play(conversations, args.seconds, Client(url).ask))
                results.add(
                    model=args.label or args.serve, workload=args.workload, replicas=args.replicas, policy=policy,
                    rate=rate, seconds=args.seconds, **figures(seen[0], args.seconds, seen[1]),
                )  # fmt: skip


if __name__ == "__main__":
    main()
