"""Separate machines on this one: network namespaces on a bridge. Their cables can be pulled.

The program that uses them runs in namespaces of its own (`alone`). A user namespace makes root unnecessary. A process
namespace ends all processes with the program. The network namespace has the machines' bridge. A pulled cable (`pull`)
acts like a dead switch: no connection is closed, and packets are lost without an answer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

HOST = "10.77.0.254"  # the program itself, on the bridge
_ALONE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


def alone(*arguments: str) -> list[str]:
    """The command that runs this Python with `arguments` where machines can be made."""
    return [*_ALONE, sys.executable, *arguments]


def refusal() -> str | None:
    """One sentence on why machines are impossible here, or None."""
    try:
        check = subprocess.run(
            [*_ALONE, "ip", "link", "add", "bridge0", "type", "bridge"], capture_output=True, text=True
        )
    except FileNotFoundError as e:
        return f"{e.filename} is missing, which makes network namespaces."
    return f"The kernel refuses network namespaces: {check.stderr.strip()}" if check.returncode else None


def make_bridge() -> None:
    """The switch that the machines are plugged into; the program has an address on it."""
    for command in ("link set lo up", "link add bridge0 type bridge", f"addr add {HOST}/24 dev bridge0"):
        _ip(command)
    _ip("link set bridge0 up")


class Machine:
    """One machine. Its processes see this program's files and processes, but have a network of their own, and their own
    files in `folder`."""

    def __init__(self, number: int, folder: Path) -> None:
        self.address = f"10.77.0.{number}"
        self._cable = f"cable{number}"
        self.folder = own = folder.with_name(f"{folder.name}{number}")  # `folder` as the machine's processes see it
        for path in (folder, own):
            path.mkdir(exist_ok=True)
        # A namespace lives while a process is in it.
        hold = f"mount --bind {own} {folder} && echo && exec sleep infinity"
        self._holder = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-c", hold], stdout=subprocess.PIPE)
        assert self._holder.stdout is not None
        self._holder.stdout.readline()
        _ip(f"link add {self._cable} type veth peer name eth0 netns {self._holder.pid}")
        for command in (f"addr add {self.address}/24 dev eth0", "link set lo up", "link set eth0 up"):
            subprocess.run([*self.command("ip"), *command.split()], check=True)
        _ip(f"link set {self._cable} master bridge0 up")

    def command(self, *command: str) -> list[str]:
        """The command that runs `command` there."""
        return ["nsenter", f"--target={self._holder.pid}", "--net", "--mount", "--wd", *command]

    def kill(self) -> None:
        """Kill all processes there. The files stay for processes that are started there later."""
        for folder in self.processes():
            with suppress(OSError):  # it has just ended
                os.kill(int(folder.name), signal.SIGKILL)

    def power_off(self) -> None:
        """Kill all processes there without a word to other machines, as in a power cut."""
        self.pull()
        self.kill()

    def processes(self) -> Iterator[Path]:
        """The processes there, as folders of /proc."""
        own = Path(f"/proc/{self._holder.pid}/ns/net").readlink()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if int(folder.name) != self._holder.pid and (folder / "ns" / "net").readlink() == own:
                    yield folder

    def pull(self) -> None:
        """Cut it off."""
        _ip(f"link set {self._cable} down")

    def plug(self) -> None:
        """Make it reachable again."""
        _ip(f"link set {self._cable} up")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)
