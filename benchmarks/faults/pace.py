"""Steps with a chosen length, for an application with a model too small for its steps to take time.

Ray calls `install` in each worker before anything else. A runner's step then ends at least
CALLBOARD_FAULTS_STEP_MS after it began, like a large model's. Kills come in mid-step, and a hundred streams leave most
of a small machine's cores idle.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

HOOK = f"{__name__}.install"
STEP_MS = "CALLBOARD_FAULTS_STEP_MS"


def install() -> None:
    """Slow this worker's runner down, and do Callboard's own worker setup."""
    import actors.runners.runner
    from actors.ray.process import listen_on_loopback

    listen_on_loopback()
    serve_steps = actors.runners.runner.serve_steps

    def serve(engine: Any, runner: Any, rank: int) -> None:
        runner.launch = paced(runner.launch, float(os.environ.get(STEP_MS, "0")) / 1e3)
        serve_steps(engine, runner, rank)

    actors.runners.runner.serve_steps = serve


def paced(launch: Callable[[Any], Callable[[], Any]], seconds: float) -> Callable[[Any], Callable[[], Any]]:
    """`launch` with steps that each take at least `seconds` from their start, or from the end of the one before."""
    end = 0.0

    def paced_launch(plan: Any) -> Callable[[], Any]:
        begin, wait = time.monotonic(), launch(plan)

        def finish() -> Any:
            nonlocal end
            result = wait()
            time.sleep(max(0.0, max(begin, end) + seconds - time.monotonic()))
            end = time.monotonic()
            return result

        return finish

    return paced_launch
