"""The sockets and command lines of processes."""

import os
import socket
import struct
from contextlib import suppress
from pathlib import Path


def listening_ports(pid: int, state: str = "0A") -> set[tuple[str, int]]:
    """(address, port) of every TCP socket on which a process listens, or in another `state` of the kernel."""
    found, inodes = set(), set()
    with suppress(OSError):  # it has ended
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it is closed
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                address, port = fields[1].split(":")
                words = struct.unpack(f"<{len(address) // 8}I", bytes.fromhex(address))
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                text = socket.inet_ntop(family, struct.pack(f">{len(words)}I", *words))
                found.add((text.removeprefix("::ffff:"), int(port, 16)))
    return found


def processes_with(mark: str) -> list[str]:
    """The command lines of all processes that have `mark` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append((path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
