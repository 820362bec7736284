"""Engines, fronts and requests on one virtual clock.

Every change is an event in a heap: an engine's next step, a client's request, an engine that becomes ready, drains or
dies, a decision of scaling. Fronts choose engines by their reports, which are as late as the engines' frames. Each
front knows its own choices at once, and other fronts' choices when the engine reports them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from actors.engine.autoscaling import EngineFigures, ScalingPolicy
from actors.front.router import Prompt
from benchmarks.simulate.engine import Gaps, SimulatedEngine
from benchmarks.simulate.foresight import Foresight
from benchmarks.simulate.fronts import FRAME_S, Fronts, Oracle, Policy
from benchmarks.simulate.step_times import StepTimes
from benchmarks.simulate.traces import Conversation, Job
from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.core.prefix_cache import hash_blocks, root_hash
from runtime.core.request_state import RequestState
from runtime.policy.engine_load import EngineLoad

DEATH_S = 0.05  # until fronts notice that an engine died
DRAIN_S = 1.0  # time until streams leave an engine that drains
LOOK_S = 1.0  # time between two decisions of the scaling policy


@dataclass(frozen=True)
class Shape:
    """Settings of a simulation. `merge`: steps that cannot be distinguished are planned together (engine.py)."""

    times: StepTimes
    num_engines: int
    num_kv_blocks: int
    num_fronts: int = 2
    policy: Policy = "prefix"
    merge: bool = True
    max_num_seqs: int = 256
    max_model_len: int = 131072

    def config(self) -> EngineConfig:
        return EngineConfig(device="cuda", max_num_seqs=self.max_num_seqs).sized_for("cuda")

    def info(self) -> ModelInfo:
        return ModelInfo(
            "simulated", 1 << 17, self.max_model_len, (0,), self.num_kv_blocks, 16, "bfloat16", "cuda",
            self.max_num_seqs, 8192,
        )  # fmt: skip


@dataclass(slots=True)
class Totals:
    """The record of a simulation: columns, a value for each answer, and counts."""

    sent: array[float] = field(default_factory=lambda: array("d"))
    ttft: array[float] = field(default_factory=lambda: array("f"))
    ended: array[float] = field(default_factory=lambda: array("d"))
    num_output: array[int] = field(default_factory=lambda: array("i"))
    num_prompt: array[int] = field(default_factory=lambda: array("i"))
    num_cached: array[int] = field(default_factory=lambda: array("i"))
    num_expected: array[int] = field(default_factory=lambda: array("i"))  # cached tokens, by the front's picture
    gaps: Gaps = field(default_factory=Gaps)
    num_asked: int = 0
    num_lost_tokens: int = 0  # that an answer had too few, or too many
    num_refused: int = 0
    num_moves: int = 0


class Cluster:
    """One simulation. `engines` are the living ones; `num_asked` of scaling is how many there should be."""

    def __init__(self, shape: Shape, scaling: ScalingPolicy | None = None) -> None:
        self.shape, self.scaling = shape, scaling
        self.config, self.info = shape.config(), shape.info()
        self._kind = (self.info.fingerprint, self.info.block_size)
        # hashes of the parts that begin conversations
        self._shared_hashes: dict[tuple[str, int | None], list[bytes]] = {}
        self.now = 0.0
        self.engines: dict[str, SimulatedEngine] = {}
        self.totals = Totals()
        self.scale = [(0.0, shape.num_engines)]  # each decision's (time, number of engines)
        self._foresight: Foresight | None = None
        if shape.policy == "oracle":
            self.fronts: Fronts = Oracle(self.engines)
        else:
            policy = "prefix" if shape.policy == "foresight" else shape.policy
            self.fronts = Fronts(shape.num_fronts, policy, self.info)
        self._serving: dict[str, SimulatedEngine] = {}
        self._parked: list[tuple[Job, array[int]]] = []
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._num_jobs, self._num_engines = count(), count(1), count(1)
        for _ in range(shape.num_engines):
            self.start_engine()
        if scaling is not None:
            self.at(LOOK_S, self._look)

    def at(self, when: float, what: Callable[..., None], *args: Any) -> None:
        """Let something happen."""
        heappush(self._heap, (when, next(self._order), what, args))

    def run(self, conversations: Iterable[Conversation], until: float = inf) -> None:
        """Run until all answers are complete, or until that time."""
        if self.shape.policy == "foresight":
            conversations = list(conversations)
            self._foresight = Foresight(conversations, lambda: self.now)
            for engine in self.engines.values():
                self._foresight.give(engine)
        starts, heap = iter(conversations), self._heap
        following = next(starts, None)
        while (heap and (heap[0][2] != self._look or self._live)) or following is not None:
            if following is not None and (not heap or following.start <= heap[0][0]):
                if following.start > until:
                    return
                self.now = following.start
                self._ask(following)
                following = next(starts, None)
            else:
                when, _, what, args = heappop(heap)
                if when > until:
                    return
                self.now = when
                what(*args)

    # ---- requests -------------------------------------------------------------------------------------------------

    @property
    def _live(self) -> int:
        """Requests that were sent and have not ended."""
        return self.totals.num_asked - len(self.totals.sent) - self.totals.num_refused

    def live_jobs(self) -> Iterator[Job]:
        """The requests that engines have now."""
        for engine in self.engines.values():
            yield from (state.owner for state in engine.scheduler.requests.values())

    def _ask(self, conversation: Conversation) -> None:
        if (job := conversation.next_job(next(self._num_jobs), self.now)) is not None:
            self.totals.num_asked += 1
            self.at(self.now + self.shape.times.front_us[0] / 1e6, self._place, job, job.prompt)

    def _place(self, job: Job, tokens: array[int]) -> None:
        """A request, or a stream of a lost engine, has arrived at its front."""
        prompt, front, refused = self._prompt(job, tokens), job.number % self.shape.num_fronts, set[str]()
        while len(refused) < len(self._serving):
            choice = self.fronts.choose(front, prompt, self.now, refused)
            engine = self._serving[choice.engine]
            if engine.is_full(len(tokens)) and job.first_at is None:
                refused.add(choice.engine)
                continue
            self.fronts.placed(front, choice, engine, prompt)
            job.num_expected = choice.num_cached
            engine.add(job, tokens, self.now, prompt.block_hashes(self._kind))
            self._watch(engine)
            return
        if refused:
            self.totals.num_refused += 1
        else:
            self._parked.append((job, tokens))

    def _prompt(self, job: Job, tokens: array[int]) -> Prompt:
        """A request's tokens; blocks that an earlier turn or another conversation had are not hashed again."""
        conversation, (fingerprint, size) = job.conversation, self._kind
        if not conversation.block_hashes and (key := conversation.shared_key) is not None:
            if (job.salt, key) not in self._shared_hashes:
                part = conversation.turns[0].parts[0]
                shared = part.tokens()[: part.length // size * size]
                self._shared_hashes[job.salt, key] = hash_blocks(root_hash(fingerprint, job.salt), shared, size)
            conversation.block_hashes = self._shared_hashes[job.salt, key]
        return Prompt(tokens, job.salt, hashes={self._kind: conversation.block_hashes[:]})

    def _ended(self, job: Job, state: RequestState, now: float) -> None:
        totals, back_s = self.totals, self.shape.times.front_us[1] / 1e6
        answer = state.tokens[job.prompt_len :]
        assert job.first_at is not None
        totals.sent.append(job.sent)
        totals.ttft.append(job.first_at + back_s - job.sent)
        totals.ended.append(now + back_s)
        totals.num_output.append(len(answer))
        totals.num_prompt.append(job.prompt_len)
        totals.num_cached.append(job.num_cached)
        totals.num_expected.append(min(job.num_expected, job.prompt_len))
        totals.num_lost_tokens += abs(job.output_len - len(answer))
        self.fronts.ended(state)
        pause_s = job.conversation.answered(job, answer, state.block_hashes)
        next_at = None if pause_s is None else now + back_s + pause_s
        if next_at is not None:
            self.at(next_at, self._ask, job.conversation)
        if self._foresight is not None:
            num_shared = len(self._shared_hashes.get((job.salt, job.conversation.shared_key), ()))
            self._foresight.answered(job, state.block_hashes, num_shared, next_at)

    # ---- engines --------------------------------------------------------------------------------------------------

    def start_engine(self) -> None:
        """Add one engine that is ready."""
        name = f"engine-{next(self._num_engines)}"
        engine = SimulatedEngine(
            name, self.config, self.info, self.shape.times, self._ended, self.totals.gaps, self.now, self.shape.merge
        )
        self.engines[name] = self._serving[name] = engine
        self.fronts.add(engine)
        parked, self._parked = self._parked, []
        for job, tokens in parked:
            self._place(job, tokens)

    def kill_engine(self, name: str) -> None:
        """Kill an engine now; its streams go on elsewhere when the fronts know."""
        engine = self._stop_serving(name)
        for job, tokens in engine.take_all(self.now):
            self._move(job, tokens, DEATH_S)
        del self.engines[name]

    def drain_engine(self, name: str) -> None:
        """An engine takes no more requests, its streams move, and it ends."""
        self._stop_serving(name)
        self.at(self.now + DRAIN_S, self._leave, name)

    def _leave(self, name: str) -> None:
        for job, tokens in self.engines.pop(name).take_all(self.now):
            self._move(job, tokens, 0.0)

    def _stop_serving(self, name: str) -> SimulatedEngine:
        engine = self._serving.pop(name)
        self.fronts.remove(engine)
        return engine

    def _move(self, job: Job, tokens: array[int], delay_s: float) -> None:
        self.totals.num_moves += 1
        self.at(self.now + delay_s, self._place, job, tokens)

    def _watch(self, engine: SimulatedEngine) -> None:
        """Look at an engine again at its next step, and send its changes to the fronts."""
        if engine.next_at < inf and engine.watched_at != engine.next_at:
            engine.watched_at = engine.next_at
            self.at(engine.next_at, self._advance, engine, engine.next_at)

    def _advance(self, engine: SimulatedEngine, when: float) -> None:
        if engine.next_at == when:
            engine.advance(when)
            self._watch(engine)
            if engine.told_at < inf:  # otherwise its next action is scheduled
                self.at(max(when, engine.told_at + FRAME_S), self._tell, engine)
                engine.told_at = inf

    def _tell(self, engine: SimulatedEngine) -> None:
        engine.told_at = self.now
        if engine.name in self._serving:
            self.fronts.tell(engine, self.now)

    # ---- scaling --------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Let the scaling policy decide."""
        assert self.scaling is not None
        asked = self.scale[-1][1]
        wanted = self.scaling.decide([self._figures(e) for e in self._serving.values()], asked, self.now)
        if wanted != asked:
            self.scale.append((self.now, wanted))
        for _ in range(wanted - asked):
            self.at(self.now + self.shape.times.start_s, self.start_engine)
        for name in list(self._serving)[wanted:] if wanted < asked else ():
            self.drain_engine(name)
        self.at(self.now + LOOK_S, self._look)

    def _figures(self, engine: SimulatedEngine) -> EngineFigures:
        load, times = EngineLoad.of(engine.scheduler), self.shape.times
        idle_s = 0.0 if load.num_running or load.num_waiting else self.now - engine.busy_at
        return EngineFigures(
            queued_tokens=load.queued_tokens,
            prefill_rate=times.prefill_rate,
            num_live=load.num_running + load.num_waiting,
            max_rows=engine.scheduler.max_num_seqs,
            num_used_blocks=load.num_blocks - load.num_free_blocks,
            num_blocks=load.num_blocks,
            idle_s=idle_s,
        )
