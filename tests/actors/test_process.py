"""Processes set themselves up when they start."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = """
from actors.process import keep_bytecode
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
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), sorted((tmp_path / "cache").rglob(f"{tmp_path.name}/ray/*.pyc"))


def test_bytecode_that_may_not_be_beside_its_source_is_in_our_cache(tmp_path: Path):
    said, compiled = start(tmp_path, PYTHONDONTWRITEBYTECODE="1")
    assert said == f"False {tmp_path / 'cache' / 'bytecode'}"
    assert [path.name.partition(".")[0] for path in compiled] == ["__init__", "child"]
    assert not (tmp_path / "ray" / "__pycache__").exists()


def test_bytecode_is_where_python_keeps_it_otherwise(tmp_path: Path):
    assert start(tmp_path) == ("False None", [])
    assert (tmp_path / "ray" / "__pycache__").exists()
    assert start(tmp_path, PYTHONDONTWRITEBYTECODE="1") == ("True None", []), "it is there already"
