"""An EngineClient over all engines of an application: one link to each that the directory lists.

A stream belongs to the group, not to a link. It goes to the healthy engine that `router.py` chooses, and moves to
another one, chosen in the same way, with the tokens that it has received, when its engine is lost, frozen or about to
end; without another one it waits. While there is one engine, nothing is hashed and nothing followed. Noise by position
makes the continuation what it would have been (C4, C8).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from actors.front.adapter_names import FrontAdapters
from actors.front.link import EngineLink, Stream
from actors.front.router import Choice, Prompt, Router, RoutingPolicy
from actors.wire.adapter_entry import AdapterState
from actors.wire.engine_client import EngineRefusal, OnEngine, Refusal, ServerStopped, nobody
from actors.wire.messages import AbortById, CacheUpdate, Refused
from actors.wire.metrics import MetricValues, Snapshot
from actors.wire.transport import Address
from runtime.spec.config import ModelInfo
from runtime.spec.types import CallboardError, FinishReason, Request, RequestOutput

logger = logging.getLogger(__name__)

_RETRY_S = 1.0  # after the directory could not be asked
_SETTLED_S = 1.0  # without a change, before streams leave a draining engine
_ASKING_S = 0.5  # between two calls for an engine: the one that answered may have been about to go
_PROGRESS = 4  # tokens that clear a stream of the loss of runners, as in runtime/policy/isolation.py
_MAX_LOSSES = 3  # engines that died while they computed a stream: it is at fault, as far as one can know


class Directory(Protocol):
    """Tells which engines there are."""

    async def changed(self, known: list[str]) -> list[str]:
        """The names of the living ones, as soon as these are others than `known`; an engine that is started anew has a
        new name, and the same id."""
        ...

    async def open_link(self, name: str) -> tuple[Address, ModelInfo]:
        """An address for one connection to an engine, and its model; one that loads its model may answer when it has,
        or raise after a while."""
        ...


@dataclass(frozen=True, slots=True)
class FromZero:
    """For an application that may have no engine: how one is asked for, and which requests wait until it is there."""

    wake: Callable[[], Awaitable[object]]  # returns when there is an engine; CallboardError: there will be none
    max_requests: int  # that wait for it; more are refused
    max_tokens: int  # of these requests; a request that waits alone may have more
    timeout_s: float | None  # how long each waits at most

    def refusal(self, request: Request, waiting: Iterable[Request]) -> str:
        """Why a request may not wait beside `waiting`; empty if it may."""
        sizes, num_new = [_num_tokens(r) for r in waiting], _num_tokens(request)
        if len(sizes) >= self.max_requests:
            return f"{len(sizes)} requests wait for an engine, the limit (max_queued_requests); try again later."
        if sizes and (total := sum(sizes)) + num_new > self.max_tokens:
            limit = f"above the limit of {self.max_tokens} (max_queued_tokens)"
            return f"{total} tokens wait for an engine and this request has {num_new}, {limit}; try again later."
        return ""


def _num_tokens(request: Request) -> int:
    return len(request.token_ids) + len(request.prediction)


class EngineGroup:
    """An EngineClient over the engines of a directory."""

    info: ModelInfo

    def __init__(
        self, directory: Directory, from_zero: FromZero | None = None, policy: RoutingPolicy = "prefix"
    ) -> None:
        self._directory, self._from_zero = directory, from_zero
        self._asking: asyncio.Task[None] | None = None
        self._router = Router(policy)  # over the links that are usable, by name
        self._last_prompt = Prompt(())  # all choices of a request have one
        self._links: dict[str, EngineLink] = {}
        self.adapters = FrontAdapters(lambda: list(self._links.values()))
        self._waiting: dict[Stream, None] = {}  # streams without an engine
        self._names: list[str] = []  # in the directory
        self._is_served = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self._relief: asyncio.TimerHandle | None = None
        self._draining: str | None = None  # why the whole server takes no new requests

    async def start(self) -> None:
        """Returns when there is a healthy engine. The others are used as soon as they are there."""
        self._following = asyncio.create_task(self._follow_directory())
        self._ask_for_engine()
        await self._is_served.wait()

    def close(self) -> None:
        """Let all engines go."""
        for pending in (self._following, self._relief, self._asking):
            if pending is not None:
                pending.cancel()
        for link in self._links.values():
            link.close()

    def drain(self, reason: str) -> int:
        """Take no new requests from now on, for `reason`, and refuse those that wait for an engine to begin them; the
        number of live ones."""
        self._draining = reason
        for stream in [s for s in self._waiting if not s.accepted]:
            self._release(stream)
            self._park(stream)
        return self.num_streams

    def end(self, reason: str) -> None:
        """Take no new requests, and end the live ones with an error for `reason`, after what they have received."""
        self._draining = reason
        for stream in [*self._waiting, *(s for link in self._links.values() for s in link.streams)]:
            self._release(stream)
            stream.fail(ServerStopped(reason))

    @property
    def num_streams(self) -> int:
        """Live requests."""
        return len(self._waiting) + sum(link.num_streams for link in self._links.values())

    def engines(self) -> list[str]:
        return list(dict.fromkeys(link.engine for link in self._links.values() if link.connected))

    def health(self) -> str | None:
        if self._draining:
            return self._draining
        links = sorted(self._links.values(), key=lambda link: (link.draining, not link.connected))
        if any(link.usable and not link.reason for link in links):
            return None
        if self._from_zero is not None and self._is_served.is_set():  # requests wait
            return None
        if links:
            return links[0].reason
        return "The engine is restarting." if self._is_served.is_set() else "The engine is starting."

    async def generate(self, request: Request, on_engine: OnEngine = nobody) -> AsyncGenerator[RequestOutput, None]:
        stream = Stream(request, on_engine)
        with self.adapters.stream_of(request.adapter):
            self._place(stream)
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
        for link in self._links.values():
            link.abort(request_id)

    async def reset_prefix_cache(self) -> None:
        await asyncio.gather(*(link.reset_prefix_cache() for link in self._links.values()))

    async def sleep(self, level: int) -> None:
        await asyncio.gather(*(link.sleep(level) for link in self._links.values() if link.connected))

    @property
    def is_asleep(self) -> bool:
        return any(link.is_asleep for link in self._links.values())

    async def report(self, figures: dict[str, MetricValues]) -> dict[str, Snapshot]:
        links, parts = [link for link in self._links.values() if link.connected], dict(figures)
        answers = await asyncio.gather(*(link.report(parts.pop(link.engine, MetricValues())) for link in links))
        return {link.engine: answer for link, answer in zip(links, answers, strict=True) if answer is not None}

    # ---- which engine ---------------------------------------------------------------------------------------------

    def _choose(self, stream: Stream) -> Choice | None:
        """The best engine for a stream among those that have not refused it; None if there is none."""
        usable = [link for link in self._links.values() if link.usable and link not in stream.refusals]
        if len(usable) > 1:
            ranks = [
                (
                    not k.has_adapter(stream),
                    k.draining,
                    bool(k.reason),
                    k.is_asleep,
                    not stream.suits(k.info),
                )
                for k in usable
            ]
            best = min(ranks)
            usable = [link for link, rank in zip(usable, ranks, strict=True) if rank == best]
        if not usable:
            return None
        if len(usable) == 1 and not usable[0].is_followed:
            return Choice(usable[0].name)
        return self._router.choose(self._prompt_of(stream), [link.name for link in usable])

    def _prompt_of(self, stream: Stream) -> Prompt:
        """A stream's known tokens; blocks that were hashed for it once are not hashed again."""
        request, prompt = stream.request, stream.prompt
        if prompt is None:
            prompt = self._last_prompt
            uses_cache = self._uses_cache(stream)
            wanted = request.cache_salt, uses_cache, request.adapter
            if prompt.token_ids is not request.token_ids or (prompt.salt, prompt.uses_cache, prompt.adapter) != wanted:
                salt, adapter = request.cache_salt, request.adapter
                gathers = request.params.pooled
                prompt = Prompt(request.token_ids, salt, uses_cache, adapter=adapter, gathers=gathers)
                self._last_prompt = prompt
        if len(stream.received) > (num_seen := len(prompt.token_ids) - len(request.token_ids)):
            prompt = prompt.continued(stream.received[num_seen:])
        stream.prompt = prompt
        return prompt

    def _uses_cache(self, stream: Stream) -> bool:
        """True if an engine takes over what it has cached of a stream's prompt; its KVCacheManager decides alike."""
        params, pooling = stream.request.params, self.info.pooling
        if params.pooled:
            return pooling is not None and pooling.shares_prefixes
        return params.prompt_logprobs is None or stream.scored

    def _submit(self, stream: Stream, choice: Choice) -> None:
        """Let the chosen engine serve a stream."""
        link = self._links[choice.engine]
        link.submit(stream)
        if link.is_followed:
            num_tokens = len(stream.request.token_ids) + len(stream.received)
            self._router.placed(link.name, stream.number, num_tokens - choice.num_cached, stream.prompt)
            stream.num_expected = choice.num_cached if self._router.policy == "prefix" else None

    def _place(self, stream: Stream) -> None:
        """Let an engine serve a stream; without one it waits."""
        choice = self._choose(stream)
        if choice is not None:
            self._submit(stream, choice)
        else:
            self._park(stream)

    def _park(self, stream: Stream) -> None:
        """Let a stream wait for an engine."""
        stream.link = None
        if self._draining and not stream.accepted:
            stream.fail(EngineRefusal(self._draining, Refusal.DRAINING))
            return
        zero = self._from_zero
        if zero is not None and not stream.accepted:
            if text := zero.refusal(stream.request, (s.request for s in self._waiting)):
                stream.fail(EngineRefusal(text, Refusal.BUSY, 1.0))
                return
            if zero.timeout_s is not None:
                asyncio.get_running_loop().call_later(zero.timeout_s, self._expire, stream)
        self._waiting[stream] = None
        self._ask_for_engine()

    def _expire(self, stream: Stream) -> None:
        if stream in self._waiting and not stream.accepted:
            self._release(stream)
            text = "The request waited for as long as it may (queue_timeout_s) while no engine was there."
            stream.fail(EngineRefusal(text, Refusal.LATE))

    def _ask_for_engine(self) -> None:
        """Where there may be none, ask for one, and again while something waits for it."""
        if self._from_zero is not None and (self._asking is None or self._asking.done()):
            self._asking = asyncio.create_task(self._keep_asking(self._from_zero))

    async def _keep_asking(self, zero: FromZero) -> None:
        while self._waiting or not self._is_served.is_set():
            try:
                await zero.wake()
            except CallboardError as e:
                for stream in [s for s in self._waiting if not s.accepted]:
                    self._release(stream)
                    stream.fail(e)
            except Exception as e:  # the engine that was asked may have gone meanwhile
                logger.warning("no engine could be asked for: %s: %s", type(e).__name__, e)
            await asyncio.sleep(_ASKING_S)

    def _release(self, stream: Stream) -> bool:
        """Let nobody serve a stream any more; False if nobody did."""
        if stream.link is not None:
            return stream.link.drop(stream)
        waited = stream in self._waiting
        self._waiting.pop(stream, None)
        return waited

    def on_cache_update(self, link: EngineLink, update: CacheUpdate) -> None:
        """An engine has told of its cache and its load."""
        if not self._router.apply(link.name, update):
            link.follow(True)

    def _follow(self) -> None:
        """Follow all engines while there are several to choose from."""
        usable = [link for link in self._links.values() if link.usable]
        wanted = len(usable) > 1 and self._router.policy != "round-robin"
        for link in usable:
            if link.is_followed != wanted:
                link.follow(wanted)

    def on_status(self, link: EngineLink, changed: list[AdapterState], is_first: bool) -> None:
        """Streams without an engine go to it at once. Those of a draining engine go on meanwhile, so they move when
        nothing has changed for a while: if all engines drain, one after the other, they had better stay."""
        self.info = max((k.info for k in self._links.values() if k.usable), key=lambda info: info.max_model_len)
        self.adapters.on_status(link, changed, is_first)
        if not link.reason:
            self._is_served.set()
        if link.name not in self._router:
            self._router.add(link.name, link.info)
            self._follow()
        waiting, self._waiting = self._waiting, {}
        for stream in waiting:
            self._place(stream)
        if link.reason and not link.draining:
            self._spare(link)
        if self._relief is not None:
            self._relief.cancel()
        self._relief = asyncio.get_running_loop().call_later(_SETTLED_S, self._relieve)

    def _spare(self, link: EngineLink) -> None:
        """Let streams not wait for an engine that loads its model again, because its runners were lost. One that has
        come no further since it was moved so stays: its engine finds out whether it is what kills them."""
        for stream in link.streams:
            has_come_on = stream.spared_at is None or len(stream.received) - stream.spared_at >= _PROGRESS
            if has_come_on and self._move(stream):
                stream.spared_at = len(stream.received)

    def _relieve(self) -> None:
        """Move the streams of draining engines to those that will go on, and go on in the same way."""
        for link in [k for k in self._links.values() if k.draining]:
            for stream in link.streams:
                self._move(stream)

    def _move(self, stream: Stream) -> bool:
        """Let a healthy engine go on with a stream in the same way; False if there is no other that has its adapter."""
        choice = self._choose(stream)
        other = None if choice is None else self._links[choice.engine]
        if choice is None or other is None or other.reason:
            return False
        if not stream.suits(other.info) or not other.has_adapter(stream):
            return False
        self._release(stream)
        self._submit(stream, choice)
        return True

    def on_lost(self, link: EngineLink, streams: list[Stream]) -> None:
        """Its streams go on elsewhere at once; whether the engine is gone the directory will tell."""
        if link.name in self._router:
            self._router.remove(link.name)
            self._follow()
        self.adapters.on_lost()
        for stream in streams:
            self._place(stream)
        self._update()

    def on_refused(self, link: EngineLink, stream: Stream, refused: Refused) -> None:
        """Another engine may take it; else its reader hears of the refusal that is the likeliest to pass."""
        error = EngineRefusal(refused.message, refused.reason, refused.retry_after_s)
        if refused.reason is Refusal.LATE:
            stream.fail(error)
            return
        alike = [k for k in self._links.values() if k.usable and k.info == link.info]
        for other in alike if refused.reason is Refusal.NEVER else [link]:
            stream.refusals[other] = error
        choice = self._choose(stream)
        if choice is not None:
            self._submit(stream, choice)
        elif self._from_zero is not None and all(link.draining for link in stream.refusals):
            self._park(stream)
        else:
            by_hope = list(Refusal)
            stream.fail(min(stream.refusals.values(), key=lambda error: by_hope.index(error.reason)))

    # ---- which engines there are ----------------------------------------------------------------------------------

    async def _follow_directory(self) -> None:
        said = ""
        while True:
            try:
                self._names = await self._directory.changed(self._names)
            except Exception as e:  # links that are there need no directory
                if said != (said := f"{type(e).__name__}: {e}"):
                    logger.warning("the engines cannot be listed: %s", said)
                await asyncio.sleep(_RETRY_S)
            else:
                said = ""
                self._update()

    def _update(self) -> None:
        """A link to each new engine; none any more to one that is gone, and not connected either."""
        names = self._names
        for name in names:
            if name not in self._links:
                self._links[name] = EngineLink(name, partial(self._directory.open_link, name), self)
        for link in [k for k in self._links.values() if k.name not in names and not k.connected]:
            link.close()
            del self._links[link.name]
            for stream in link.suspects:
                self._blame(stream)

    def _blame(self, stream: Stream) -> None:
        """An engine died while it computed this stream. One that several die of is not tried again."""
        stream.num_losses += 1
        if stream.num_losses >= _MAX_LOSSES and self._release(stream):
            text = f"{_MAX_LOSSES} engines ended while they computed this request; it is not tried again."
            stream.end(FinishReason.ERROR, text)
