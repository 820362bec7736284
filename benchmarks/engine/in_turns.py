"""Decode steps of one model with several settings, in one process and in turns, for machines with unsteady speed.

    python -m benchmarks.engine.in_turns --model llama-3.2-1b --variants quantization=none quantization=int8 \\
        quantization=int8,head_quantization=none --set device=cpu dtype=bfloat16 max_model_len=512 kv_cache_memory=0.3

All engines are in memory at once. A round decodes with each of them; the others are compared with the first variant.
Times are medians of a round's steps, and of the rounds.
"""

from __future__ import annotations

import statistics
import time

from benchmarks.library.measure import Engine, Results, engine_config, new_parser


def step_ms(engine: Engine, batch: int, num_steps: int) -> float:
    """The median time of a decode step of `batch` requests, in milliseconds; the first two are not counted."""
    engine.add(batch, 16, num_steps + 3)
    times = []
    while engine.core.has_work:
        start = time.perf_counter()
        output = engine.core.step()
        if output is not None and len(output.token_ids) == batch:
            times.append(time.perf_counter() - start)
    return statistics.median(times[2:]) * 1e3


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--variants", nargs="+", required=True, metavar="FIELD=VALUE,...")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    results = Results("in_turns", args.out)
    configs = {text: engine_config([*args.set, *text.split(",")]) for text in args.variants}
    engines = {text: Engine(args.model, config) for text, config in configs.items()}
    for engine in engines.values():
        step_ms(engine, args.batch, 3)
    times: dict[str, list[float]] = {text: [] for text in engines}
    for _ in range(args.rounds):
        for text, engine in engines.items():
            times[text].append(step_ms(engine, args.batch, args.steps))
    first = times[args.variants[0]]
    for text, config in configs.items():
        results.add(
            config, model=args.model, variant=text, batch=args.batch, rounds=args.rounds,
            step_ms=statistics.median(times[text]), fastest_ms=min(times[text]), slowest_ms=max(times[text]),
            speed=statistics.median(a / b for a, b in zip(first, times[text], strict=True)),
        )  # fmt: skip


if __name__ == "__main__":
    main()
