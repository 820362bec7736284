"""The arithmetic of the fault matrix, its page, and its TCP proxy; tests/processes/test_faults.py runs cells of it."""

import asyncio
import json
import os
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.faults.__main__ import selected
from benchmarks.faults.cell import Cell, Client
from benchmarks.faults.matrix import BY_NAME, FAULTS, WHEN
from benchmarks.faults.page import PAGE, write_page
from benchmarks.faults.tcp_proxy import TcpProxy
from serve_app.tools.token_client import Reading


def test_rows_are_selected_by_their_first_words():
    assert [fault.name for fault in selected("engine,gcs stopped")] == [
        "engine killed",
        "engine stopped",
        "gcs stopped",
    ]
    assert selected(None) == FAULTS
    with pytest.raises(SystemExit, match="No row is called 'motor'"):
        selected("motor")


def test_pauses_begin_before_the_fault_and_end_after_it():
    reading = Reading([], 4, {}, times=[(11.0, 1), (12.0, 2), (14.5, 1)])
    client = Client(0, [reading, Reading([], 1, {}, times=[(16.0, 1)])], begun=[10.0, 15.0], ended=[14.6, 16.1])
    assert client.pause(12.5) == 2.5
    assert client.pause(14.7) == 1.0
    assert client.pause(20.0) == 0.0


def test_the_page_describes_the_lines(tmp_path: Path):
    line = {
        "fault": "engine killed", "when": "decode", "streams": 100, "num_tokens": 150, "step_ms": 20.0,
        "step_timeout_s": 3.0, "machine": "2 CPU cores", "versions": {"commit": "abc"}, "requests": 100, "lost": 0,
        "wrong_tokens": 0, "cut": 0, "refused": 0, "hit_pause_s": [0.1, 0.2], "others_pause_s": [0.05, 0.06],
        "whole_s": 2.5, "held_s": 0.0,
    }  # fmt: skip
    slower = line | {"hit_pause_s": [0.12, 0.29], "lost": 1}
    (tmp_path / "lines").write_text(f"{json.dumps(line)}\n{json.dumps(slower)}\n")
    write_page(tmp_path / "lines", tmp_path / "page.md")
    text = (tmp_path / "page.md").read_text()
    assert "| an engine | 1 | 0 | 110 ms | 290 ms | 2.5 s | 2 |" in text.partition("<details>")[0]
    row, repeats, _ = (row for row in text.splitlines() if row.startswith("| engine killed |"))
    cells = row.split(" | ")
    assert repeats == "| engine killed | 0 | 0 | 2 | 0 | 0 | 0 | 0 | 0 |"
    assert "1 with 2" in text
    assert cells[1 + list(WHEN).index("decode")] == (
        "1 lost, 0 wrong<br>hit 110 ms / 290 ms<br>others 60 ms<br>whole 2.5 s<br>n=2"
    )
    assert text.count("| not run") + text.count("no draft") > 100
    assert "| commits | abc |\n| streams | 100 |\n| tokens a stream | 150 |" in text


def test_the_page_is_up_to_date(tmp_path: Path):
    write_page(page=tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == PAGE.read_text(), "run python -m benchmarks.faults --page"


def test_every_excluded_cell_has_a_reason():
    assert BY_NAME["draft killed"].why_not("decode")
    assert not BY_NAME["draft killed"].why_not("verify")
    assert BY_NAME["rank killed"].why_not("verify")
    assert not BY_NAME["rank stopped"].why_not("decode")
    assert BY_NAME["full disk"].why_not("decode", has_disk=False)
    assert BY_NAME["trainer killed"].why_not("decode")
    assert all(set(fault.none_when or {}) < set(WHEN) for fault in FAULTS)


async def test_a_stopped_process_makes_an_application_incomplete():
    process = subprocess.Popen(["sleep", "60"])
    num_asked = 0

    async def ask(method: str) -> str:  # all is there, as it appears before a fault is noticed
        nonlocal num_asked
        num_asked += 1
        if num_asked == 4:
            process.kill()
            process.wait()
        return ""

    answers = SimpleNamespace(prompts=[])
    cell = Cell(SimpleNamespace(ask=ask), None, answers, BY_NAME["runner stopped"], "decode", None)
    cell._processes = [("runner", cell.victim, process.pid)]
    await cell.fault.do(cell)
    os.waitpid(process.pid, os.WUNTRACED)
    await cell._until_whole()
    assert num_asked == 5


async def test_a_proxy_delays_or_drops_bytes():
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    proxy = TcpProxy()
    port, proxy.target = await proxy.start(), server.sockets[0].getsockname()[1]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"one")
    assert await reader.readexactly(3) == b"one"
    proxy.delay_s, begin = 0.05, time.monotonic()
    writer.write(b"two")
    assert await reader.readexactly(3) == b"two"
    assert time.monotonic() - begin >= 0.1
    proxy.delay_s = 0.0
    proxy.open.clear()
    writer.write(b"three")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    proxy.open.set()
    writer.write(b"four")  # a stream of bytes that has lost some can never go on
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)
    writer.close()
    await proxy.close()
    server.close()
