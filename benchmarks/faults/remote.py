"""An application in separate processes, on a small separate disk, as seen by the process that causes faults."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.faults.pace import STEP_MS

_START_S = 180
_ROOT = Path(__file__).parents[2]  # the checkout's root: no installed package has the benchmarks
_DISK = "256m"
# A user with namespaces can fill a disk without harm to others.
_ON_A_DISK = ["unshare", "-Urm", "sh", "-c", f'mount -t tmpfs -o size={_DISK} tmpfs "$0" && exec "$@"']


class Unanswered(RuntimeError):
    """The application failed to carry out a request."""


def can_have_a_disk() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run([*_ON_A_DISK, folder, "true"], capture_output=True).returncode == 0


class Remote:
    """The application, and its methods by name."""

    def __init__(self, model: Path, step_ms: float, fields: dict[str, Any]) -> None:
        self._model, self._step_ms, self._fields = model, step_ms, fields
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self.has_disk = can_have_a_disk()

    async def __aenter__(self) -> Remote:
        self.folder = tempfile.mkdtemp(prefix="cb-", dir="/tmp")  # short: Ray puts Unix sockets (107 bytes) below it
        fields = [f"{name}={json.dumps(value)}" for name, value in self._fields.items()]
        command = [sys.executable, "-m", "benchmarks.faults.application", self.folder, str(self._model), *fields]
        python_path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # workers read it
        self._process = await asyncio.create_subprocess_exec(
            *([*_ON_A_DISK, self.folder] if self.has_disk else []), *command,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 24,
            env=os.environ | {STEP_MS: str(self._step_ms), "HOME": self.folder, "PYTHONPATH": python_path},
        )  # fmt: skip
        assert self._process.stdout is not None
        async with asyncio.timeout(_START_S):
            if not (line := await self._process.stdout.readline()):
                raise Unanswered(f"the application did not start; its log: {self.log()[-2000:]}")
        found = json.loads(line)
        self.url, self.port = found["url"], int(found["url"].rpartition(":")[2])
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await self._process.wait()
        if self._process.returncode is None:
            self._process.terminate()
            await self._process.wait()
        self._reading.cancel()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        path = self.path("application.log")
        return path.read_text(errors="replace") if path.exists() else ""

    def path(self, name: str) -> Path:
        """A file on the application's disk."""
        return Path(f"/proc/{self._process.pid}/root{self.folder}", name)

    async def ask(self, method: str, *arguments: Any, timeout_s: float = 15.0) -> Any:
        assert self._process.stdin is not None
        number = len(self._asked)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps([number, method, *arguments]).encode() + b"\n")
        try:
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise Unanswered(f"{method} was not answered within {timeout_s:g} s") from None

    async def _read(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            told = json.loads(line)
            answer = self._asked[told["number"]]
            if answer.done():
                continue
            if "error" in told:
                answer.set_exception(Unanswered(told["error"]))
            else:
                answer.set_result(told.get("result"))
