"""The front's compiler of grammars, which runs in child processes with a deadline."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from runtime.base.types import CallboardError, Grammar, GrammarSpec
from runtime.child import ChildPool, Overrun
from runtime.policy.queue_sizes import exceeds_share
from runtime.structured.grammar import compiled
from runtime.structured.pattern import GrammarError

_MEMORY = 2 << 30  # bytes of a child's address space; an idle child takes a tenth
# A small specification takes some milliseconds. It is short and lacks these words, which can be costly:
# intersections, merged schemas, grammars, and escapes that may spell a word.
_SMALL_BYTES = 4096
_COSTLY_WORDS = ("pattern", "allOf", '"lark"', "\\u", '"kind":"grammar"', '"kind":"tags"')


class CompilerBusy(CallboardError):
    """The queue of grammars is full. Retry after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, eq=False)
class _Work:
    """One compilation, which all concurrent requests for the same grammar share."""

    is_small: bool
    owner: str  # request that began it
    future: Future[Grammar | GrammarError]
    answer: asyncio.Future[Grammar | GrammarError]  # the same result, for the event loop
    num_waiting: int = 0


class GrammarCompiler:
    """Compiles grammars for one event loop, in up to `max_children` child processes.

    A compilation takes some milliseconds. A child that misses the deadline is killed. One child compiles small
    specifications only, so these never wait for large ones. Without a free child, up to `max_queued` small and
    `max_queued` large specifications wait in order of arrival. A cancelled one is dropped.
    Results and errors are kept by specification: at most `max_entries`, of `max_bytes` in all."""

    def __init__(
        self,
        deadline_s: float = 5.0,
        max_children: int = 4,
        max_queued: int = 64,
        max_entries: int = 1024,
        max_bytes: int = 64 << 20,
    ) -> None:
        self._deadline_s, self._max_queued = deadline_s, max_queued
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._answers: OrderedDict[GrammarSpec, Grammar | GrammarError] = OrderedDict()
        self._num_bytes = 0
        self._open: dict[GrammarSpec, _Work] = {}  # waiting or begun
        self._num_large = max(1, max_children - 1)  # children that compile large specifications
        self._small = ThreadPoolExecutor(max_children, "small-grammar")  # each thread waits for one child
        self._large = ThreadPoolExecutor(self._num_large, "large-grammar")
        digits = GrammarSpec("regex", "\\D")  # computes Unicode's digits before the first grammar
        self._children = ChildPool(max_children, _MEMORY, 5, compiled, digits)  # niceness 5: running streams go first

    def start(self) -> None:
        """Start a child before the first grammar arrives."""
        self._children.start()

    async def compile(self, spec: GrammarSpec, owner: str = "") -> Grammar:
        """Return a compiled or known grammar. Owners share the queue.

        Raises GrammarError, and CompilerBusy if the queue is full."""
        answer = self._answers.get(spec)
        if answer is None:
            answer = await self._answer(spec, self._open.get(spec) or self._added(spec, owner))
        else:
            self._answers.move_to_end(spec)
        if isinstance(answer, GrammarError):
            raise GrammarError(str(answer))
        return answer

    def close(self) -> None:
        """End all children."""
        self._children.close()
        for threads in (self._small, self._large):
            threads.shutdown(wait=False, cancel_futures=True)

    def _added(self, spec: GrammarSpec, owner: str) -> _Work:
        is_small = _is_small(spec)
        others = [other for other in self._open.values() if other.is_small == is_small]
        most, own = self._max_queued + (1 if is_small else self._num_large), sum(o.owner == owner for o in others)
        if len(others) >= most or (owner and exceeds_share(own, len(others), most)):
            wait_s = self._deadline_s  # each child has ended its present work by then
            reason = f"{self._max_queued} grammars wait to be compiled, the limit"
            if len(others) < most:
                reason = f"{own} grammars of your API key wait to be compiled, its share of {most}"
            raise CompilerBusy(f"{reason}; come back in {wait_s:g} seconds.", wait_s)
        future = (self._small if is_small else self._large).submit(self._run, spec)
        work = self._open[spec] = _Work(is_small, owner, future, asyncio.wrap_future(future))
        work.answer.add_done_callback(partial(self._keep, spec))
        return work

    async def _answer(self, spec: GrammarSpec, work: _Work) -> Grammar | GrammarError:
        work.num_waiting += 1
        try:
            return await asyncio.shield(work.answer)  # one client that leaves does not cancel it for others
        finally:
            work.num_waiting -= 1
            if not work.num_waiting and work.future.cancel():  # no thread has begun it
                del self._open[spec]

    def _keep(self, spec: GrammarSpec, done: asyncio.Future[Grammar | GrammarError]) -> None:
        if done.cancelled():
            return
        del self._open[spec]
        if done.exception() is not None:
            return  # the waiting requests raise it
        answer = self._answers[spec] = done.result()
        self._num_bytes += _size(spec, answer)
        while len(self._answers) > self._max_entries or self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._answers.popitem(last=False))

    def _run(self, spec: GrammarSpec) -> Grammar | GrammarError:
        """Compile a specification in a child; called in a thread."""
        try:
            return self._children.run(self._deadline_s, compiled, spec)
        except Overrun as e:
            return GrammarError(f"is too complex: compiling it {e}")
        except GrammarError as e:
            return e


def _is_small(spec: GrammarSpec) -> bool:
    is_plain = spec.kind in ("regex", "choice") or not any(word in spec.text for word in _COSTLY_WORDS)
    return is_plain and spec.kind not in ("grammar", "tags") and len(spec.text) <= _SMALL_BYTES


def _size(spec: GrammarSpec, answer: Grammar | GrammarError) -> int:
    held = len(spec.text)
    return held if isinstance(answer, GrammarError) else held + len(answer.lark) + len(answer.expression)
