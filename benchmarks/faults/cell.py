"""One fault, caused once in a running application while its streams are read: the tokens lost, and the length of
pauses."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from actors.runners.runner_group import LocalProcess
from benchmarks.faults.matrix import ENGINE_ROLES, Fault
from benchmarks.faults.tcp_proxy import TcpProxy
from benchmarks.faults.trainer import Refused, Trainer, call
from runtime.base.types import SamplingParams
from runtime.llm import LLM
from serve_app.tools.token_client import Reading, Server

NUM_TOKENS = 150  # answer length
PROMPT_LENS = {"prefill": 1000, "states": 200}  # 20 in the other columns
_POLL_S = 0.1
_LEAST_S = 2.0  # that each cell is watched for after its fault
_WHOLE_S = 120.0  # limit until the application is whole again
_UPDATE_S = 30.0  # limit for a weight update once the application is whole
_END_S = 60.0  # limit until the last answers


class Asked(Protocol):
    """The application, wherever it runs."""

    async def ask(self, method: str, *arguments: Any, timeout_s: float = 15.0) -> Any: ...


class Answers:
    """Prompts, and the model's answers to them, computed undisturbed in this process."""

    def __init__(self, model: str, num_streams: int, prompt_len: int, rank_invariant: bool = False) -> None:
        self.model = Path(model)
        self.prompts = [
            [3 + (7 * i + 13 * j + i * j) % 250 for j in range(prompt_len + i % 7)] for i in range(num_streams)
        ]
        self.sampling = [{"temperature": 0.8 * (i % 2), "seed": i} for i in range(num_streams)]
        exact = {"deterministic": True, "rank_invariant": rank_invariant, "num_threads": 1}
        llm = LLM(model, **exact, kv_cache_memory=0.3, max_model_len=2048)
        params = [SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **fields) for fields in self.sampling]
        self.tokens = [answer.token_ids for answer in llm.generate(self.prompts, params)]


@dataclass(slots=True)
class Client:
    """A client that sends one request after another."""

    number: int
    readings: list[Reading] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def pause(self, since: float) -> float:
        """The longest time after `since` without an expected token; a pause that began before it counts whole."""
        longest = 0.0
        for reading, begun, ended in zip(self.readings, self.begun, self.ended, strict=True):
            at = begun
            for now in [*(when for when, _ in reading.times), ended]:
                if now > since:
                    longest = max(longest, now - at)
                at = now
        return longest


