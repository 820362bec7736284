"""The price of adapters (LoRA) in this process: random weights in a published shape, adapters for all linear maps.

    python -m benchmarks.engine.adapters --model llama-3.2-1b --cells 1x128x512 64x128x256 --adapters 0 1 8
    python -m benchmarks.engine.adapters --model llama-3.1-8b --cells --loads 10 --streams 64

A cell is BATCHxINxOUT, as in benchmarks.engine.decode. Each is measured with every number in `--adapters`, which the
requests use in turn. If 0 comes first, its share of the rate without adapters is given. All run on one engine with room
for adapters, so 0 shows the cost for requests without one. `--loads` reads an adapter that often while `--streams`
decode. It gives a load's time and the longest time between two steps during it. Equally many steps without
loads are given, too.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from benchmarks.library.make_adapter import modules_of, save_adapter
from benchmarks.library.measure import Engine, Results, engine_config, middle, new_parser, percentiles
from runtime.features.adapter_table import AdapterTable
from runtime.loading.adapter_files import read_adapter


def load_adapters(engine: Engine, folder: Path, count: int, rank: int) -> list[str]:
    """Write and load `count` adapters, and one more that requests may not use; their digests."""
    modules, table, digests = modules_of(engine.runner.spec), engine.core.extras[AdapterTable], []
    for seed in range(count + 1):
        path = folder / str(seed)
        save_adapter(path, modules, seed, size=0.1, dtype=torch.bfloat16, r=rank, lora_alpha=rank)
        digests.append(read_adapter(path).digest)
        engine.runner.load_adapter(table.reserve(digests[-1]), str(path))
        if seed < count:
            table.open(digests[-1])
    return digests[:count]


def measure_load(engine: Engine, index: int, path: Path, streams: int) -> tuple[float, float, float]:
    """Seconds that one load takes while `streams` decode, the longest step during it, and the longest among as many
    steps without it."""
    loads: list[float] = []

    def load() -> None:
        start = time.perf_counter()
        engine.runner.load_adapter(index, str(path))
        loads.append(time.perf_counter() - start)

    engine.add(streams, 32, 4000)
    ends, gaps = [], {}
    for name in ("usual", "loading"):
        for _ in range(100):  # skips the prompts, and the last load's after-effects
            engine.core.step()
        thread = threading.Thread(target=load)
        ends = [time.perf_counter()]
        if name == "loading":
            thread.start()
        while len(ends) < 200 or thread.is_alive():
            engine.core.step()
            ends.append(time.perf_counter())
        gaps[name] = float(np.diff(ends).max())
        if name == "loading":
            thread.join()
    for request_id in list(engine.core.scheduler.requests):
        engine.core.abort(request_id)
    while engine.core.has_work:
        engine.core.step()
    return loads[0], gaps["loading"], gaps["usual"]


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--cells", nargs="*", default=["1x128x512", "64x128x256"], metavar="BATCHxINxOUT")
    parser.add_argument("--adapters", type=int, nargs="+", default=[0, 1, 8], help="that requests have in turn")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--loads", type=int, default=0, help="loads while streams decode")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each cell, after one to warm up")
    args = parser.parse_args()
    most = max(args.adapters)
    config = engine_config(args.set, max_loras=most + 1, max_lora_rank=args.rank)
    results, engine = Results("adapters", args.out), Engine(args.model, config)
    common = {"model": args.model, "rank": args.rank}
    with tempfile.TemporaryDirectory() as folder:
        digests = load_adapters(engine, Path(folder), most, args.rank)
        plain: dict[str, float] = {}
        cases = [(cell, count) for cell in args.cells for count in args.adapters]
        for cell, count in tqdm(cases, unit="case"):
            batch, prompt_len, output_len = (int(n) for n in cell.split("x"))
            engine.adapters = digests[:count] or [""]
            runs = [engine.run(batch, prompt_len, output_len) for _ in range(args.repeats + 1)][1:]
            decode, decode_range = middle([run.decode_rate for run in runs])
            steps = np.concatenate([np.diff(run.step_ends) for run in runs])
            if not count:
                plain[cell] = decode
            results.add(
                config, **common, adapters=count, batch=batch, prompt_len=prompt_len, output_len=output_len,
                repeats=args.repeats, decode_tok_s=decode, decode_range=decode_range,
                of_none=decode / plain[cell] if cell in plain else None, step_ms=percentiles(steps),
                first_token_ms=middle([run.first * 1e3 for run in runs])[0],
            )  # fmt: skip
        engine.adapters = [""]
        size = (Path(folder) / str(most) / "adapter_model.safetensors").stat().st_size
        for _ in range(args.loads):
            seconds, longest, usual = measure_load(engine, most + 1, Path(folder) / str(most), args.streams)
            results.add(
                config, **common, megabytes=size / 1e6, streams=args.streams, load_s=seconds,
                longest_step_ms=longest * 1e3, usual_longest_step_ms=usual * 1e3,
            )  # fmt: skip


if __name__ == "__main__":
    main()
