"""A TCP proxy on loopback. Its line can be slow, or drop all bytes while both ends believe it to be open."""

from __future__ import annotations

import asyncio
import contextlib

_CHUNK = 64 << 10


class TcpProxy:
    """Connections to `port` go on to `target`."""

    def __init__(self) -> None:
        self.target = 0
        self.delay_s = 0.0
        self.open = asyncio.Event()  # not set: bytes are swallowed
        self.open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        for pair in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._carry(*pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes in order after the delay. Bytes that arrive while the line is cut are lost. So are all later
        bytes, because a stream of bytes cannot have gaps."""
        lines: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        sending = asyncio.create_task(self._send(lines, writer))
        is_whole = True
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                is_whole = is_whole and self.open.is_set()
                if is_whole:
                    lines.put_nowait((asyncio.get_running_loop().time() + self.delay_s, data))
        if self.open.is_set():  # else its end is swallowed, too
            lines.put_nowait((0.0, b""))
            await sending
        sending.cancel()

    async def _send(self, lines: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = await lines.get()
                if not data:
                    writer.close()
                    return
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                writer.write(data)
                await writer.drain()
