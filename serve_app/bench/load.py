"""When requests are sent: a fixed number at once, or at times drawn in advance."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import numpy as np

from serve_app.bench.client import Turn

Ask = Callable[[Turn], Awaitable[None]]


@dataclass(slots=True)
class Session:
    """Requests that follow one another."""

    start: float  # seconds after the first session may start
    turns: list[Turn]


async def play(sessions: list[Session], ask: Ask) -> None:
    """Send the requests of all sessions at their times."""
    begin = time.perf_counter()

    async def run(session: Session) -> None:
        await asyncio.sleep(max(0.0, begin + session.start - time.perf_counter()))
        for turn in session.turns:
            await asyncio.sleep(turn.pause)
            await ask(turn)

    await asyncio.gather(*map(run, sessions))


async def play_streams(turns: Iterator[Turn], num_streams: int, seconds: float | None, ask: Ask) -> None:
    """Keep `num_streams` requests running until `turns` ends or `seconds` have passed; answers in flight complete."""
    end = None if seconds is None else time.perf_counter() + seconds

    async def run() -> None:
        for turn in turns:
            await ask(turn)
            if end is not None and time.perf_counter() >= end:
                return

    await asyncio.gather(*(run() for _ in range(num_streams)))


def arrivals(rng: np.random.Generator, rate: float, count: int | None, seconds: float | None) -> list[float]:
    """Poisson arrival times at `rate` a second: `count` times, the times before `seconds`, or the fewer of both."""
    times: list[float] = []
    at = 0.0
    while (count is None or len(times) < count) and (seconds is None or at < seconds):
        times.append(at)
        at += float(rng.exponential(1 / rate))
    return times
