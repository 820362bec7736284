"""The replica's compiler: specifications in, grammars out, off the event loop and in processes that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from runtime.core.types import Grammar, GrammarSpec
from runtime.structured.child import Child
from runtime.structured.grammar import compiled
from runtime.structured.pattern import GrammarError

_MEMORY = 2 << 30  # of address space; a child at rest takes a tenth
_START_S = 60.0  # at most, for a child to start


class GrammarCompiler:
    """Belongs to one event loop. A grammar takes some milliseconds, or none if it is known; one that runs away loses
    its child at the deadline, while others have children of their own: as long as there are fewer than `max_children`,
    one is kept ready.

    Answers are kept, refusals too, by what was asked: at most `max_entries`, of `max_bytes` in all."""

    def __init__(
        self, deadline_s: float = 5.0, max_children: int = 4, max_entries: int = 1024, max_bytes: int = 64 << 20
    ) -> None:
        self._deadline_s, self._max_children = deadline_s, max_children
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._answers: OrderedDict[GrammarSpec, Grammar | GrammarError] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[GrammarSpec, asyncio.Task[Grammar | GrammarError]] = {}
        self._threads = ThreadPoolExecutor(max_children, "grammar")  # each waits for one child
        self._idle: queue.SimpleQueue[Child | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_children = 0  # idle, at work or being started
        self._closed = False

    @property
    def num_waiting(self) -> int:
        """Grammars that are being compiled now."""
        return len(self._running)

    def start(self) -> None:
        """Have a child ready before the first grammar comes."""
        with self._lock:
            if self._idle.empty() and self._num_children < self._max_children and not self._closed:
                self._num_children += 1
                threading.Thread(target=self._add_child, daemon=True).start()

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """Raises GrammarError."""
        answer = self._answers.get(spec)
        if answer is None:
            if (task := self._running.get(spec)) is None:
                task = self._running[spec] = asyncio.create_task(self._compile(spec))
            answer = await asyncio.shield(task)  # one that leaves does not take it from the others
        else:
            self._answers.move_to_end(spec)
        if isinstance(answer, GrammarError):
            raise GrammarError(str(answer))
        return answer

    def close(self) -> None:
        """End all children."""
        self._closed = True
        while not self._idle.empty():
            if (child := self._idle.get()) is not None:
                child.kill()
        for _ in range(self._max_children):
            self._idle.put(None)
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _compile(self, spec: GrammarSpec) -> Grammar | GrammarError:
        self.start()
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._threads, self._run, spec)
        finally:
            del self._running[spec]
        self._answers[spec] = answer
        self._num_bytes += _size(spec, answer)
        while len(self._answers) > self._max_entries or self._num_bytes > self._max_bytes:
            self._num_bytes -= _size(*self._answers.popitem(last=False))
        return answer

    # ---- in threads -------------------------------------------------------------------------------------------------

    def _run(self, spec: GrammarSpec) -> Grammar | GrammarError:
        child = self._idle.get()
        if child is None:
            return GrammarError("comes too late: the server is ending")
        self.start()
        try:
            return child.run(self._deadline_s, compiled, spec)
        except GrammarError as e:
            return e
        finally:
            self._give_back(child)

    def _add_child(self) -> None:
        child = Child(_MEMORY, niceness=5)  # those who stream go first
        with contextlib.suppress(GrammarError):
            child.run(_START_S, compiled, GrammarSpec("regex", "\\D"))  # Unicode digits are looked up once
        self._give_back(child)

    def _give_back(self, child: Child) -> None:
        if child.is_alive and not self._closed:
            self._idle.put(child)
            return
        child.kill()
        with self._lock:
            self._num_children -= 1
        self.start()


def _size(spec: GrammarSpec, answer: Grammar | GrammarError) -> int:
    held = len(spec.text)
    return held if isinstance(answer, GrammarError) else held + len(answer.lark) + len(answer.expression)
