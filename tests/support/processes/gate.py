"""A gate before the load of each model, for tests that act during a load.

Ray calls `install` in each of its workers before anything else (`__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR`)."""

import os
import time
from functools import wraps
from pathlib import Path

HOOK = f"{__name__}.install"
GATE = "CALLBOARD_TEST_GATE"  # the name of a file: models are loaded while it exists


def install() -> None:
    """Make the runner of this worker wait at the gate, and do Callboard's own setup of a worker."""
    from actors.ray.process import listen_on_loopback
    from actors.runners.runner import ModelRunnerActor

    listen_on_loopback()
    load, gate = ModelRunnerActor.load, Path(os.environ[GATE])

    @wraps(load)
    def wait_and_load(*arguments):
        while not gate.exists():
            time.sleep(0.01)
        return load(*arguments)

    ModelRunnerActor.load = wait_and_load
