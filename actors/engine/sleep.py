"""The sleep of one engine: its runners release their memory while its requests wait.

    awake  ->  the steps in flight end  ->  level 1: the runners keep their weights in the host's memory
                                            level 2: the runners end
    asleep ->  requests wait in the queue, within queue_timeout_s
    awake  ->  the weights are copied back, or read again; all requests are recomputed from their known tokens (C8)

Only the step thread uses this module.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from actors.engine.engine_adapters import EngineAdapters
from actors.engine.link_server import Connection
from actors.runners.step_channel import RunnersLost
from actors.wire.link_messages import Sleep
from runtime.core.engine import EngineCore
from runtime.spec.types import CallboardError

SetSleep = Callable[[int], None]  # of all runners: 1 sleeps, 2 ends them, 0 wakes from level 1


class EngineSleep:
    """The current level of sleep, and the requests of fronts for another level."""

    def __init__(
        self,
        core: EngineCore,
        set_level: SetSleep,
        finish: Callable[[], None],
        rebuild: Callable[[str], None],
        settled: Callable[[], None],
        adapters: EngineAdapters,
    ) -> None:
        """Args:
        set_level: sets the level of all runners.
        finish: collects the steps in flight and sends their tokens.
        rebuild: starts fresh runners, which are awake.
        settled: reports the new level to the fronts.
        adapters: loads nothing while the runners sleep."""
        self.level = 0
        self.requests: deque[tuple[Connection, Sleep]] = deque()
        self._core, self._set_level = core, set_level
        self._finish, self._rebuild, self._settled, self._adapters = finish, rebuild, settled, adapters

    def request(self, connection: Connection, message: Sleep) -> None:
        """Queue a front's request until the current step ends."""
        self.requests.append((connection, message))

    def apply_requests(self) -> bool:
        """Set the requested levels, between two steps. Returns True while the engine is asleep.

        Raises RunnersLost if the load of an adapter found the runners lost."""
        if self._adapters.loss:
            raise RunnersLost(self._adapters.loss)
        while self.requests:
            connection, message = self.requests.popleft()
            error = ""
            try:
                self._go_to(message.level)
            except CallboardError as e:
                error = str(e)
                if message.level or isinstance(e, RunnersLost):  # else they stay asleep
                    self._rebuild(error)
                    error = error if message.level else ""  # fresh runners are awake
            finally:
                self._settled()
                connection.answer(message.number, error)
        return self.level > 0

    def _go_to(self, level: int) -> None:
        if level > self.level:
            if not self.level:
                self._finish()
                self._core.lose()
            self.level = level  # before the runners sleep: copies may take longer than a step
            self._adapters.fell_asleep()
            self._set_level(level)
        elif not level and self.level == 1:
            self._wake()
            self._core.recover(self._core.executor)
            self.level = 0
            self._adapters.woke_up()
        elif not level and self.level == 2:
            self._rebuild("they ended to sleep")

    def _wake(self) -> None:
        try:
            self._set_level(0)
        except RunnersLost:
            raise
        except CallboardError:  # one rank failed; the others may be awake
            self._set_level(self.level)
            raise
