"""The live requests of an engine, from their arrival on a link to their end. The step thread owns them."""

from __future__ import annotations

import time
from dataclasses import replace

from actors.engine.engine_adapters import EngineAdapters
from actors.engine.link_server import Connection, EngineStream
from actors.engine.metrics import EngineMetrics
from actors.engine.queue_limits import HeldRequests, QueueLimits
from actors.engine.step_frames import StepFrames
from actors.wire.engine_client import Refusal
from actors.wire.link_messages import Abort, AbortById, Ended, Refused, Submit, client_id
from runtime.base.config import EngineConfig
from runtime.base.types import NOT_FINITE, CallboardError, FinishReason, Request
from runtime.core.engine import EngineCore
from runtime.core.request_state import RequestState
from runtime.policy.kept_outputs import KeptOutputs
from runtime.policy.queue_sizes import QueueSizes


class LiveRequests:
    """Queues, aborts and ends requests. Each is a stream of one front."""

    def __init__(self, config: EngineConfig, core: EngineCore, adapters: EngineAdapters, meter: EngineMetrics) -> None:
        self._config, self._core, self._adapters, self._meter = config, core, adapters, meter
        self._by_id: dict[str, dict[EngineStream, None]] = {}  # streams by the client's id
        self.held = HeldRequests(config.queue_timeout_s, core.scheduler.extras[QueueSizes].keyed)
        self.limits = QueueLimits(config, core.scheduler, self.held)
        self.frames = StepFrames(core, meter, self._finished)
        self._kept = KeptOutputs()
        self.holds_new = False  # requests wait until the others have ended and the engine resumes

    def submit(self, connection: Connection, message: Submit, draining: str | None) -> None:
        """Queue a request of a front, or refuse it. `draining` is the reason for taking none; None if there is none."""
        connection.last_stream = message.stream
        if not message.resumed:
            refusal = Refused(message.stream, draining, Refusal.DRAINING) if draining else self.limits.refusal(message)
            if refusal is not None:
                connection.send(refusal)
                return
        if message.request.resumes and not message.resumed:
            self._resume(connection, message)
        stream = EngineStream(connection, message.stream, message.request.request_id)
        connection.streams[message.stream] = stream
        self._by_id.setdefault(stream.client_id, {})[stream] = None
        self._add(stream, replace(message.request, request_id=stream.key), message.resumed)

    def _resume(self, connection: Connection, message: Submit) -> None:
        """Continue a request after the tokens that it had when its reader left, or has if that is not known yet."""
        request, fingerprint = message.request, self._core.scheduler.info.fingerprint
        for stream in list(self._by_id.get(client_id(request.request_id), ())):
            if stream.request_id == request.request_id:
                self.frames.send()
                self._keep(stream)
                self.end_at_once(stream, FinishReason.ABORT, "Another connection has taken up this stream.")
        if (output := self._kept.take(request, fingerprint)) is None:
            return
        message.request = replace(request, token_ids=[*request.token_ids, *output.token_ids])
        connection.frame.started.append((message.stream, output.num_cached, 0.0, 0.0))
        connection.stream_column.extend([message.stream] * len(output.token_ids))
        connection.token_column.extend(output.token_ids)
        connection.flush(time.time())

    def _keep(self, stream: EngineStream) -> None:
        if (state := self._core.scheduler.requests.get(stream.key)) is not None:
            self._kept.keep(stream.request_id, state, self._core.scheduler.info.fingerprint)

    def _add(self, stream: EngineStream, request: Request, resumed: bool) -> None:
        """Queue a request, or hold it until its adapter is loaded or the engine takes new requests."""
        if self.holds_new or self._adapters.is_awaited(request.adapter):
            self.held.add(stream, request, resumed)
            return
        try:
            self._adapters.check(request.adapter, resumed)
            state = self._core.add(request, stream)
        except CallboardError as e:
            self._forget(stream)
            stream.connection.send(Refused(stream.number, str(e), Refusal.NEVER))
            return
        self.frames.accept(stream, has_slot=False)
        if not resumed or len(request.token_ids) == request.prompt_len:
            self.limits.queued(state, stream.arrived_at)

    def queue_held(self) -> None:
        """Queue the held requests, or hold them again."""
        for stream, request, resumed in self.held.take():
            self._add(stream, request, resumed)

    def refuse_late(self) -> None:
        """Refuse the requests that waited longer than queue_timeout_s."""
        for stream in self.limits.late():
            self._drop(stream)
            text = f"The request waited {self._config.queue_timeout_s:g} s in the queue (queue_timeout_s)."
            stream.connection.send(Refused(stream.number, text, Refusal.LATE))

    def abort(self, connection: Connection, message: Abort) -> None:
        """Drop a stream that its front no longer reads."""
        if (stream := connection.streams.get(message.stream)) is not None:
            self._drop(stream)

    def abort_all(self, connection: Connection) -> None:
        """Drop all streams of a front that is gone."""
        for stream in list(connection.streams.values()):
            self._drop(stream)

    def abort_by_id(self, _: Connection, message: AbortById) -> None:
        """End the streams that a client named."""
        ids = message.client_ids()
        found = {s: None for key in ids for s in self._by_id.get(key, ()) if message.means(s.request_id)}
        if found:
            self.frames.send()  # a stream's tokens go out before its end
        for stream in found:
            self.end_at_once(stream, FinishReason.ABORT)

    def fail(self, adapter: str, error: str) -> None:
        """End all requests of an adapter, by its digest, with an error."""
        for state in [s for s in self._core.scheduler.requests.values() if s.request.adapter == adapter]:
            self.end_at_once(state.owner, FinishReason.ERROR, error)

    def end_all(self, error: str) -> None:
        """Abort all queued and running requests, after the tokens that they have. `error` is the reason."""
        for state in list(self._core.scheduler.requests.values()):
            self.end_at_once(state.owner, FinishReason.ABORT, error)

    def end_at_once(self, stream: EngineStream, reason: FinishReason, error: str = "") -> None:
        """End a request between two steps."""
        self._core.abort(stream.key)
        self._end(stream, reason, None, error)
        stream.connection.flush(self._meter.sampled_at_wall)

    def _finished(self, state: RequestState, reason: FinishReason) -> None:
        """End the stream of a request that a step completed."""
        self.limits.finished(self._meter.sampled_at)
        stop_id, error = None, state.failure
        if reason is FinishReason.STOP and state.tokens[-1] in state.params.stop_token_ids:
            stop_id = state.tokens[-1]
        if reason is FinishReason.ERROR:
            error = NOT_FINITE
        self._end(state.owner, reason, stop_id, error)

    def _end(self, stream: EngineStream, reason: FinishReason, stop_id: int | None, error: str) -> None:
        stream.connection.frame.ended.append(Ended(stream.number, int(reason), stop_id, error))
        self._forget(stream)

    def _drop(self, stream: EngineStream) -> None:
        """End a stream without a message to its front."""
        self._keep(stream)
        self._core.abort(stream.key)
        self._forget(stream)

    def _forget(self, stream: EngineStream) -> None:
        stream.connection.streams.pop(stream.number, None)
        self.held.remove(stream)
        streams = self._by_id.get(stream.client_id, {})
        streams.pop(stream, None)
        if not streams:
            self._by_id.pop(stream.client_id, None)
