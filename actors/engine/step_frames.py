"""A step's frames: one for each front, with its streams' tokens and news."""

from __future__ import annotations

from collections.abc import Callable

from actors.engine.link_server import Connection, EngineStream
from actors.engine.metrics import EngineMetrics
from runtime.base.types import FinishReason, StepOutput
from runtime.core.engine import EngineCore
from runtime.core.request_state import RequestState


class StepFrames:
    """Sorts the output of each step by front, counts its tokens, and sends each front one frame."""

    def __init__(
        self, core: EngineCore, meter: EngineMetrics, finished: Callable[[RequestState, FinishReason], None]
    ) -> None:
        """`finished` ends the stream of each request that the step completed."""
        self._core, self._meter, self._finished = core, meter, finished
        self._notified: set[Connection] = set()  # fronts with an accepted request in their frames
        self.pending: StepOutput | None = None  # committed, not sent yet
        self.num_sends = 0  # calls of `send`: the loop goes round

    def accept(self, stream: EngineStream, has_slot: bool) -> None:
        """Report to the front that a request is queued or, with `has_slot`, running. The next frame carries it."""
        stream.connection.frame.accepted.append((stream.number, has_slot))
        self._notified.add(stream.connection)

    def send(self) -> None:
        """Send the pending output."""
        output, self.pending = self.pending, None
        self.num_sends += 1
        if output is None:
            return
        touched, self._notified = self._notified, set()
        num_others, num_prompt = self._add_tokens(output, touched)
        for state, report in output.reports:
            connection = state.owner.connection
            connection.frame.reports.append((state.owner.number, report))
            touched.add(connection)
            if report.is_output:
                self._add_start(state)
                num_prompt += state.prompt_len
        self._meter.emitted(len(output.states), num_others, num_prompt)
        for state, reason in output.finished:
            self._finished(state, reason)
            touched.add(state.owner.connection)
        for connection in touched:
            connection.flush(self._meter.sampled_at_wall)
            if connection.lease_expired:
                connection.close()

    def _add_tokens(self, output: StepOutput, touched: set[Connection]) -> tuple[int, int]:
        """Write the tokens into the frames' columns, and add the fronts to `touched`.

        Returns the number of tokens that do not follow one from the step before, and new streams' prompt tokens."""
        meter, logprobs, step = self._meter, output.logprobs, self._core.scheduler.stats.steps
        sampled_at, num_others, num_prompt = meter.sampled_at, 0, 0
        for i, (state, token) in enumerate(zip(output.states, output.token_ids, strict=True)):
            stream: EngineStream = state.owner
            connection = stream.connection
            if stream.last_step != step - 1:
                num_others += 1
                if stream.last_step is not None:
                    meter.token_latency.observe(sampled_at - stream.last_at)
                else:
                    num_prompt += state.prompt_len
                    self._add_start(state)
            stream.last_step, stream.last_at = step, sampled_at
            if i in logprobs:
                connection.frame.logprobs[len(connection.token_column)] = logprobs[i]
            connection.stream_column.append(stream.number)
            connection.token_column.append(token)
            touched.add(connection)
        return num_others, num_prompt

    def _add_start(self, state: RequestState) -> None:
        stream: EngineStream = state.owner
        assert state.num_cached is not None, "it was admitted"
        times = stream.admitted_at - stream.arrived_at, self._meter.sampled_at - stream.admitted_at
        stream.connection.frame.started.append((stream.number, state.num_cached, *times))
