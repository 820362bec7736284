"""The rows and columns of the matrix: the faults, and the moments at which they happen."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.faults.tcp_proxy import TcpProxy
from benchmarks.faults.trainer import Trainer

WHEN = {
    "idle": "no request; a hundred come right after",
    "prefill": "the prompts, of 1,000 tokens, are being computed: few streams have their first token",
    "decode": "each stream has ten tokens at least",
    "verify": "the same, with a draft model",
    "states": "as decode, with recurrent states and prompts of 200 tokens",
    "update": "as decode, while a trainer sends the weights that the engines have, about twice a second",
    "drain": "the engine drains, and its streams are about to move",
    "start": "the engine has been killed just before, and another one loads its model",
}
ENGINE_ROLES = ("engine", "runner", "draft", "supervisor")
DRAFT_ONLY = "only the application of the column verify has a draft"


class Target(Protocol):
    """An application under load, as the faults hit it."""

    application: Any
    proxy: TcpProxy
    reads: asyncio.Event
    trainer: Trainer
    victim: str

    def send(self, role: str, number: signal.Signals) -> None: ...
    async def start_trainer(self) -> None: ...
    async def check_that_update_is_open(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Fault:
    """One row."""

    name: str
    text: str  # the fault's description
    do: Callable[[Target], Awaitable[None]]
    undo: Callable[[Target], Awaitable[None]] | None = None  # None if the application must recover by itself
    hold_s: float = 0.0  # how long until it is undone
    hits_engine: bool = False  # one engine's streams are hit; the others should notice nothing
    hits_cut: bool = False  # the clients hit are those with lost connections
    is_final: bool = False  # the application cannot recover, and another one is started
    through_proxy: bool = False
    none_when: dict[str, str] | None = None  # columns that make no sense, with the reason
    num_ranks: int = 1  # ranks in each engine of the application

    def why_not(self, when: str, has_disk: bool = True) -> str:
        """Why a cell is empty; empty if it is not."""
        if self.name == "full disk" and not has_disk:
            return "this machine lets its users make no disks"
        return (self.none_when or {}).get(when, "")


def _signal(role: str, number: signal.Signals) -> Callable[[Target], Awaitable[None]]:
    """Send it to the victim engine's process, or to the first one with that role (HAProxy and all engines: to
    all)."""

    async def send(cell: Target) -> None:
        cell.send(role, number)

    return send


def _kill(name: str, text: str, **fields: object) -> Fault:
    role = str(fields.pop("role", name))
    return Fault(f"{name} killed", text, _signal(role, signal.SIGKILL), **fields)  # type: ignore[arg-type]


def _stop(name: str, text: str, hold_s: float = 0.0, **fields: object) -> Fault:
    """Without `hold_s` the application itself must end the stopped process."""
    undo = _signal(name, signal.SIGCONT) if hold_s else None
    act = _signal(name, signal.SIGSTOP)
    return Fault(f"{name} stopped", text, act, undo, hold_s, **fields)  # type: ignore[arg-type]


async def _nothing(cell: Target) -> None:
    pass


async def _kill_raylet(cell: Target) -> None:
    await _signal("raylet", signal.SIGKILL)(cell)
    await asyncio.sleep(1.0)
    await cell.application.ask("add_node", timeout_s=60)


async def _swallow(cell: Target) -> None:
    cell.proxy.open.clear()


async def _carry_again(cell: Target) -> None:
    cell.proxy.open.set()
    cell.proxy.delay_s = 0.0


async def _slow(cell: Target) -> None:
    cell.proxy.delay_s = 0.2


async def _fill_disk(cell: Target) -> None:
    path = cell.application.path("filler")

    def fill() -> None:
        with suppress(OSError), path.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()

    await asyncio.to_thread(fill)


async def _empty_disk(cell: Target) -> None:
    cell.application.path("filler").unlink(missing_ok=True)


async def _shift_clock(cell: Target) -> None:
    await cell.application.ask("shift_clock", cell.victim, 3600.0)


async def _shift_back(cell: Target) -> None:
    with suppress(RuntimeError):  # the engine and its clock are gone
        await cell.application.ask("shift_clock", cell.victim, -3600.0)


async def _kill_trainer(cell: Target) -> None:
    await cell.trainer.kill_in_update()
    await cell.check_that_update_is_open()


async def _start_trainer(cell: Target) -> None:
    await cell.start_trainer()


async def _stop_reading(cell: Target) -> None:
    cell.reads.clear()


async def _read_again(cell: Target) -> None:
    cell.reads.set()


_NO_DRAFT = {when: DRAFT_ONLY for when in WHEN if when != "verify"}
_NO_TRAINER = {when: "no trainer" for when in WHEN if when != "update"}
_NO_STREAMS = {"idle": "no streams"}
_ONE_RANK = {"verify": "no draft with ranks", "states": "the application of this column has one rank"}
_TWO_RANKS: dict[str, Any] = {"hits_engine": True, "num_ranks": 2, "none_when": _ONE_RANK}
_NO_LINKS = {"start": "the engine that starts has no link yet"}
FAULTS = [
    Fault("nothing", "what the machine and the measurement do by themselves", _nothing),
    _kill("runner", "SIGKILL to the runner of one engine (its only rank)", hits_engine=True),
    _stop("runner", "SIGSTOP to it; the engine looks at it every second", hits_engine=True),
    _kill("rank", "SIGKILL to the runner of rank 1, of an engine that has two", **_TWO_RANKS),
    _stop("rank", "SIGSTOP to it; the engine looks at it every second", **_TWO_RANKS),
    _kill("draft", "SIGKILL to the draft of one engine", hits_engine=True, none_when=_NO_DRAFT),
    _stop("draft", "SIGSTOP to it", hits_engine=True, none_when=_NO_DRAFT),
    _kill("engine", "SIGKILL to one of two engines", hits_engine=True),
    _stop("engine", "SIGSTOP to it; its supervisor kills it after 10 s", hits_engine=True),
    _kill("engines", "SIGKILL to both at once: streams wait for one that has loaded its model", hits_engine=False),
    _kill("supervisor", "SIGKILL to the Serve replica that one engine belongs to", hits_engine=True),
    _stop("supervisor", "SIGSTOP to it for 10 s", 10.0, hits_engine=True),
    _kill("front", "SIGKILL to one of two fronts: its clients lose their connections and send again", hits_cut=True),
    _stop("front", "SIGSTOP to it for 10 s", 10.0),
    _kill("haproxy", "SIGKILL to HAProxy: all clients lose their connections and send again", hits_cut=True),
    _stop("haproxy", "SIGSTOP to it for 5 s", 5.0),
    Fault("raylet killed", "SIGKILL to Ray's daemon of one engine's node; a second later another node joins",
          _kill_raylet, hits_engine=True),
    _stop("raylet", "SIGSTOP to it for 10 s", 10.0, hits_engine=True),
    _kill("controller", "SIGKILL to Serve's controller"),
    _stop("controller", "SIGSTOP to it for 10 s", 10.0),
    _stop("gcs", "SIGSTOP to Ray's global control service for 60 s", 60.0,
          none_when={"start": "Ray starts no process without it", "drain": "the order to drain is a Ray call"}),
    Fault("gcs killed", "SIGKILL to it, observed for 20 s; Ray then needs a new start",
          _signal("gcs", signal.SIGKILL), _nothing, 20.0, is_final=True,
          none_when={"start": "Ray starts no process without it", "drain": "the order to drain is a Ray call"}),
    Fault("link half-open", "both links of one engine swallow all bytes for 20 s", _swallow, _carry_again, 20.0,
          hits_engine=True, through_proxy=True, none_when=_NO_LINKS),
    Fault("link slow", "both links of one engine take 200 ms more each way for 5 s", _slow, _carry_again, 5.0,
          hits_engine=True, through_proxy=True, none_when=_NO_LINKS),
    Fault("full disk", "the disk of Ray's and HAProxy's files is full for 10 s", _fill_disk, _empty_disk, 10.0),
    Fault("clock jump", "`time.time` of one engine's process jumps by an hour, and back after 5 s (in Python alone: "
          "namespaces share the system's clock)", _shift_clock, _shift_back, 5.0,
          hits_engine=True, none_when={"start": "the process is not there yet"}),
    Fault("silent readers", "every tenth client reads nothing for 5 s", _stop_reading, _read_again, 5.0,
          none_when=_NO_STREAMS),
    Fault("trainer killed", "SIGKILL to the trainer between start and finish of an update; another one is refused, and "
          "after 2 s a third one discards the open update", _kill_trainer, _start_trainer, 2.0, none_when=_NO_TRAINER),
]  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
# Faults that no cell shows, with the reason.
ABSENT = {
    "keeper": "it copies between memory and the tier's disk; its death costs the copies in flight, and another one "
    "starts ([kv-tier.md](kv-tier.md))",
    "tier damaged": "a flipped bit, a torn or a deleted file of the tier is a miss: its tokens are computed",
    "tier full": "entries used longest ago make room; a full disk or `/dev/shm` costs hits alone",
    "two engines": "engines of a node share a tier; a lock protects its reservations, and its owner's death frees it",
    "head node": "the fronts of an application on one machine are on its head node; with fronts elsewhere it is the "
    "row of the GCS, the head node's only own process",
    "late node": "no stream exists before the first machine joins; `python -m benchmarks.cluster --cases "
    "node-returns` measures it "
    "([cluster.md](cluster.md#machines-that-join-later))",
}
