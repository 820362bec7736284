"""Sleep of one engine, whose runners give their memory back while its requests wait.

    awake  ->  the steps in flight end  ->  level 1: the runners keep their weights in the host's memory
                                            level 2: the runners end
    asleep ->  requests wait in the queue, new ones too, for as long as they may
    awake  ->  the weights are back, or read again; all requests are computed again from their known tokens (C8)

The step thread owns all of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from actors.engine.adapter_loading import EngineAdapters
from actors.engine.link_server import Connection
from actors.engine.step_channel import RunnersLost
from actors.wire.messages import Sleep
from runtime.core.engine import EngineCore
from runtime.spec.types import CallboardError

SetSleep = Callable[[int], None]  # lets all runners sleep at level 1, ends them at 2, and wakes those at level 1 with 0


class EngineSleep:
    """How deep the runners sleep, and the fronts that have asked for another level."""

    def __init__(
        self,
        core: EngineCore,
        set_level: SetSleep,
        finish: Callable[[], None],
        rebuild: Callable[[str], None],
        settled: Callable[[], None],
        adapters: EngineAdapters,
    ) -> None:
        """`finish` sends what the steps in flight sample, `rebuild` gets fresh runners, which are awake, and `settled`
        tells the fronts that this is over. `adapters` loads nothing while the runners sleep."""
        self.level = 0
        self.requests: deque[tuple[Connection, Sleep]] = deque()
        self._core, self._set_level = core, set_level
        self._finish, self._rebuild, self._settled, self._adapters = finish, rebuild, settled, adapters

    def request(self, connection: Connection, message: Sleep) -> None:
        """Follow a front's request after the current step."""
        self.requests.append((connection, message))

    def follow(self) -> bool:
        """Come to the levels that were asked for, between two steps; True while the engine is asleep. Raises
        RunnersLost if a load of an adapter has found that they are lost."""
        if self._adapters.loss:
            raise RunnersLost(self._adapters.loss)
        while self.requests:
            connection, message = self.requests.popleft()
            error = ""
            try:
                self._go_to(message.level)
            except CallboardError as e:
                error = str(e)
                if message.level or isinstance(e, RunnersLost):  # else they sleep on
                    self._rebuild(error)
                    error = error if message.level else ""  # fresh ones are awake
            finally:
                self._settled()
                connection.answer(message.number, error)
        return self.level > 0

    def _go_to(self, level: int) -> None:
        if level > self.level:
            if not self.level:
                self._finish()
                self._core.lose()
            self.level = level  # before the runners are: copies may take longer than a step
            self._adapters.fell_asleep()
            self._set_level(level)
        elif not level and self.level == 1:
            self._wake()
            self._core.recover(self._core.executor)
            self.level = 0
            self._adapters.woke_up()
        elif not level and self.level == 2:
            self._rebuild("they were let go to sleep")

    def _wake(self) -> None:
        try:
            self._set_level(0)
        except RunnersLost:
            raise
        except CallboardError:  # of one rank; the others may be awake
            self._set_level(self.level)
            raise