class Cell:
    """One run. Afterwards the application is whole again, unless the fault is final."""

    def __init__(
        self, application: Any, server: Server, answers: Answers, fault: Fault, when: str, hold_s: float | None
    ) -> None:
        self.application, self.server, self.answers, self.fault, self.when = application, server, answers, fault, when
        self.hold_s = fault.hold_s if hold_s is None or not fault.hold_s else hold_s
        self.proxy, self.reads = TcpProxy(), asyncio.Event()
        self.reads.set()
        self.victim = ""
        self.trainer: Trainer
        self._struck: list[LocalProcess] = []  # got a signal
        self._processes: list[tuple[str, str, int]] = []
        self._stopping = asyncio.Event()
        self._clients = [Client(i) for i in range(len(answers.prompts))]
        self._tasks: list[asyncio.Task[None]] = []
        self._trainers: list[Trainer] = []  # trainers in the column update

    def pids(self, role: str) -> list[int]:
        """The processes that a fault with this name hits."""
        if role == "gcs":
            return [self._gcs]
        if role == "engines":
            return [pid for name, _, pid in self._processes if name == "engine"]
        if role == "rank":  # runners are listed by rank
            return [pid for name, engine, pid in self._processes if (name, engine) == ("runner", self.victim)][1:2]
        found = [pid for name, engine, pid in self._processes
                 if name == role and (role not in ENGINE_ROLES or engine == self.victim)]  # fmt: skip
        return found if role == "haproxy" else found[:1]

    def send(self, role: str, number: signal.Signals) -> None:
        """A signal to the processes that a fault with this name hits."""
        for pid in self.pids(role):
            with suppress(ProcessLookupError):
                self._struck.append(LocalProcess(pid))
                os.kill(pid, number)

    async def run(self) -> dict[str, Any]:
        try:
            return await self._run()
        finally:
            for trainer in self._trainers:
                trainer.kill()

    async def _run(self) -> dict[str, Any]:
        await self._until_whole()
        self.victim = await self.application.ask("victim")
        self._gcs = await self.application.ask("gcs")
        if self.fault.through_proxy:
            port = await self.proxy.start()
            self.proxy.target = await self.application.ask("link_through", self.victim, port)
            await self._until_whole()
        self._processes = await self.application.ask("processes")
        if self.when == "update":
            await self.start_trainer()
        if self.when != "idle":
            await self._begin()
        before = time.monotonic()
        hit = await self._hit() if self.when not in ("idle", "start") else []
        if self.when == "start":
            await self._restart_victim()
        elif self.when == "drain":
            await self.application.ask("drain", self.victim)
        at = time.monotonic()
        await self.fault.do(self)
        if self.when == "idle":
            await self._begin()
        if self.hold_s:
            await asyncio.sleep(self.hold_s)
            if self.fault.undo is not None:
                await self.fault.undo(self)
        if self.when == "drain":
            await self._end_drained()
        ended = time.monotonic() if self.hold_s or self.when == "drain" else at
        whole_s = 0.0 if self.fault.is_final else await self._until_whole(ended)
        updates = await self._end_updates(ended) if self.when == "update" else {}
        await asyncio.sleep(max(0.0, at + _LEAST_S - time.monotonic()))
        await self._end()
        if self.fault.through_proxy and self.when != "start":
            await self._restart_victim()  # the next engine's links are plain again
            await self._until_whole()
            await self.proxy.close()
        return self._figures(before if self.when in ("start", "drain") else at, hit, whole_s) | updates

    # ---- before and after -----------------------------------------------------------------------------------------

    async def _until_whole(self, since: float | None = None) -> float:
        """Seconds until the application has been whole twice."""
        since, found, missing = since or time.monotonic(), 0.0, "it was not asked"
        while time.monotonic() < since + _WHOLE_S:
            try:
                missing = await self.application.ask("strength")
            except RuntimeError as e:  # it was cut off itself
                missing = str(e)
            if any(process.is_stopped for process in self._struck):
                missing = "a process is stopped, and nobody has noticed"
            if not missing and found:
                return found - since
            found = 0.0 if missing else time.monotonic()
            await asyncio.sleep(_POLL_S)
        raise TimeoutError(f"not whole after {_WHOLE_S:g} s: {missing}")

    async def _begin(self) -> None:
        """Start all clients, and wait for the moment of this column."""
        self._tasks = [asyncio.create_task(self._ask(client)) for client in self._clients]
        if self.when == "idle":
            return
        early = self.when == "prefill"
        wanted, tokens = (len(self._clients) // 20 + 1, 1) if early else (len(self._clients), 10)
        async with asyncio.timeout(_END_S):
            while sum(bool(c.readings) and len(c.readings[0].tokens) >= tokens for c in self._clients) < wanted:
                for task in self._tasks:
                    if task.done():
                        task.result()
                await asyncio.sleep(0.002)

    # ---- the trainer ----------------------------------------------------------------------------------------------

    @property
    def _url(self) -> str:
        return f"http://{self.server.host}:{self.server.port}"

    async def start_trainer(self) -> None:
        """Start a trainer, and wait for its first update."""
        self.trainer = Trainer(self._url, self.answers.model)
        self._trainers.append(self.trainer)
        await self.trainer.start()
        async with asyncio.timeout(_UPDATE_S):
            await self.trainer.wait_for("finished")

    async def check_that_update_is_open(self) -> None:
        """A dead trainer's update remains open, and another trainer's start is refused."""
        try:
            answer: Any = await asyncio.to_thread(call, self._url, "POST", "/start_weight_update")
        except Refused as e:
            answer = str(e)
        assert "weights_busy" in answer, f"a second update was not refused: {answer}"

    async def _end_updates(self, since: float) -> dict[str, Any]:
        """Wait for an update that begins when the application is whole. All engines must then have its version."""
        try:
            async with asyncio.timeout(_UPDATE_S):
                await self.trainer.wait_for("finished", begun=time.monotonic())
        except TimeoutError:
            raise TimeoutError(f"no update after {_UPDATE_S:g} s: {self.trainer.events[-3:]}") from None
        updated_s = time.monotonic() - since
        await self.trainer.close()
        info = await asyncio.to_thread(call, self._url, "GET", "/weight_info")
        versions = [(each["weight_version"], each["serial"]) for each in info["engines"]]
        assert versions == versions[:1] * 2, f"the engines differ after an update: {info}"
        assert not info["updating"], f"an update is open after its end: {info}"
        counts = {name: sum(each.count(name) for each in self._trainers) for name in ("finished", "failed")}
        return {"updates": counts["finished"], "failed_updates": counts["failed"], "updated_s": updated_s}

    # ---- the clients ----------------------------------------------------------------------------------------------

    async def _ask(self, client: Client) -> None:
        """The same prompt again and again, each time without its predecessors' cache."""
        i, is_silent = client.number, self.fault.name == "silent readers" and client.number % 10 == 0
        while not self._stopping.is_set():
            salt = f"{id(self)}/{i}/{len(client.readings)}"
            fields = self.answers.sampling[i] | {"cache_salt": salt, "request_id": f"{i}"}
            reading = Reading(self.answers.prompts[i], NUM_TOKENS, fields)
            client.readings.append(reading)
            client.begun.append(time.monotonic())
            await reading.read(self.server, self.reads if is_silent else None)
            client.ended.append(time.monotonic())
            if reading.error:
                await asyncio.sleep(_POLL_S)

    async def _hit(self) -> list[int]:
        """The clients with streams on the victim engine."""
        if not self.fault.hits_engine:
            return []
        ids = await self.application.ask("requests_of", self.victim)
        return [int(name.rpartition("-")[0].rpartition("-")[2]) for name in ids]

    async def _pid_of_victim(self) -> int | None:
        async with asyncio.timeout(_WHOLE_S):
            while True:
                with suppress(RuntimeError):  # the fault may hit the process that answers
                    self._processes = await self.application.ask("processes")
                    break
                await asyncio.sleep(_POLL_S)
        return next((pid for role, engine, pid in self._processes if (role, engine) == ("engine", self.victim)), None)

    async def _restart_victim(self) -> None:
        """Kill the engine, and return when another one has started in its place."""
        before = await self._pid_of_victim()
        assert before is not None
        os.kill(before, signal.SIGKILL)
        async with asyncio.timeout(_WHOLE_S):
            while (await self._pid_of_victim()) in (None, before):
                await asyncio.sleep(0.02)
            role = self.fault.name.partition(" ")[0]
            while role in ("runner", "rank") and not self.pids(role):
                await self._pid_of_victim()

    async def _end_drained(self) -> None:
        """A drained engine returns only as a new replica, so it is killed when its streams have left."""
        await asyncio.sleep(_LEAST_S)
        if self.pids("engine") == [await self._pid_of_victim()]:
            await self._restart_victim()

    async def _end(self) -> None:
        """Let each client have its last answer."""
        self._stopping.set()
        _, late = await asyncio.wait(self._tasks, timeout=_END_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ---- what came out --------------------------------------------------------------------------------------------

    def _figures(self, since: float, hit: list[int], whole_s: float) -> dict[str, Any]:
        counts: Counter[str] = Counter()
        for client in self._clients:
            client.ended += [time.monotonic()] * (len(client.begun) - len(client.ended))  # it was given up
            right = self.answers.tokens[client.number]
            for reading in client.readings:
                pairs = zip(reading.tokens, right, strict=False)
                counts["requests"] += 1
                counts["cut"] += reading.num_cuts
                counts["refused"] += reading.num_refusals
                counts["lost"] += bool(reading.error) or len(reading.tokens) < NUM_TOKENS
                counts["wrong_tokens"] += sum(a != b for a, b in pairs) + max(0, len(reading.tokens) - NUM_TOKENS)
                if not reading.error:
                    counts["wrong_tokens"] += max(0, NUM_TOKENS - len(reading.tokens))
        if self.fault.hits_cut:
            hit = [client.number for client in self._clients if any(r.num_cuts for r in client.readings)]
        if self.fault.name == "silent readers":
            hit = [client.number for client in self._clients if client.number % 10 == 0]
        pauses = [client.pause(since) for client in self._clients]
        errors = [r.error for c in self._clients for r in c.readings if r.error]
        hit_pauses = [pauses[i] for i in hit]
        others = [pause for i, pause in enumerate(pauses) if i not in hit]
        names = ("requests", "lost", "wrong_tokens", "cut", "refused")
        return {name: counts[name] for name in names} | {
            "num_hit": len(hit),
            "hit_pause_s": [median(hit_pauses), max(hit_pauses)] if hit_pauses else None,
            "others_pause_s": [median(others), max(others)] if others else None,
            "whole_s": whole_s,
            "held_s": self.hold_s,
            **({"errors": sorted(set(errors))[:3]} if errors else {}),
        }
