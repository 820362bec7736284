"""`callboard chaos`: conversations with a running application while its processes are killed one after another.

Two twins have the same conversation with the same seeds, so a lost, doubled or changed token makes them differ. Each
answer's number of tokens is known too."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import termios
import time
import tty
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

from runtime.background import in_background
from runtime.base.types import CallboardError
from serve_app.processes.application_processes import (
    ROLES,
    Process,
    local_port,
    processes_of,
    session_behind,
    the_application,
)
from serve_app.tools.token_client import Reading, Server, first_model

_KEYS = {role[0]: role for role in ROLES}
_SHOW_S = 0.25  # seconds between two lines of figures on a terminal
_LOG_S = 1.0  # seconds between two lines elsewhere
_END_S = 60.0  # time for the last answers
_WINDOW_S = 1.0  # span that the rate covers
_QUESTIONS = (
    "Tell me a story about number {}.",
    "What happened next?",
    "Why?",
    "Tell it again, in other words.",
    "And what does that teach us?",
)


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The processes to kill, and the times. Without `kills`, keys of the terminal choose them."""

    kills: tuple[str, ...]
    every_s: float
    num_streams: int
    num_tokens: int  # an answer's tokens
    application: str | None
    api_key: str | None


@dataclass(slots=True)
class _Twins:
    """The tokens that both twins must receive, from the faster one."""

    tokens: list[int] = field(default_factory=list)
    restarts: int = 0  # after differences


