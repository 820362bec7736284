"""GPU tests side by side: workers of pytest-xdist take turns with the GPUs of a host, and keep none of their memory."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# This runs before any test uses CUDA, which reads it once.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    present = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(sorted(present))).split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker.removeprefix("gw")) % len(gpus)]


@pytest.fixture(autouse=True)
def _memory_for_others() -> Iterator[None]:
    yield
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
