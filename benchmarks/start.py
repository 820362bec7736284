"""How long an engine takes to be ready: a model folder into this process, from the first import to the last graph.

    python -m benchmarks.make_random_model llama-3.1-8b /tmp/llama-3.1-8b
    python -m benchmarks.start /tmp/llama-3.1-8b

Run it twice: the first run fills the page cache and the kernels' compile cache.
"""

import time

START = time.perf_counter()

import argparse  # noqa: E402
import logging  # noqa: E402
from pathlib import Path  # noqa: E402

from benchmarks.measure import Results, engine_config  # noqa: E402
from runtime.worker.runner import ModelRunner  # noqa: E402


class Phases(logging.Handler):
    """What `runtime` logs, each with the seconds since the line before it."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[tuple[float, str]] = []
        self._last = START

    def emit(self, record: logging.LogRecord) -> None:
        self.note(record.getMessage())

    def note(self, text: str) -> None:
        now = time.perf_counter()
        self.lines.append((now - self._last, text))
        self._last = now
        print(f"{now - START:6.2f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="FIELD=VALUE", help="fields of EngineConfig")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file too")
    args = parser.parse_args()
    config = engine_config(args.set, model=str(args.folder))
    results, phases = Results("start", args.out), Phases()
    log = logging.getLogger("runtime")
    log.setLevel(logging.INFO)
    log.addHandler(phases)
    phases.note("imports")
    ModelRunner(config, args.folder)
    phases.note("ready")
    seconds = time.perf_counter() - START
    results.add(config, model=args.folder.name, ready_s=seconds, phases=[list(line) for line in phases.lines])


if __name__ == "__main__":
    main()
