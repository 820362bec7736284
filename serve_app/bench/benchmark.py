"""One run of `callboard bench`: load levels one after another, each with its own prompts."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime.background import in_background
from runtime.base.types import CallboardError
from serve_app.bench.client import Client, Turn
from serve_app.bench.figures import draft_figures, figures
from serve_app.bench.images import RandomImages
from serve_app.bench.load import Session, arrivals, play, play_streams
from serve_app.bench.prompts import RandomPrompts, prompts_of
from serve_app.bench.report import draw, report

_SHOW_S = 0.2  # seconds between two looks at the progress

Level = tuple[float, list[Turn], dict[str, Any]]  # what was sent, and the server's draft tokens meanwhile


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is sent. `levels` are numbers of concurrent requests, or rates in requests per second."""

    levels: list[float]
    is_rate: bool
    num_requests: int | None  # requests in each level
    seconds: float | None  # time in which a level's requests are sent
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int  # tokens before the prompt that all requests have in common
    seed: int
    num_warmup: int
    chat: bool
    fields: dict[str, Any] = field(default_factory=dict)
    image: tuple[int, ...] | None = None  # width, height and number of the pictures in each request

    def name(self, level: float) -> str:
        return f"{level:g} requests/s" if self.is_rate else f"concurrency {level:g}"


def bench(client: Client, plan: LoadPlan, output: Path | None, plot: Path | None) -> int:
    """Run all levels, print the report and write the files; returns 1 if a request failed.

    After Ctrl-C it reports the answers that are complete, and raises KeyboardInterrupt."""
    if plot is not None:
        _check_matplotlib()
    for path in filter(None, (output, plot)):
        path.touch()  # a folder that does not exist is reported before the load
    rng = np.random.default_rng([plan.seed])
    prompts, is_counted = prompts_of(
        plan.prompt_tokens, plan.shared_prefix, lambda text: client.count_tokens(text, not plan.chat), rng
    )
    if plan.image is not None:
        prompts.images = RandomImages(*plan.image)
    levels, is_interrupted = asyncio.run(_run(client, plan, prompts))
    about = {
        "url": client.url, "model": client.model, "time": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "prompt_tokens_counted_by": "the server's tokenizer" if is_counted else "words", **asdict(plan),
    }  # fmt: skip
    found = [{"level": level, "name": plan.name(level), **figures(turns), **drafts} for level, turns, drafts in levels]
    print(report(about, found))
    if output is not None:
        rows = [row | {"answers": _times(turns)} for row, (_, turns, _) in zip(found, levels, strict=True)]
        output.write_text(json.dumps(about | {"results": rows}, indent=1) + "\n")
    if plot is not None and any(row["requests"] for row in found):
        draw(about, found, plot)
    if is_interrupted:
        raise KeyboardInterrupt
    return int(any(row["errors"] for row in found))


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise CallboardError("--plot needs matplotlib; install it by: pip install 'callboard[bench]'.") from None


def _times(turns: list[Turn]) -> list[dict[str, Any]]:
    """The requests of a level as a file has them: seconds from the first one."""
    begin = min((turn.sent for turn in turns if turn.sent), default=0.0)
    return [
        {
            "sent_s": turn.sent - begin if turn.sent else None,
            "events_s": [at - begin for at in turn.events],
            "ended_s": turn.ended - begin if turn.ended else None,
            "prompt_tokens": turn.num_prompt_tokens,
            "cached_tokens": turn.num_cached_tokens,
            "output_tokens": turn.num_tokens,
            "error": turn.error,
        }
        for turn in turns
    ]


# ---- the load -------------------------------------------------------------------------------------------------------


async def _run(client: Client, plan: LoadPlan, prompts: RandomPrompts) -> tuple[list[Level], bool]:
    """The levels' requests and draft tokens, and whether Ctrl-C ended the last one."""
    levels: list[Level] = []
    for number, level in enumerate(plan.levels):
        rng = np.random.default_rng([plan.seed, number + 1])
        for _ in range(0 if number else plan.num_warmup):
            await client.ask(_turn(plan, prompts, rng))
        seen: list[Turn] = []
        drafts: dict[str, Any] = {}
        levels.append((level, seen, drafts))
        before = await asyncio.to_thread(client.draft_counts)
        try:
            async with _shown(plan, level, seen):
                await _play(client, plan, level, prompts, rng, seen)
        except asyncio.CancelledError:  # asyncio's answer to Ctrl-C
            return levels, True
        drafts |= draft_figures(before, await asyncio.to_thread(client.draft_counts))
    return levels, False


async def _play(
    client: Client, plan: LoadPlan, level: float, prompts: RandomPrompts, rng: np.random.Generator, seen: list[Turn]
) -> None:
    """Send one level's requests. `seen` gets each as it is sent."""

    async def ask(turn: Turn) -> None:
        seen.append(turn)
        try:
            await client.ask(turn)
        except (CallboardError, OSError) as e:
            turn.error = turn.error or str(e) or type(e).__name__

    def turns(count: int | None) -> Iterator[Turn]:
        while count is None or count > 0:
            count = None if count is None else count - 1
            yield _turn(plan, prompts, rng)

    if plan.is_rate:
        starts = arrivals(rng, level, plan.num_requests, plan.seconds)
        await play([Session(at, [turn]) for at, turn in zip(starts, turns(len(starts)), strict=True)], ask)
    else:
        await play_streams(turns(plan.num_requests), int(level), plan.seconds, ask)


def _turn(plan: LoadPlan, prompts: RandomPrompts, rng: np.random.Generator) -> Turn:
    images = () if prompts.images is None else prompts.images.draw(rng)
    return Turn(prompts.draw(rng), plan.output_tokens, images)


@asynccontextmanager
async def _shown(plan: LoadPlan, level: float, seen: list[Turn]) -> AsyncIterator[None]:
    """Show a level's progress in one terminal line."""
    if not sys.stderr.isatty():
        yield
        return
    begin = time.perf_counter()

    async def show() -> None:
        while True:
            await asyncio.sleep(_SHOW_S)
            print(f"\r\x1b[K{_progress(plan, level, seen, begin)}", end="", file=sys.stderr, flush=True)

    task = in_background(asyncio.create_task(show()), "the line of progress")
    try:
        yield
    finally:
        task.cancel()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _progress(plan: LoadPlan, level: float, seen: list[Turn], begin: float) -> str:
    seconds, done = time.perf_counter() - begin, sum(bool(turn.ended) for turn in seen)
    failed, num_events = sum(bool(turn.error) for turn in seen), sum(len(turn.events) for turn in seen)
    of = "" if plan.num_requests is None else f" of {plan.num_requests}"
    last = "" if plan.seconds is None else f" of {plan.seconds:g}"
    return (
        f"{plan.name(level)}: {done}{of} requests complete, {len(seen) - done - failed} running, {failed} failed, "
        f"{num_events / seconds:.1f} events/s, {seconds:.0f}{last} s"
    )
