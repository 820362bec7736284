"""Processes set themselves up when they start."""

import builtins
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from actors.ray.process import ignore_logging_errors

ROOT = Path(__file__).parents[2]
CODE = """
from actors.ray.process import keep_bytecode
keep_bytecode()
import os, subprocess, sys
import ray
subprocess.run([sys.executable, "-c", "import sys, ray.child; print(sys.dont_write_bytecode, sys.pycache_prefix)"])
"""


def start(tmp_path: Path, **environment: str) -> tuple[str, list[Path]]:
    """A child's word on its bytecode, and the compiled modules in the cache."""
    package = tmp_path / "ray"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").touch()
    (package / "child.py").touch()
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment = (
        inherited | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "CALLBOARD_CACHE": str(tmp_path / "cache")} | environment
    )
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), sorted((tmp_path / "cache").rglob(f"{tmp_path.name}/ray/*.pyc"))


def test_bytecode_not_allowed_beside_sources_is_cached(tmp_path: Path):
    said, compiled = start(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert said == f"False {tmp_path / 'cache' / 'bytecode'}"
    assert [path.name.partition(".")[0] for path in compiled] == ["__init__", "child"]
    assert not (tmp_path / "ray" / "__pycache__").exists()


def test_bytecode_is_beside_sources_by_default(tmp_path: Path):
    assert start(tmp_path) == ("False None", [])
    assert (tmp_path / "ray" / "__pycache__").exists()
    assert start(tmp_path, PYTHONDONTWRITEBYTECODE="1") == ("True None", []), "it is there already"


@pytest.fixture
def log_of_a_replica(tmp_path: Path, monkeypatch) -> logging.Logger:
    """Serve's own, as a replica has it, and on a full disk."""
    from ray.serve._private import common, logging_utils
    from ray.serve.schema import LoggingConfig

    log = logging.getLogger("ray.serve")
    for place, name in ((sys, "stdout"), (sys, "stderr"), (builtins, "print"), (logging, "raiseExceptions")):
        monkeypatch.setattr(place, name, getattr(place, name))  # the changes below are undone
    for name in ("propagate", "level"):
        monkeypatch.setattr(log, name, getattr(log, name))
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(logging_utils, "RAY_SERVE_LOG_TO_STDERR", False)  # by RAY_SERVE_THROUGHPUT_OPTIMIZED
    monkeypatch.setattr(logging_utils, "get_component_file_name", lambda **_: "full")
    (tmp_path / "full").symlink_to("/dev/full")
    replica = {"component_name": "Front", "component_id": "1", "component_type": common.ServeComponentType.REPLICA}
    config = LoggingConfig(logs_dir=str(tmp_path))
    logging_utils.configure_component_logger(**replica, logging_config=config, max_bytes=1 << 20, backup_count=1)
    return log


def test_a_full_disk_loses_log_lines_but_no_request(log_of_a_replica, monkeypatch):
    ignore_logging_errors()
    write, written = sys.stderr.write, []

    def write_once(text: str) -> None:
        written.append(text)
        if len(written) > 3:  # print writes two texts
            pytest.fail(f"the log reports to itself that it could not be written: {written}")
        write(text)

    monkeypatch.setattr(type(sys.stderr), "write", lambda _, text: write_once(text))
    log_of_a_replica.info("request %d", 1)  # it would report to the same log that it could not be written, and so on
    print("what a library says", file=sys.stderr)
