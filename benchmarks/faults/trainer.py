"""A trainer that sends the weights of a folder to a running application, again and again.

    python -m benchmarks.faults.trainer URL FOLDER

The process reports each event as one JSON line on stdout, and ends with its stdin, after the update that is open. After
an error, and at its start, it discards the open update, which may be that of a trainer that has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_EVERY_S = 0.3  # pause after an update
_GATHER_S = 0.1  # pause between an update's calls, as if tensors were gathered
_TIMEOUT_S = 15.0  # limit for a call
_RETRY_S = 0.2  # after a failed update
_ROOT = Path(__file__).parents[2]  # the checkout: no installed package has the benchmarks


class Refused(Exception):
    """An answer with another status than 200."""


def call(url: str, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the answer to a call. Raises OSError, HTTPException and Refused."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    with contextlib.closing(connection):
        headers = {"content-type": "application/json"}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    if answer.status != 200:
        raise Refused(f"{path}: {answer.status} {text[:300]}")
    return dict(json.loads(text))


def main() -> None:
    _, url, folder = sys.argv
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    is_first = True
    while not ended.is_set():
        begun = time.monotonic()
        try:
            if is_first:
                call(url, "POST", "/discard_weight_update")
            is_first = True  # unless the update succeeds
            call(url, "POST", "/start_weight_update")
            _report("started")
            time.sleep(_GATHER_S)
            call(url, "POST", "/update_weights", {"update_info": {"paths": [folder]}})
            time.sleep(_GATHER_S)
            finished = call(url, "POST", "/finish_weight_update")
        except (OSError, http.client.HTTPException, Refused, ValueError) as e:
            _report("failed", error=f"{type(e).__name__}: {e}")
            ended.wait(_RETRY_S)
            continue
        is_first = False
        _report("finished", begun=begun, serial=finished["serial"])
        ended.wait(_EVERY_S)


def _report(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


class Trainer:
    """The process, as seen by a cell."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        self.events: list[dict[str, Any]] = []
        self._news = asyncio.Event()

    async def start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.faults.trainer", self._url, str(self._folder)]
        self._process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd=_ROOT
        )
        self._reading = asyncio.create_task(self._read(self._process))

    async def kill_in_update(self) -> None:
        """SIGKILL between the start and the end of an update."""
        await self.wait_for("started", since=len(self.events))
        self.kill()
        await self._reading

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End the process after the update that is open."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._reading

    async def wait_for(self, event: str, since: int = 0, begun: float = 0.0) -> None:
        """Wait for an event after the first `since` ones; with `begun`, of an update that began later than that."""
        while not any(e["event"] == event and e.get("begun", 0.0) >= begun for e in self.events[since:]):
            if self._reading.done():
                raise AssertionError(f"the trainer has ended before it has {event} an update: {self.events[-3:]}")
            self._news.clear()
            await self._news.wait()

    def count(self, event: str) -> int:
        return sum(each["event"] == event for each in self.events)

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            self.events.append(json.loads(line))
            self._news.set()
        await process.wait()
        self._news.set()


if __name__ == "__main__":
    main()
