"""A child process in its own session, with an end for all its descendants.

Ray starts a dozen processes, replaces signal handlers, writes to stderr and may end its process. Therefore the
command's own process does not use Ray. It forks, forwards signals as orders to stop, reports the child's end, and
kills the remaining processes."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from runtime.base.types import CallboardError

_PR_SET_CHILD_SUBREAPER = 36
_SAME_SIGNAL_S = 0.5  # `timeout` and others send a signal to a process and to its group
_INTERRUPT_S = 1.0  # time for cleanup in a child that is not ready
_MAX_FAULT_CHARS = 300
News = dict[str, str | bool]
_KILL_S = 10.0  # some system calls delay a process's end


class Parent:
    """A child's channel to its parent."""

    def __init__(self, orders: int, news: int) -> None:
        self._orders, self._news = orders, news

    def send(self, **news: str | bool) -> None:
        """Send news to the parent, which passes them to `on_news`.

        With `ready=True`, signals to the parent become orders from now on. This process then ignores its own signals,
        because `pkill` finds both processes. `log` is the place to look if this process just ends."""
        if news.get("ready"):
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: None)
        os.write(self._news, json.dumps(news).encode() + b"\n")

    def wait_for_order(self, timeout_s: float | None = None) -> bool:
        """Wait for one more order to stop; return False after the timeout. The parent's end is an order too."""
        if not select.select([self._orders], [], [], timeout_s)[0]:
            return False
        os.read(self._orders, 1)
        return True

    def end_with(self, *names: str) -> None:
        """End this process, and report why, when one of its children with these names ends."""
        ends = select.poll()
        watched = {}
        for pid in children_of_all().get(os.getpid(), []):
            with suppress(OSError):
                if (name := Path(f"/proc/{pid}/comm").read_text().strip()) in names:
                    watched[descriptor := os.pidfd_open(pid)] = name
                    ends.register(descriptor, select.POLLIN)

        def wait() -> None:
            (descriptor, _), *_ = ends.poll()
            self.send(fault=f"its {watched[descriptor]} ended")
            os._exit(1)

        threading.Thread(target=wait, name="end-with", daemon=True).start()


def run(work: Callable[[Parent], None], on_news: Callable[[News], None] = lambda _: None) -> None:
    """Run `work` in a child until it returns, and end all its descendants. `on_news` receives the child's news.

    A signal interrupts a child that is not ready. Later the first signal orders a stop, the second one a faster stop,
    and the third one kills the child. Raises CallboardError as `work` does, and if the child just ends, and
    KeyboardInterrupt."""
    strangers = _descendants()
    # Orphaned descendants become this process's children, so that it can find them.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    (orders_out, orders), (news, news_in) = os.pipe(), os.pipe()
    with _signals() as (signals, restore_handlers):
        if (pid := os.fork()) == 0:
            restore_handlers()
            os.close(orders)
            os.close(news)
            _be_child(work, Parent(orders_out, news_in))
        os.close(orders_out)
        os.close(news_in)
        try:
            _watch(pid, signals, orders, news, on_news)
        finally:
            _end(strangers)
            os.close(orders)
            os.close(news)


def _watch(pid: int, signals: int, orders: int, news: int, on_news: Callable[[News], None]) -> None:
    """Handle signals and news until the child has ended."""
    known: News = {}
    unread, num_orders, last = b"", 0, -_SAME_SIGNAL_S
    while True:
        readable = select.select([signals, news], [], [])[0]
        if signals in readable:
            os.read(signals, 64)
            if time.monotonic() - last < _SAME_SIGNAL_S:
                continue
            last, num_orders = time.monotonic(), num_orders + 1
            if "ready" not in known:
                _interrupt(pid)
                raise KeyboardInterrupt
            if num_orders > 2:
                raise KeyboardInterrupt
            with suppress(BrokenPipeError):  # the child ends by itself
                os.write(orders, b"s")
        if news in readable:
            if not (new := os.read(news, 1 << 16)):
                break
            *lines, unread = (unread + new).split(b"\n")
            for line in lines:
                new_facts: News = json.loads(line)
                known |= new_facts
                on_news(new_facts)
    if "error" in known:
        raise CallboardError(str(known["error"]))
    if "done" not in known:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        how = known.get("fault") or (f"signal {-code}" if code < 0 else f"exit code {code}")
        where = f"; see {known['log']}" if "log" in known else ""
        raise CallboardError(f"The server's process ended by itself ({how}){where}.")


def _interrupt(pid: int) -> None:
    """Send Ctrl-C to a child, and give it time for its cleanup."""
    os.kill(pid, signal.SIGINT)
    end = time.monotonic() + _INTERRUPT_S
    while time.monotonic() < end and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.01)


def _be_child(work: Callable[[Parent], None], parent: Parent) -> NoReturn:
    try:
        os.setsid()  # Ctrl-C, a closed terminal and `timeout` reach the parent alone
        signal.signal(signal.SIGINT, signal.default_int_handler)  # `_interrupt` needs it, even if SIGINT was ignored
        try:
            work(parent)
            parent.send(done=True)
        except CallboardError as e:
            parent.send(error=str(e))
        except KeyboardInterrupt:
            pass
        except BaseException as e:
            traceback.print_exc()
            parent.send(fault=f"{type(e).__name__}: {' '.join(str(e).split())[:_MAX_FAULT_CHARS]}")
    finally:
        os._exit(1)


@contextmanager
def _signals() -> Iterator[tuple[int, Callable[[], None]]]:
    """Yield a file descriptor with a byte for each signal to end, and a function that restores the handlers."""
    readable, writable = os.pipe()
    os.set_blocking(writable, False)
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
    wakeup = signal.set_wakeup_fd(writable, warn_on_full_buffer=False)

    def restore() -> None:
        signal.set_wakeup_fd(wakeup)
        for number, handler in handlers.items():
            signal.signal(number, handler)

    try:
        yield readable, restore
    finally:
        restore()
        os.close(readable)
        os.close(writable)


def _end(strangers: set[int]) -> None:
    """Kill all descendants of this process except `strangers`, and wait for their ends."""
    end = time.monotonic() + _KILL_S
    while (pids := _descendants() - strangers) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):  # not a child before its parent ends
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def children_of_all() -> dict[int, list[int]]:
    """Return the children of every process by its id."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    return children


def children_named(*names: str) -> dict[int, str]:
    """Return the states of this process's children with these names, by id: Z if one has ended."""
    found = {}
    for pid in children_of_all().get(os.getpid(), []):
        with suppress(OSError):  # it has ended, and its end was waited for
            if Path(f"/proc/{pid}/comm").read_text().strip() in names:
                found[pid] = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return found


def end_children(*names: str) -> None:
    """Kill the children of this process with these names, and wait for their ends."""
    for pid in children_named(*names):
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _descendants() -> set[int]:
    """Return the ids of this process's descendants."""
    children = children_of_all()
    found: set[int] = set()
    todo = [os.getpid()]
    while todo:
        new = children.get(todo.pop(), [])
        found.update(new)
        todo += new
    return found