class _Figures:
    """The counts so far."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.longest_s = self.longest_since_s = 0.0  # longest pause in all, and since the last kill
        self.errors: list[str] = []
        self._recent: list[tuple[float, int]] = []

    def add(self, now: float, num_tokens: int, pause_s: float) -> None:
        self.counts["tokens"] += num_tokens
        self.longest_s, self.longest_since_s = max(self.longest_s, pause_s), max(self.longest_since_s, pause_s)
        self._recent.append((now, num_tokens))

    def rate(self, now: float) -> float:
        self._recent = [(at, n) for at, n in self._recent if at > now - _WINDOW_S]
        return sum(n for _, n in self._recent) / _WINDOW_S


class _Conversation:
    """One stream after another, each the next turn."""

    def __init__(self, number: int, twins: _Twins, figures: _Figures, max_len: int, num_tokens: int) -> None:
        self._number, self._twins, self._figures = number, twins, figures
        self._max_len, self._num_tokens = max_len, num_tokens
        self._restarts = self._place = 0  # the twins' restarts, and position in their tokens
        self.last_at: float | None = None  # time of its last token or request; None while it does not wait

    async def talk(self, server: Server, questions: list[list[int]], stopping: asyncio.Event) -> None:
        history: list[int] = []
        for turn in count():
            if stopping.is_set():
                return
            question = questions[turn % (len(questions) - 1) + 1] if history else questions[0]
            has_restarted = self._restarts != self._twins.restarts
            if has_restarted or len(history) + len(question) + self._num_tokens > self._max_len:
                history, question = [], questions[0]
            if has_restarted:
                self._restarts, self._place = self._twins.restarts, 0
            sampling = {"temperature": 0.7, "seed": self._number // 2}
            reading = Reading(history + question, self._num_tokens, sampling, self._on_tokens)
            self.last_at = time.monotonic()
            await reading.read(server)
            self.last_at = None
            self._count(reading)
            history = history + question + reading.tokens

    def _on_tokens(self, _: Reading, tokens: list[int]) -> None:
        now, twins = time.monotonic(), self._twins
        assert self.last_at is not None
        self._figures.add(now, len(tokens), now - self.last_at)
        self.last_at = now
        for token in tokens:
            if self._restarts != twins.restarts:
                return
            if self._place == len(twins.tokens):
                twins.tokens.append(token)
            elif twins.tokens[self._place] != token:  # both restart
                self._figures.counts["differ"] += 1
                twins.tokens, twins.restarts = [], twins.restarts + 1
            self._place += 1

    def _count(self, reading: Reading) -> None:
        excess = len(reading.tokens) - self._num_tokens
        found = {"answers": 1, "doubled": max(0, excess), "cut": reading.num_cuts, "refused": reading.num_refusals}
        self._figures.counts.update(found)
        self._figures.counts["lost"] += max(0, -excess)
        if reading.error:
            self._figures.counts["failed"] += 1
            self._figures.errors.append(reading.error)


def chaos(url: str, plan: ChaosPlan) -> int:
    """Run until the plan's kills are done, or until q or Ctrl-C; return 1 if a token or answer was lost.

    Raises CallboardError unless the URL belongs to an application of this user."""
    if not plan.kills and not sys.stdin.isatty():
        raise CallboardError("There is no terminal for keys; name the processes to kill: --kill engine,runner.")
    session = session_behind(local_port(url))
    application = the_application(plan.application, session)

    def find() -> list[Process]:
        return processes_of(session, application)

    return asyncio.run(_Chaos(url, plan, application, find).run())


class _Chaos:
    """One run."""

    def __init__(self, url: str, plan: ChaosPlan, application: str, find: Callable[[], list[Process]]) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._plan, self._application, self._find = plan, application, find
        self._figures, self._stopping = _Figures(), asyncio.Event()
        self._started, self._killed_at = time.monotonic(), ""
        self._conversations: list[_Conversation] = []

    async def run(self) -> int:
        headers = {"authorization": f"Bearer {self._plan.api_key}"} if self._plan.api_key else {}
        server, max_len = await first_model(self._host, self._port, headers)
        tasks = []
        for number in range(self._plan.num_streams):
            if number % 2 == 0:
                twins, questions = _Twins(), await self._questions(server, number // 2)
            conversation = _Conversation(number, twins, self._figures, max_len, self._plan.num_tokens)
            self._conversations.append(conversation)
            tasks.append(
                in_background(asyncio.create_task(conversation.talk(server, questions, self._stopping)), "a stream")
            )
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._stopping.set)
        showing = asyncio.create_task(self._show())
        killing = asyncio.create_task(self._kill_all())
        stopped = in_background(asyncio.create_task(self._stopping.wait()), "the wait for the end")
        ends: list[asyncio.Task[Any]] = [*tasks, killing, stopped]
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self._stopping.set()
        _, late = await asyncio.wait(tasks, timeout=_END_S)
        for task in (*late, showing, killing):
            task.cancel()
        await asyncio.gather(*late, showing, killing, return_exceptions=True)
        for task in done:
            task.result()
        self._figures.counts["failed"] += len(late)
        return self._summary()

    async def _questions(self, server: Server, number: int) -> list[list[int]]:
        found = []
        for i, question in enumerate(_QUESTIONS):
            text = f"{'' if i == 0 else chr(10)}User: {question.format(number)}\nAssistant:"
            body = {"prompt": text, "add_special_tokens": i == 0}
            found.append(list((await server.request("POST", "/tokenize", body))["tokens"]))
        return found

    # ---- kills ----------------------------------------------------------------------------------------------------

    async def _kill_all(self) -> None:
        """Kill processes as ordered; returns after the last order."""
        turns: Counter[str] = Counter()
        async for role in self._orders():
            candidates = [p for p in await asyncio.to_thread(self._find) if p.role == role]
            if not candidates:
                self._print(f"{self._application} runs no {role} now; no process was killed.")
                continue
            process = candidates[turns[role] % len(candidates)]
            turns[role] += 1
            try:
                process.send(signal.SIGKILL)
            except ProcessLookupError:
                self._print(f"The {role} with process id {process.pid} has just ended by itself.")
                continue
            self._print_last_pause()
            where = f" of engine {process.engine}" if process.engine and role != "engine" else f" {process.engine}"
            self._print(f"killed the {role}{where.rstrip()} (process {process.pid})")
            self._killed_at, self._figures.longest_since_s = role, 0.0

    async def _orders(self) -> AsyncIterator[str]:
        """Yield the roles to kill at their times."""
        if self._plan.kills:
            for role in self._plan.kills:
                await asyncio.sleep(self._plan.every_s)
                yield role
            await asyncio.sleep(self._plan.every_s)
            return
        self._print("Keys: " + ", ".join(f"{key} kills the {role}" for key, role in _KEYS.items()) + "; q ends this.")
        keys: asyncio.Queue[str] = asyncio.Queue()
        with _keys_of_terminal():
            loop, descriptor = asyncio.get_running_loop(), sys.stdin.fileno()
            loop.add_reader(descriptor, lambda: keys.put_nowait(os.read(descriptor, 1).decode(errors="replace")))
            try:
                while (key := await keys.get()) not in ("q", ""):
                    if key in _KEYS:
                        yield _KEYS[key]
            finally:
                loop.remove_reader(descriptor)

    # ---- output ---------------------------------------------------------------------------------------------------

    async def _show(self) -> None:
        while True:
            if sys.stdout.isatty():
                print(f"\r\x1b[K{self._line()}", end="", flush=True)
            else:
                print(self._line(), flush=True)
            await asyncio.sleep(_SHOW_S if sys.stdout.isatty() else _LOG_S)

    def _line(self) -> str:
        now, counts = time.monotonic(), self._figures.counts
        waits = [now - c.last_at for c in self._conversations if c.last_at is not None]
        return (
            f"{now - self._started:7.1f} s  {len(waits)} streams  {self._figures.rate(now):,.0f} tok/s  "
            f"waiting {max(waits, default=0.0):.2f} s  longest pause {self._figures.longest_s:.2f} s  "
            f"lost {counts['lost']}  doubled {counts['doubled']}  differ {counts['differ']}"
        )

    def _print(self, text: str) -> None:
        start = "\r\x1b[K" if sys.stdout.isatty() else ""
        print(f"{start}{time.monotonic() - self._started:7.1f} s  {text}", flush=True)

    def _print_last_pause(self) -> None:
        if self._killed_at:
            self._print(f"longest pause since the {self._killed_at} was killed: {self._figures.longest_since_s:.2f} s")

    def _summary(self) -> int:
        self._print_last_pause()
        counts = self._figures.counts
        self._print(
            f"{counts['answers']} answers, {counts['tokens']:,} tokens: {counts['lost']} lost, {counts['doubled']} "
            f"doubled; {counts['failed']} answers failed; connections lost and made again: {counts['cut']}; "
            f"longest pause {self._figures.longest_s:.2f} s."
        )
        if self._figures.errors:
            self._print(f"The first failed answer: {self._figures.errors[0]}")
        if counts["differ"]:
            self._print(
                f"Twins differed {counts['differ']} times. Without --deterministic, rounding can cause this; with it, "
                "a token was changed."
            )
        return int(bool(counts["lost"] or counts["doubled"] or counts["failed"]))


@contextmanager
def _keys_of_terminal() -> Iterator[None]:
    """Read keys one by one, without echo, within the block."""
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
