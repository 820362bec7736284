"""Seconds until a model folder is a ready engine in this process, from the first import to the last CUDA graph.

python -m benchmarks.library.make_random_model llama-3.1-8b /tmp/llama-3.1-8b
python -m benchmarks.engine.start --folder /tmp/llama-3.1-8b   # twice: the first run fills the page and compile caches
"""

import time

START = time.perf_counter()

import logging  # noqa: E402
from pathlib import Path  # noqa: E402

from benchmarks.library.measure import Results, engine_config, new_parser  # noqa: E402
from runtime.assembly.runner import build_runner  # noqa: E402
from runtime.worker.sources import CheckpointSource  # noqa: E402


def main() -> None:
    parser = new_parser(__doc__, model=False)
    parser.add_argument("--folder", type=Path, required=True)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)7d ms  %(message)s")
    imports_s = time.perf_counter() - START
    config = engine_config(args.set, model=str(args.folder))
    build_runner(config, CheckpointSource(args.folder))
    results = Results("start", args.out)
    results.add(config, model=args.folder.name, imports_s=imports_s, ready_s=time.perf_counter() - START)


if __name__ == "__main__":
    main()
