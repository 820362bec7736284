"""Workers of pytest-xdist take turns with the GPUs of the host."""

import os
from pathlib import Path

# Before any test asks CUDA, which reads this once.
if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (gpus := list(Path("/dev").glob("nvidia[0-9]*"))):
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int(worker.removeprefix("gw")) % len(gpus))
