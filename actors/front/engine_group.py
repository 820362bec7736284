"""An EngineClient over an application's engines, with one link to each engine in the directory.

A stream belongs to the group, not to a link. It goes to the healthy engine that `router.py` chooses. When its engine is
lost, frozen or draining, it moves to another one with its received tokens, or waits for one. Noise by position makes
the continuation the same (C4, C8). With one engine, prompts are not hashed and caches are not followed."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator
from functools import partial
from typing import Protocol

from msgspec.structs import replace as replace_fields

from actors.front.client_stream import ClientStream
from actors.front.from_zero import ScaleFromZero, Waker
from actors.front.front_adapters import FrontAdapters
from actors.front.link import EngineLink
from actors.front.parked import ParkedStreams
from actors.front.router import Prompt, Route, Router, RoutingPolicy, places
from actors.front.weight_calls import call_engines, pause_engines
from actors.wire.engine_client import EngineRefusal, Idleness, OnEngine, Refusal, ServerStopped, ignore_engine
from actors.wire.link_messages import AbortById, CacheUpdate, Refused, Status
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.transport import Address
from actors.wire.weight_calls import A, Pause, WeightCall
from runtime.background import in_background
from runtime.base.model_info import ModelInfo
from runtime.base.types import CallboardError, FinishReason, Request, RequestOutput
from runtime.policy.isolation import MAX_LOSSES, PROGRESS_TOKENS

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # pause after the directory failed
_SETTLED_S = 1.0  # time without a Status, before streams leave a draining engine


class Directory(Protocol):
    """The list of living engines."""

    async def changed(self, known: list[str]) -> list[str]:
        """Wait until the names of the living engines differ from `known`, and return them.

        A restarted engine has a new name and the same id."""
        ...

    async def open_link(self, name: str) -> tuple[Address, ModelInfo]:
        """Return an address for one connection to an engine, and its model.

        While the engine loads its model, the call waits, or raises EngineLoading after a while."""
        ...

    async def weights(self, name: str, call: WeightCall[A]) -> A:
        """Call an engine about its weights (actors/engine/weights.py). Raises CallboardError."""
        ...

    async def keep(self, name: str, seconds: float | None) -> Idleness | None:
        """Let an engine end after this time without requests, unless it is None. Returns None if it is gone."""
        ...


class EngineGroup:
    """An EngineClient over the engines of a directory."""

    info: ModelInfo

    def __init__(
        self, directory: Directory, from_zero: ScaleFromZero | None = None, policy: RoutingPolicy = "prefix"
    ) -> None:
        self._directory = directory
        self._router = Router(policy)  # chooses among the usable links, by name
        self._last_prompt = Prompt(())  # shared by a request's choices
        self.links: dict[str, EngineLink] = {}  # links by engine name
        self.adapters = FrontAdapters(lambda: list(self.links.values()))
        self._waiting = ParkedStreams(None if from_zero is None else from_zero.limits, self._expire)  # no engine
        self._waker: Waker | None = None  # None if there is always an engine
        if from_zero is not None:
            if from_zero.expected is not None:
                self.info = from_zero.expected
            self._waker = Waker(from_zero, self._waiting, self._fail)
        self.ended_pauses: deque[str] = deque(maxlen=64)  # ids; an engine that was lost at a resume may return with one
        self._names: list[str] = []  # names in the directory
        self._is_served = asyncio.Event()  # an engine has been healthy once
        self._following: asyncio.Task[None] | None = None
        self._pending_move: asyncio.TimerHandle | None = None
        self._draining: str | None = None  # why the server takes no new requests; None if it takes them

    async def start(self) -> None:
        """Connect to all engines, and wait for the first healthy one."""
        self.follow()
        if self._waker is not None:
            self._waker.wake_until(self._is_served)
        await self._is_served.wait()

    def follow(self) -> None:
        """Connect to all engines, now and later."""
        self._following = in_background(asyncio.create_task(self._follow_directory()), "following the engines")

    async def started(self) -> None:
        """Wait for a healthy engine, and start one if there is none. Raises EngineRefusal and CallboardError."""
        if self._waker is not None and self._draining:
            raise EngineRefusal(self._draining, Refusal.DRAINING)
        if self._waker is not None and not any(link.usable and not link.reason for link in self.links.values()):
            await self._waker.engine()

    async def keep(self, seconds: float | None) -> list[Idleness]:
        """Let the engines end after this time without requests, unless it is None. Returns their idle times."""
        found = await asyncio.gather(*(self._directory.keep(name, seconds) for name in self.links))
        return [each for each in found if each is not None]

    def close(self) -> None:
        """Close all links."""
        for pending in (self._following, self._pending_move, self._waker):
            if pending is not None:
                pending.cancel()
        for link in self.links.values():
            link.close()

    def drain(self, reason: str) -> int:
        """Take no new requests, for `reason`, and refuse the requests that no engine has accepted.

        Returns the number of live requests."""
        self._draining = reason
        if self._waker is not None:
            self._waker.refuse(EngineRefusal(reason, Refusal.DRAINING))
        for stream in [s for s in self._waiting if not s.accepted]:
            self._release(stream)
            self._park(stream)
        return self.num_streams

    def end(self, reason: str) -> None:
        """Take no new requests, and end the live ones with an error for `reason`, after their received tokens."""
        self._draining = reason
        for stream in [*self._waiting, *(s for link in self.links.values() for s in link.streams)]:
            self._release(stream)
            stream.fail(ServerStopped(reason))

    @property
    def num_streams(self) -> int:
        """Live requests."""
        return len(self._waiting) + sum(link.num_streams for link in self.links.values())

    def engines(self) -> list[str]:
        return list(dict.fromkeys(link.engine for link in self.links.values() if link.connected))

    def health(self) -> str | None:
        if self._draining:
            return self._draining
        links = sorted(self.links.values(), key=lambda link: (link.draining, not link.connected))
        if any(link.usable and not link.reason for link in links):
            return None
        if self._waker is not None and (self._is_served.is_set() or not self._waker.must_start):  # requests wait
            return None
        if links:
            return links[0].reason
        return "The engine is restarting." if self._is_served.is_set() else "The engine is starting."

    async def generate(
        self, request: Request, on_engine: OnEngine = ignore_engine
    ) -> AsyncGenerator[RequestOutput, None]:
        if request.min_weight_version and self.info.weights is None:
            text = f"min_weight_version is {request.min_weight_version!r}, but this server's weights never change"
            raise EngineRefusal(f"{text}; leave it out, or start the server with --weight-updates.", Refusal.NEVER)
        stream = ClientStream(request, on_engine)
        with self.adapters.stream_of(request.adapter):
            self._assign(stream)
            try:
                while True:
                    output = await stream.take()
                    yield output
                    if output.finish_reason:
                        return
            finally:
                self._release(stream)

    def abort(self, request_id: str) -> None:
        asked = AbortById(request_id)
        for stream in [s for s in self._waiting if asked.means(s.request.request_id)]:
            self._release(stream)
            stream.end(FinishReason.ABORT)
        for link in self.links.values():
            link.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        await asyncio.gather(*(link.reset_prefix_cache() for link in self.links.values()))

    async def sleep(self, level: int) -> None:
        await asyncio.gather(*(link.sleep(level) for link in self.links.values() if link.connected))

    @property
    def is_asleep(self) -> bool:
        return any(link.is_asleep for link in self.links.values())

    @property
    def is_paused(self) -> bool:
        return any(link.pause is not None for link in self.links.values())

    async def weights(self, call: WeightCall[A]) -> dict[str, A]:
        if isinstance(call, Pause):
            return await pause_engines([link for link in self.links.values() if link.usable], call)
        # An engine on a lost node may still have a link, but Ray's calls do not reach it.
        names = sorted(link.name for link in self.links.values() if link.usable and link.name in self._names)
        return await call_engines(self._directory.weights, names, call)

    async def report(self, figures: dict[str, MetricValues]) -> dict[str, Snapshot]:
        links, parts = [link for link in self.links.values() if link.connected], dict(figures)
        if links:
            own, self._waiting.figures = self._waiting.figures, MetricValues()
            parts.setdefault(links[0].engine, MetricValues()).add(own)
        answers = await asyncio.gather(*(link.report(parts.pop(link.engine, MetricValues())) for link in links))
        return {link.engine: answer for link, answer in zip(links, answers, strict=True) if answer is not None}

    # ---- which engine ---------------------------------------------------------------------------------------------

    def _choose(self, stream: ClientStream) -> Route | None:
        """Choose the best engine for a stream, except the refusing ones. Returns None if none is left."""
        usable = [link for link in self.links.values() if link.usable and link not in stream.refusals]
        if wanted := stream.request.min_weight_version:
            usable = [link for link in usable if link.info.weights and link.info.weights.satisfies(wanted)]
        if len(usable) > 1:
            ranks = [
                (
                    not k.has_adapter(stream),
                    k.draining,
                    bool(k.reason),
                    k.is_asleep,
                    not stream.suits(k.info),
                    0 if k.info.weights is None else -k.info.weights.serial,
                )
                for k in usable
            ]
            best = min(ranks)
            usable = [link for link, rank in zip(usable, ranks, strict=True) if rank == best]
        if not usable:
            return None
        if len(usable) == 1 and not usable[0].is_followed:
            return Route(usable[0].name)
        return self._router.choose(self._prompt_of(stream), [link.name for link in usable])

    def _prompt_of(self, stream: ClientStream) -> Prompt:
        """Return the known tokens of a stream. Blocks that were hashed before are not hashed again."""
        request, prompt = stream.request, stream.prompt
        if prompt is None:
            prompt = self._last_prompt
            uses_cache = self._uses_cache(stream)
            salt, adapter, session, images = request.cache_salt, request.adapter, request.session, request.images
            known = prompt.salt, prompt.uses_cache, prompt.adapter, places(prompt.images)
            wanted = salt, uses_cache, adapter, places(images)
            if prompt.token_ids is not request.token_ids or known != wanted:
                colocate = request.params.pooled
                prompt = Prompt(request.token_ids, salt, uses_cache, None, adapter, colocate, session, images)
                self._last_prompt = prompt
        if len(stream.received) > (num_seen := len(prompt.token_ids) - len(request.token_ids)):
            prompt = prompt.continued(stream.received[num_seen:])
        stream.prompt = prompt
        return prompt

    def _uses_cache(self, stream: ClientStream) -> bool:
        """True if an engine uses cached blocks for a stream's prompt; its KVCacheManager has the same rule."""
        params, pooling = stream.params, self.info.pooling
        if params.pooled:
            return pooling is not None and pooling.shares_prefixes
        return not params.reports_prompt

    def _submit(self, stream: ClientStream, choice: Route) -> None:
        """Submit a stream to the chosen engine."""
        link = self.links[choice.engine]
        link.submit(stream)
        if link.is_followed:
            num_tokens = len(stream.request.token_ids) + len(stream.received)
            self._router.note_sent(link.name, stream.number, num_tokens - choice.num_cached, stream.prompt)
            stream.num_expected = choice.num_cached if self._router.policy == "prefix" else None

    def _assign(self, stream: ClientStream) -> None:
        """Submit a stream to the best engine, or park it."""
        choice = self._choose(stream)
        if choice is not None:
            self._submit(stream, choice)
        else:
            self._park(stream)

    def _park(self, stream: ClientStream) -> None:
        """Keep a stream until an engine is usable, or refuse it at the limits."""
        stream.link = None
        if self._draining and not stream.accepted:
            stream.fail(EngineRefusal(self._draining, Refusal.DRAINING))
            return
        try:
            self._waiting.add(stream)
        except EngineRefusal as e:
            stream.fail(e)
            return
        if self._waker is not None:
            self._waker.wake()

    def _expire(self, stream: ClientStream, reason: str) -> None:
        self._fail(stream, EngineRefusal(reason, Refusal.LATE))

    def _fail(self, stream: ClientStream, error: CallboardError) -> None:
        self._release(stream)
        stream.fail(error)

    def _release(self, stream: ClientStream) -> bool:
        """Take a stream from its engine or from the waiting ones. Returns False if it had already ended."""
        if stream.link is not None:
            return stream.link.drop(stream)
        return self._waiting.remove(stream)

    def on_cache_update(self, link: EngineLink, update: CacheUpdate) -> None:
        """Give an update to the router. After a gap, request a snapshot."""
        if not self._router.apply(link.name, update):
            link.follow(True)

    def _follow(self) -> None:
        """Follow the caches of all engines while there are several usable ones."""
        usable = [link for link in self.links.values() if link.usable]
        wanted = len(usable) > 1 and self._router.policy != "round-robin"
        for link in usable:
            if link.is_followed != wanted:
                link.follow(wanted)

    def on_status(self, link: EngineLink, status: Status, is_first: bool) -> None:
        """An engine has sent its Status: assign the waiting streams, and plan moves.

        Streams of a draining engine move after _SETTLED_S without a Status: if all engines drain, they had better
        stay."""
        self.info = max((k.info for k in self.links.values() if k.usable), key=lambda info: info.max_model_len)
        self.adapters.on_status(link, status.adapters, is_first)
        if status.limits is not None:
            self._waiting.note_limits(status.limits)
        pauses = [each.pause for each in self.links.values() if each.usable and each.pause is not None]
        if is_first and link.pause is None and pauses:  # it may have started during the pause
            link.send_pause(replace_fields(pauses[0], mode="keep", joins=True))
        if link.pause is not None and link.pause.pause_id in self.ended_pauses:
            link.cancel_pause(link.pause.pause_id)
        if not link.reason:
            self._is_served.set()
            if self._waker is not None:
                self._waker.found()
        if link.name in self._router and self._router.fingerprint(link.name) != link.info.fingerprint:
            self._router.remove(link.name)  # blocks have other hashes after a change of weights
            link.is_followed = False
        if link.name not in self._router:
            self._router.add(link.name, link.info)
            self._follow()
        for stream in self._waiting:
            if (choice := self._choose(stream)) is not None:
                self._waiting.remove(stream)
                self._submit(stream, choice)
        if link.reason and not link.draining:
            self._move_off_reloading(link)
        if self._pending_move is not None:
            self._pending_move.cancel()
        self._pending_move = asyncio.get_running_loop().call_later(_SETTLED_S, self._move_off_draining)

    def _move_off_reloading(self, link: EngineLink) -> None:
        """Move the streams of an engine that lost its runners and loads its model again.

        A stream without progress since such a move stays: its engine finds out whether it kills the runners."""
        for stream in link.streams:
            has_come_on = stream.moved_at_len is None or len(stream.received) - stream.moved_at_len >= PROGRESS_TOKENS
            if has_come_on and self._move(stream):
                stream.moved_at_len = len(stream.received)

    def _move_off_draining(self) -> None:
        """Move the streams of draining engines to engines that continue them with equal results."""
        for link in [k for k in self.links.values() if k.draining]:
            for stream in link.streams:
                self._move(stream)

    def _move(self, stream: ClientStream) -> bool:
        """Move a stream to a healthy engine with an equal model and its adapter. Returns False if there is none."""
        choice = self._choose(stream)
        other = None if choice is None else self.links[choice.engine]
        if choice is None or other is None or other.reason:
            return False
        if not stream.suits(other.info) or not other.has_adapter(stream):
            return False
        self._release(stream)
        self._submit(stream, choice)
        return True

    def on_lost(self, link: EngineLink, streams: list[ClientStream]) -> None:
        """Assign the streams of a lost link. The directory decides whether the engine itself is gone."""
        if link.name in self._router:
            self._router.remove(link.name)
            self._follow()
        self.adapters.on_lost()
        for stream in streams:
            if stream.may_be_sent_again():
                self._assign(stream)
        self._update_links()

    def on_refused(self, link: EngineLink, stream: ClientStream, refused: Refused) -> None:
        """Submit a refused stream to another engine, or fail it with the refusal that is likeliest to pass."""
        error = EngineRefusal(refused.message, refused.reason, refused.retry_after_s)
        if refused.reason is Refusal.LATE:
            stream.fail(error)
            return
        alike = [k for k in self.links.values() if k.usable and k.info == link.info]
        for other in alike if refused.reason is Refusal.NEVER else [link]:
            stream.refusals[other] = error
        choice = self._choose(stream)
        if choice is not None:
            self._submit(stream, choice)
        elif self._waker is not None and all(link.draining for link in stream.refusals):
            self._park(stream)
        else:
            by_hope = list(Refusal)
            stream.fail(min(stream.refusals.values(), key=lambda error: by_hope.index(error.reason)))

    # ---- which engines there are ----------------------------------------------------------------------------------

    async def _follow_directory(self) -> None:
        last_error = ""
        while True:
            try:
                self._names = await self._directory.changed(self._names)
            except Exception as e:  # open links do not use the directory
                if last_error != (last_error := f"{type(e).__name__}: {e}"):
                    logger.warning("the engines cannot be listed: %s", last_error)
                await asyncio.sleep(_RETRY_S)
            else:
                last_error = ""
                self._update_links()

    def _update_links(self) -> None:
        """Open a link to each new engine, and close the links of engines that are gone and disconnected."""
        names = self._names
        for name in names:
            if name not in self.links:
                self.links[name] = EngineLink(name, partial(self._directory.open_link, name), self)
        for link in [k for k in self.links.values() if k.name not in names and not k.connected]:
            link.close()
            del self.links[link.name]
            for stream in link.suspects:
                self._count_loss(stream)

    def _count_loss(self, stream: ClientStream) -> None:
        """Count the death of an engine that computed this stream. At MAX_LOSSES the stream ends."""
        stream.num_losses += 1
        if stream.num_losses >= MAX_LOSSES and self._release(stream):
            text = f"{MAX_LOSSES} engines ended while they computed this request; it is not tried again."
            stream.end(FinishReason.ERROR, text)
