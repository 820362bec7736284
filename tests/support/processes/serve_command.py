"""A real `callboard serve`, with its output in a file."""

import contextlib
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from actors.ray.environment import quiet_port
from tests.support.processes.inspection import processes_with

ROOT = Path(__file__).parents[3]
START_S = 600  # on a machine that does much else besides
STOP_S = 60


def short_directory() -> Path:
    """A new directory with a path of eight bytes: HAProxy's sockets lie below it (`serve_app/server/serve.py`)."""
    while True:
        path = Path("/tmp", secrets.token_urlsafe(2))
        with contextlib.suppress(FileExistsError):  # one of 262,144 names; an earlier run may have left it
            path.mkdir()
            return path


class Server:
    """A `callboard serve` with its output in a file. All of its processes have a mark in their environment."""

    def __init__(self, words: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        """`words` follow `callboard serve`."""
        self.port = quiet_port()
        self._output = folder / "output"
        self.temporary = short_directory()
        self.mark = f"CALLBOARD_TEST={folder}"
        name, _, value = self.mark.partition("=")
        tier = [] if any(word.startswith("--kv-tier") for word in words) else ["--kv-tier-memory", "0"]
        command = [sys.executable, "-m", "serve_app.cli", "serve", *tier, *words]
        command += ["--port", str(self.port), "--num-threads", "1"]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, cwd=ROOT, start_new_session=True,
                env=environment | {name: value, "TMPDIR": str(self.temporary)},
            )  # fmt: skip

    def output(self) -> list[str]:
        return self._output.read_text().splitlines()

    def wait_for(self, text: str) -> None:
        """Until a line of the output has `text`."""
        end = time.monotonic() + START_S
        while not any(text in line for line in self.output()):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < end, self.output()
            time.sleep(0.02)

    def wait(self, timeout_s: float) -> int:
        """Its exit code, once it has ended and left no process."""
        code = self.process.wait(timeout_s)
        assert processes_with(self.mark) == []
        assert list(self.temporary.iterdir()) == []
        return code

    def pids(self) -> Iterator[int]:
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.mark.encode() in path.read_bytes():
                    yield int(path.parent.name)
            except OSError:
                continue

    def pid_of(self, name: str) -> int:
        """The process with `name` in its command line."""
        (found,) = (pid for pid in self.pids() if name in Path(f"/proc/{pid}/cmdline").read_text())
        return found
