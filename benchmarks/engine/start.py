"""Seconds until a model folder is a ready engine, from the first import to the last CUDA graph, as a table of phases.

python -m benchmarks.library.make_random_model llama-3.2-3b /tmp/llama-3.2-3b
python -m benchmarks.engine.start --folder /tmp/llama-3.2-3b   # cold, then warm
"""

import time

START = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

from runtime.base.config import EngineConfig  # noqa: E402
from runtime.compilation.helper import KernelHelper  # noqa: E402

Phases = dict[str, tuple[float, str]]  # log line's first word -> seconds, line


class _Lines(logging.Handler):
    """Keeps the log with the seconds since the start."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.phases: Phases = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        name = text.partition(":")[0] + (" (built)" if "built and run" in text else "")
        self.phases[name] = time.perf_counter() - START, text


def start(folder: Path, settings: list[str], out: Path | None, cache: str) -> None:
    """Start in this process, as an engine's runner does. `cache` describes Triton's compile cache in the results."""
    lines = _Lines()
    logging.basicConfig(level=logging.INFO, handlers=[lines])
    helper = KernelHelper.early(EngineConfig())
    from benchmarks.library.measure import Results, engine_config
    from runtime.assembly.runner import build_runner
    from runtime.worker.sources import CheckpointSource

    lines.phases["libraries"] = time.perf_counter() - START, "libraries imported"
    config = engine_config(settings, model=str(folder))
    build_runner(config, CheckpointSource(folder), helper=helper)
    lines.phases["ready"] = time.perf_counter() - START, "ready"
    imports_s, ready_s = (lines.phases[name][0] for name in ("libraries", "ready"))
    line = {"model": folder.name, "imports_s": imports_s, "ready_s": ready_s, "cache": cache, "phases": lines.phases}
    Results("start", out).add(config, **line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the engine")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    parser.add_argument("--once", metavar="CACHE", help="one start in this process; CACHE is what the results call it")
    args = parser.parse_args()
    if args.once:
        start(args.folder, args.set, args.out, args.once)
        return
    with tempfile.TemporaryDirectory() as cache:
        found: list[Phases] = []
        for state in ("cold", "warm"):
            command = [sys.executable, "-m", "benchmarks.engine.start", *sys.argv[1:], "--once", state]
            environment = os.environ | {"TRITON_CACHE_DIR": cache}
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            found.append(json.loads(done.stdout.splitlines()[-1])["phases"])
    print("| ends at, cold, s | second start, s | phase of the cold start |\n| ---: | ---: | --- |")
    cold, warm = found
    for name, (seconds, text) in sorted(cold.items(), key=lambda phase: phase[1][0]):
        again = f"{warm[name][0]:.1f}" if name in warm else "-"
        print(f"| {seconds:.1f} | {again} | {text} |")
    print("second start:", *(text for _, text in warm.values()), sep="\n    ")


if __name__ == "__main__":
    main()
