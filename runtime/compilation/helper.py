"""KernelHelper: the process that records a runner's kernels and compiles them. It is started before torch is imported.

The helper imports libraries while the runner's process imports its own. Then it waits for one job on its stdin, and
answers with one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from runtime.base.config import EngineConfig
from runtime.start import command

MODULE = "runtime.assembly.dry_run"  # the helper's program
_GPUS = Path("/dev/nvidiactl")  # exists if the machine has a GPU
_MOST_S = 600.0  # a helper that takes longer is ended


class KernelHelper:
    """One helper process, for one job."""

    def __init__(self, cache: Path | None = None) -> None:
        """`cache` is the folder of Triton's cache; None for this process's own."""
        # It leaves the GPU alone.
        changed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        changed |= {} if cache is None else {"TRITON_CACHE_DIR": str(cache.absolute())}
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | changed
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command(MODULE), env=environment, stdin=pipe, stdout=pipe, stderr=pipe)
        self._thread: threading.Thread | None = None
        self._answer: dict[str, Any] = {"error": "it has no job"}

    @classmethod
    def early(cls, config: EngineConfig) -> KernelHelper | None:
        """Start a helper before torch is imported, if the runner will use a GPU. It may still be cancelled."""
        uses_gpu = config.device != "cpu" and config.kernel_backend in ("auto", "triton") and _GPUS.exists()
        return cls() if uses_gpu and find_spec("triton") is not None else None

    def send(self, job: bytes) -> None:
        """Give the helper its job, a pickled CompileJob."""
        self._thread = threading.Thread(target=self._communicate, args=(job,), name="kernel-helper", daemon=True)
        self._thread.start()

    def cancel(self) -> None:
        """End the helper."""
        self._process.kill()
        self._process.communicate()

    def wait(self) -> dict[str, Any]:
        """Wait for the answer: the fields of CompileAnswer, or `error` with a sentence."""
        if self._thread is not None:
            self._thread.join()
        return self._answer

    def _communicate(self, job: bytes) -> None:
        try:
            out, errors = self._process.communicate(job, _MOST_S)
        except subprocess.TimeoutExpired:
            self.cancel()
            self._answer = {"error": f"it took longer than {_MOST_S:.0f} s"}
            return
        try:
            self._answer = json.loads(out.splitlines()[-1])
        except (ValueError, IndexError):
            last = errors.decode(errors="replace").strip().rpartition("\n")[2]
            self._answer = {"error": f"the helper ended with code {self._process.returncode}: {last}"}
