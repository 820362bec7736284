"""The fronts of a simulated cluster: a real router each, and the engines' reports so far.

Or, in their place, an oracle that no router can beat.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Literal

from actors.front.router import Prompt, Route, Router, RoutingPolicy
from actors.wire.link_messages import CacheUpdate
from benchmarks.simulate.engine import SimulatedEngine
from runtime.base.model_info import ModelInfo
from runtime.core.request_state import RequestState
from runtime.policy.engine_load import EngineLoad

Policy = RoutingPolicy | Literal["foresight", "oracle"]
FRAME_S = 0.02  # time between an engine's two reports
LAG_S = 0.0005  # lag from an engine's frame to the front's picture


class Fronts:
    """All fronts, by number. An engine's report arrives everywhere at once, LAG_S later."""

    def __init__(self, num_fronts: int, policy: RoutingPolicy, info: ModelInfo) -> None:
        self._info, self._routers = info, [Router(policy) for _ in range(num_fronts)]
        self._frames: deque[tuple[float, str, CacheUpdate, list[int]]] = deque()
        self._engines: set[str] = set()
        self._stream = 0

    def add(self, engine: SimulatedEngine) -> None:
        """An engine is ready, and all fronts have a link to it."""
        engine.last_streams = [0] * len(self._routers)
        self._engines.add(engine.name)
        for router in self._routers:
            router.add(engine.name, self._info)
            router.apply(engine.name, engine.feed.snapshot())

    def remove(self, engine: SimulatedEngine) -> None:
        """It takes no more requests."""
        self._engines.remove(engine.name)
        for router in self._routers:
            router.remove(engine.name)

    def tell(self, engine: SimulatedEngine, now: float) -> None:
        """An engine's changes go to all fronts."""
        self._frames.append((now + LAG_S, engine.name, engine.feed.update(), engine.last_streams[:]))

    def choose(self, number: int, prompt: Prompt, now: float, refused: Collection[str]) -> Route:
        """Choose an engine for a request at this front, which counts it from now on."""
        frames, router = self._frames, self._routers[number]
        while frames and frames[0][0] <= now:
            _, engine, update, last_streams = frames.popleft()
            if engine not in self._engines:
                continue
            for each, update.last_stream in zip(self._routers, last_streams, strict=True):
                if not each.apply(engine, update):
                    raise RuntimeError("A frame was lost, and the simulation loses none.")
        return router.choose(prompt, self._engines - set(refused) if refused else None)

    def placed(self, number: int, choice: Route, engine: SimulatedEngine, prompt: Prompt) -> None:
        """The engine has taken it."""
        self._stream += 1
        engine.last_streams[number] = self._stream
        self._routers[number].note_sent(choice.engine, self._stream, len(prompt.token_ids) - choice.num_cached)

    def ended(self, state: RequestState) -> None:
        """An answer is complete."""


class Oracle(Fronts):
    """Knows at once the work of every engine. The engine that it chooses gets all of the prompt into its cache that any
    engine has ever computed. Its caches do not need luck, room or copies: a bound."""

    def __init__(self, engines: dict[str, SimulatedEngine]) -> None:
        self._all = engines
        self._computed: set[bytes] = set()

    def add(self, engine: SimulatedEngine) -> None:
        pass

    remove = add

    def tell(self, engine: SimulatedEngine, now: float) -> None:
        pass

    def choose(self, number: int, prompt: Prompt, now: float, refused: Collection[str]) -> Route:
        def load(engine: SimulatedEngine) -> tuple[int, int]:
            known = EngineLoad.of(engine.scheduler)
            return known.queued_tokens, known.num_running + known.num_waiting

        best = min((engine for name, engine in self._all.items() if name not in refused), key=load)
        return Route(best.name, best.warm(prompt, self._computed))

    def placed(self, number: int, choice: Route, engine: SimulatedEngine, prompt: Prompt) -> None:
        pass

    def ended(self, state: RequestState) -> None:
        self._computed.update(state.block_hashes)
