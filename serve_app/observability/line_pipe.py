"""How request lines reach the terminal and the file of `callboard serve` from the fronts.

A front is a Ray process, without a terminal, and may be killed. So it writes each line at once to a named pipe,
which the command's own process reads. A line of up to PIPE_BUF bytes reaches the pipe whole or not at all. A front
never waits for room: it drops a line instead, and reports how many it has dropped."""

from __future__ import annotations

import fcntl
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from logging import LogRecord, makeLogRecord
from logging.handlers import RotatingFileHandler
from pathlib import Path

from runtime.loading.resolve import cache_folder
from serve_app.observability.request_line import to_serve_log

VARIABLE = "CALLBOARD_REQUEST_PIPE"  # environment variable with the pipe's path
_PIPE_BYTES = 1 << 20  # some thousand lines, while the terminal takes none
_FILE_BYTES = 64 << 20  # then the file becomes the older one of two
_LAST_S = 2.0  # time for the last lines when the command ends
_END = b"\0\n"


class PipeWriter:
    """A front's end of the pipe."""

    def __init__(self, path: str) -> None:
        """Raises OSError if no process reads the pipe."""
        self._pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        self._num_dropped = 0

    def __call__(self, line: str) -> None:
        """Write a line, or drop it if the pipe is full."""
        now = time.time()
        stamp = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))}.{int(now % 1 * 1000):03d}"
        if self._num_dropped:
            line = f"({self._num_dropped} lines were dropped)\n{stamp} {line}"
        content = f"{stamp} {line}".encode("ascii", "replace")[: select.PIPE_BUF - 1]
        try:
            os.write(self._pipe, content + b"\n")
            self._num_dropped = 0
        except OSError:
            self._num_dropped += 1


class RequestPipe:
    """The command's end: a thread copies lines to the terminal and to a file of this host and port."""

    def __init__(self, folder: str, host: str, port: int) -> None:
        self.path = str(Path(folder, "requests"))
        self.file = cache_folder() / "logs" / f"{host}:{port}.log"
        self.fault = ""  # why the file cannot be written
        os.mkfifo(self.path, 0o600)
        self._pipe = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)  # the pipe never ends, since it has its own writer
        with suppress(OSError):  # more than this user may have
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._log: RotatingFileHandler | None = None
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._log = _LogFile(self.file, maxBytes=_FILE_BYTES, backupCount=1, encoding="ascii")
        except OSError as e:
            self.fault = e.strerror or str(e)
        self._thread = threading.Thread(target=self._copy, name="request-log", daemon=True)

    def describe(self) -> str:
        """The sentence that names the file."""
        where = f"here and in {self.file}" if not self.fault else f"here; {self.file} cannot be written ({self.fault})"
        return f"Each request is a line {where}; --no-request-log turns this off."

    def start(self) -> None:
        """Copy from now on; later calls do nothing. Not before the command forks, which copies no thread."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Copy what the fronts have written; give up after a few seconds if the terminal takes nothing."""
        if self._thread.ident is not None and select.select([], [self._pipe], [], _LAST_S)[1]:
            os.write(self._pipe, _END)
            self._thread.join(_LAST_S)

    def _copy(self) -> None:
        unread = b""
        while not unread.endswith(_END):
            unread += os.read(self._pipe, _PIPE_BYTES)
            whole, _, rest = unread.rpartition(b"\n")
            for line in whole.replace(b"\0", b"").decode("ascii", "replace").split("\n"):
                if line:
                    self._show(line)
            unread = _END if unread.endswith(_END) else rest

    def _show(self, line: str) -> None:
        if self._log is not None:
            self._log.emit(makeLogRecord({"msg": line}))
        with suppress(OSError, ValueError):  # the terminal is gone: the server goes on
            print(line, file=sys.stderr, flush=True)


@contextmanager
def opened_pipe(folder: str, host: str, port: int, wanted: bool) -> Iterator[RequestPipe | None]:
    """The pipe of a server, or None if it is not `wanted`."""
    pipe = RequestPipe(folder, host, port) if wanted else None
    try:
        yield pipe
    finally:
        if pipe is not None:
            pipe.close()


def line_writer() -> Callable[[str], None]:
    """Return the writer for this front's lines: to the pipe of `callboard serve`, else to the replica's log."""
    if (path := os.environ.get(VARIABLE)) is not None:
        with suppress(OSError):
            return PipeWriter(path)
    return to_serve_log


class _LogFile(RotatingFileHandler):
    """A file that drops the lines it cannot write, on a full disk for example."""

    def handleError(self, record: LogRecord) -> None:
        pass
