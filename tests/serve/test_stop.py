"""`callboard stop`: it ends a server by its port, and deletes tiers."""

import signal
import subprocess
import sys
from pathlib import Path

from runtime.base.config import EngineConfig
from runtime.tier.place import open_region, stored_regions
from serve_app import cli
from serve_app.processes.application_processes import server_at

# As `callboard serve`: a forked child holds the name of the port, too.
_SERVER = """
import os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as name:
    name.bind("\\0callboard/127.0.0.1:%d")
    if (child := os.fork()) == 0:
        signal.pause()
    signal.signal(signal.SIGTERM, lambda *_: (os.kill(child, signal.SIGKILL), sys.exit(3)))
    print("ready", flush=True)
    while True:
        signal.pause()
"""
_PORT = 65_535  # a name alone, at which nothing listens


def test_a_server_ends_and_its_tier_is_deleted(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setenv("CALLBOARD_TIER", str(tmp_path))
    config = EngineConfig(kv_tier_memory=0.01, kv_tier_name="callboard")
    region = open_region(config, "cpu", "layout", 4096, 1, 1 << 30)
    assert region is not None
    with subprocess.Popen([sys.executable, "-c", _SERVER % _PORT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        found = server_at(_PORT)
        assert found.pid == process.pid
        flags = ["--port", str(_PORT), "--forget", "--kv-tier-folder", str(tmp_path / "disk")]
        assert cli.main(["stop", *flags]) == 0
        assert process.wait() == 3
    assert capsys.readouterr().out.startswith(f"The server on port {_PORT} has ended.\nThe KV tier 'callboard' of")
    assert stored_regions(tmp_path) == []
    assert cli.main(["stop", *flags]) == 0, "no server needs to run"


def test_a_port_without_a_server_is_one_sentence(capsys):
    handler = signal.getsignal(signal.SIGTERM)  # Ray has its own, if a test before has started it
    assert cli.main(["stop", "--port", str(_PORT)]) == 1
    assert capsys.readouterr().err == (
        f"callboard: No `callboard serve` of yours has port {_PORT} of this machine; name another port.\n"
    )
    assert signal.getsignal(signal.SIGTERM) is handler
