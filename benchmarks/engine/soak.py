"""Whether an engine leaks memory: random requests for some minutes, and the GPU memory that torch holds.

    python -m benchmarks.engine.soak --model llama-3.2-1b --minutes 10

Prompts have 1 to 4,096 tokens, outputs 1 to 256, and up to twice a step's rows run, so that steps with every size
and mix occur. One line at the end: reserved and allocated bytes after the first minute and at the end.
"""

from __future__ import annotations

import time

import torch
from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, new_parser


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--longest", type=int, default=4096, help="tokens of the longest prompt")
    args = parser.parse_args()
    config = engine_config(args.set)
    engine = Engine(args.model, config)
    core, rng, most = engine.core, engine.rng, 2 * engine.runner.info.max_num_seqs
    start, first, tokens, requests = time.perf_counter(), None, 0, 0
    with tqdm(total=round(60 * args.minutes), unit="s") as bar:
        while (elapsed := time.perf_counter() - start) < 60 * args.minutes:
            while len(core.scheduler.requests) < most:
                engine.add(1, int(rng.integers(1, args.longest + 1)), int(rng.integers(1, 257)))
                requests += 1
            tokens += len(output.token_ids) if (output := core.step()) is not None else 0
            if first is None and elapsed > min(60, 10 * args.minutes):
                first = _memory()
            bar.update(int(elapsed) - bar.n)
    Results("soak", args.out).add(
        config, model=args.model, minutes=args.minutes, requests=requests, output_tok_s=tokens / elapsed,
        preemptions=core.scheduler.stats.preemptions, early=first, late=_memory(),
    )  # fmt: skip


def _memory() -> dict[str, int]:
    if not torch.cuda.is_available():
        return {}
    return {"reserved": torch.cuda.memory_reserved(), "allocated": torch.cuda.memory_allocated()}


if __name__ == "__main__":
    main()
