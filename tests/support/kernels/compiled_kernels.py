"""What is kept of compiled kernels (`tests/data/compiled_kernels.jsonl`), by Triton's hash of each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.runtime.jit import JITFunction

_FILE = Path(__file__).parents[2] / "data" / "compiled_kernels.jsonl"


def read() -> dict[str, dict[str, Any]]:
    """The lines by hash."""
    return {line["hash"]: line for line in map(json.loads, _FILE.read_text().splitlines())} if _FILE.exists() else {}


def write(lines: Iterable[dict[str, Any]]) -> None:
    _FILE.write_text("".join(sorted(json.dumps(line) + "\n" for line in lines)))


def make_hashes_stable() -> None:
    """Let hashes depend neither on variables of the environment nor on the lines above a kernel."""
    for variable in get_cache_invalidating_env_vars():
        os.environ.pop(variable, None)
    owner = next(cls for cls in JITFunction.__mro__ if "cache_key" in vars(cls))
    plain = owner.cache_key.fget

    def cache_key(self: JITFunction) -> str:
        self.starting_line_number = 0
        return str(plain(self))

    owner.cache_key = property(cache_key)
