"""Copies of the packages' source from which files are deleted, and Python programs that run in them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

# An editable install finds deleted modules in the original tree.
FORGET_INSTALL = "import sys; sys.meta_path[:] = [each for each in sys.meta_path if 'editable' not in str(each)]\n"


def copy_tree(target: Path, folders: Iterable[str], without: Iterable[str] = ()) -> None:
    """Copy folders of the source, then delete files and folders in the copy."""
    for folder in folders:
        shutil.copytree(ROOT / folder, target / folder, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "runtime" / "__init__.py").touch()
    for path in without:
        shutil.rmtree(target / path) if (target / path).is_dir() else (target / path).unlink()


def output_of(code: str, root: Path, *arguments: str) -> str:
    """Return what a program prints that imports our packages from the tree at `root` alone."""
    command = [sys.executable, "-c", FORGET_INSTALL + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout
