"""A pool compiles each kernel once, whatever dies and however many pools share a cache folder."""

import hashlib
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("triton")

from runtime.compilation.kernel_pool import compile_all


@dataclass(frozen=True)
class Kernel:
    """A compilation that writes a file, and a line of a log."""

    name: str
    folder: Path
    fault: str = ""
    size: int = 1

    @property
    def key(self) -> str:
        return hashlib.sha256(self.name.encode()).hexdigest()

    def is_cached(self) -> bool:
        return (self.folder / self.name).exists()

    def compile(self) -> None:
        if self.is_cached():
            return
        with (self.folder / "log").open("a") as log:
            log.write(f"{self.name}\n")
        if self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault == "raises":
            raise ValueError("no such instruction")
        time.sleep(0.002)  # so that the other pool meets the lock
        (self.folder / self.name).touch()


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


def kernels(folder: Path, count: int) -> list[Kernel]:
    return [Kernel(f"kernel-{i}", folder, size=i) for i in range(count)]


def begun(folder: Path) -> Counter[str]:
    return Counter((folder / "log").read_text().split())


def test_second_run_compiles_nothing(folder):
    own = kernels(folder, 20)
    assert sorted(compile_all(own, 4)) == sorted(kernel.key for kernel in own)
    assert compile_all(own, 4) == []
    assert set(begun(folder).values()) == {1}


def test_two_pools_compile_each_kernel_once(folder):
    own = kernels(folder, 40)
    if (other := os.fork()) == 0:
        compile_all(own, 3)
        os._exit(0)
    compile_all(own, 3)
    assert all(kernel.is_cached() for kernel in own)  # the other pool's, too
    os.waitpid(other, 0)
    assert begun(folder) == Counter(kernel.name for kernel in own)


def test_dead_worker_leaves_its_kernel_out(folder):
    broken = Kernel("broken", folder, fault="killed", size=99)
    own = kernels(folder, 10)
    assert len(compile_all([broken, *own], 2)) == len(own)
    assert not broken.is_cached()
    repaired = Kernel("broken", folder)
    assert compile_all([repaired], 1) == [broken.key]  # the lock has gone with its process


def test_failing_kernel_leaves_the_others(folder, capfd):
    broken, own = Kernel("broken", folder, fault="raises", size=99), kernels(folder, 3)
    assert len(compile_all([broken, *own], 1)) == len(own)
    assert "no such instruction" in capfd.readouterr().err
