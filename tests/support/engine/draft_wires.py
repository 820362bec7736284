"""Connections to drafts that take their time, by a clock of the test's."""

from runtime.speculation.draft import LocalWire


class SlowWire(LocalWire):
    """A draft that takes `seconds_of(tokens it is behind)` for an answer."""

    def __init__(self, core, clock, seconds_of):
        super().__init__(core)
        self.clock, self.seconds_of, self.ready_at = clock, seconds_of, 0.0

    def send(self, told):
        behind = max((len(commit.token_ids) for commit in told.committed), default=0)
        self.ready_at = max(self.ready_at, self.clock.now) + self.seconds_of(behind)
        super().send(told)

    def receive(self, timeout_s):
        if self.clock.now + timeout_s < self.ready_at:
            self.clock.now += timeout_s
            return None
        self.clock.now = max(self.clock.now, self.ready_at)
        return super().receive(timeout_s)


class BusyWire(LocalWire):
    """A draft with steps of `step_s`, like a draft that other engines use too."""

    def __init__(self, core, clock, step_s):
        super().__init__(core)
        self.clock, self.step_s, self.free_at = clock, step_s, 0.0

    def send(self, told):
        self.free_at = max(self.free_at, self.clock.now)
        super().send(told)

    def receive(self, timeout_s):
        until = self.clock.now + timeout_s
        while not self._core.outbox and self.free_at + self.step_s <= until and self._core.step():
            self.free_at += self.step_s
        came = self._core.outbox.pop(None, None)
        self.clock.now = until if came is None else max(self.clock.now, self.free_at)
        return came
