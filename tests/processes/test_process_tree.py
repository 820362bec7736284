"""The child of `callboard serve` and its offspring: in every case all of it ends, and one sentence gives the reason."""

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.inspection import processes_with

ROOT = Path(__file__).parents[2]
# The test writes the body of `work`, which leaves its parent an orphan in a session of its own.
PROGRAM = """
import os, signal, subprocess, sys, time
from runtime.base.types import CallboardError
from serve_app.processes import process_tree
from serve_app.processes.process_tree import run

process_tree._INTERRUPT_S = float(os.environ["INTERRUPT_S"])

ORPHAN = "subprocess.Popen(['sleep', '60'], start_new_session=True)"

def work(parent):
    subprocess.run([sys.executable, "-c", f"import subprocess; {ORPHAN}"])
    print("begun", flush=True)
    sys.stdin.readline()
%s

try:
    run(work)
except CallboardError as e:
    print("error:", e)
except KeyboardInterrupt:
    print("interrupted")
"""


class Program:
    def __init__(self, work: str, ignored: signal.Signals | None, interrupt_s: float) -> None:
        self.mark = f"callboard-test-{uuid.uuid4()}"
        code = PROGRAM % textwrap.indent(textwrap.dedent(work), "    ")
        environment = os.environ | {"MARK": self.mark, "INTERRUPT_S": str(interrupt_s)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env=environment, preexec_fn=ignored and (lambda: signal.signal(ignored, signal.SIG_IGN)),
        )  # fmt: skip
        assert self.process.stdout.readline() == "begun\n"
        end = time.monotonic() + 60
        # The kernel shows that a program runs before its command line and its environment can be read.
        while not any(command.startswith("sleep 60") for command in processes_with(self.mark)):
            assert time.monotonic() < end
            time.sleep(0.01)
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def rest(self) -> str:
        """The output until the program ends. No process of it may be left."""
        out, _ = self.process.communicate(timeout=600)
        assert processes_with(self.mark) == []
        return out


@pytest.fixture
def program() -> Iterator[type[Program]]:
    started = []

    def start(work: str, ignored: signal.Signals | None = None, interrupt_s: float = 60.0) -> Program:
        started.append(Program(work, ignored, interrupt_s))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


@pytest.mark.parametrize(
    ("work", "told"),
    [
        ("pass", ""),
        ("raise CallboardError('There is no model.')", "error: There is no model.\n"),
        ("raise ValueError('a\\nb')", "error: The server's process ended by itself (ValueError: a b).\n"),
        (
            "os.abort()",
            "error: The server's process ended by itself (signal 6).\n",
        ),
        (
            "parent.send(log='/the/logs'); parent.send(ready=True); os._exit(3)",
            "error: The server's process ended by itself (exit code 3); see /the/logs.\n",
        ),
    ],
)
def test_the_tree_ends_with_its_child_and_reports_why(program, work, told):
    assert program(work).rest() == told


def test_a_child_ends_with_a_process_it_depends_on(program):
    started = program(
        """
        others = [subprocess.Popen(["sleep", "60"]), subprocess.Popen(["cat"], stdin=subprocess.PIPE)]
        parent.end_with("cat", "dog")
        others[0].kill()
        others[0].wait()
        others[1].kill()
        time.sleep(60)
        """
    )
    assert started.rest() == "error: The server's process ended by itself (its cat ended).\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_it_is_ready_interrupts(program, number):
    started = program(
        """
        try:
            print("on", flush=True)
            time.sleep(60)
        finally:
            print("put in order", flush=True)
        """
    )
    assert started.process.stdout.readline() == "on\n"
    started.process.send_signal(number)
    assert started.rest() == "put in order\ninterrupted\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_a_background_start(program, number):
    """`callboard serve &` in a script: shells make such a command ignore SIGINT, and Python then installs no
    handler."""
    started = program(
        """
        try:
            print("on", flush=True)
            time.sleep(60)
        finally:
            print("put in order", flush=True)
        """,
        ignored=signal.SIGINT,
    )
    assert started.process.stdout.readline() == "on\n"
    started.process.send_signal(number)
    assert started.rest() == "put in order\ninterrupted\n"


def test_a_child_that_ignores_signals_is_killed(program):
    started = program(
        """
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("on", flush=True)
        time.sleep(600)
        """,
        interrupt_s=0.5,
    )
    assert started.process.stdout.readline() == "on\n"
    started.process.send_signal(signal.SIGTERM)
    assert started.rest() == "interrupted\n"


def test_signals_stop_a_ready_child_gracefully(program):
    """A second signal at once is the same order, as `timeout` sends it; a later one is a second order."""
    started = program(
        """
        parent.send(ready=True)
        print("ready", flush=True)
        print("stop:", parent.wait_for_order(), flush=True)
        print("hurry:", parent.wait_for_order(0.7), flush=True)
        print("hurry:", parent.wait_for_order(), flush=True)
        """
    )
    lines = started.process.stdout
    assert lines.readline() == "ready\n"
    started.process.send_signal(signal.SIGTERM)
    started.process.send_signal(signal.SIGINT)
    assert lines.readline() == "stop: True\n"
    assert lines.readline() == "hurry: False\n"
    started.process.send_signal(signal.SIGTERM)
    assert started.rest() == "hurry: True\n"
    assert started.process.returncode == 0


def test_a_signal_to_both_processes_is_one_order(program):
    """`pkill callboard` finds the child, too, in which Ray has installed a handler that ends it."""
    started = program(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        parent.send(ready=True)
        print("ready", flush=True)
        print("stop:", parent.wait_for_order(), flush=True)
        """
    )
    assert started.process.stdout.readline() == "ready\n"
    for number in (signal.SIGINT, signal.SIGTERM):
        for child in children(started.process.pid):
            os.kill(child, number)
    time.sleep(0.1)  # a child that ends would be noticed first
    started.process.send_signal(signal.SIGTERM)
    assert started.rest() == "stop: True\n"
    assert started.process.returncode == 0


def test_a_third_signal_kills(program):
    started = program("parent.send(ready=True)\nprint('ready', flush=True)\ntime.sleep(60)")
    assert started.process.stdout.readline() == "ready\n"
    num_sent, end = 0, time.monotonic() + 60
    while started.process.poll() is None:  # on a busy machine two may arrive as one
        assert time.monotonic() < end
        started.process.send_signal(signal.SIGTERM)
        num_sent += 1
        time.sleep(0.55)  # far enough apart to be two
    assert num_sent >= 3
    assert started.rest() == "interrupted\n"


def test_a_child_without_a_parent_stops(program):
    started = program("parent.send(ready=True)\nprint('ready', flush=True)\nparent.wait_for_order()")
    assert started.process.stdout.readline() == "ready\n"
    (child,) = (c for c in children(started.process.pid))
    started.process.kill()
    started.process.wait()
    end = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < end
        time.sleep(0.02)
    for path in Path("/proc").glob("[0-9]*/environ"):  # its orphan has lost its parent
        try:
            if started.mark.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)
        except OSError:
            continue


def children(pid: int) -> list[int]:
    """Those of its process group's kind: not the adopted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            name = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == pid and not name.startswith(b"sleep"):
            found.append(int(path.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
