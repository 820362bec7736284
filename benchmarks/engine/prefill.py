"""Time from a request's arrival to its first token, one request at a time, each prompt a fresh random one.

    python -m benchmarks.engine.prefill --model llama-3.2-1b --lengths 512 2048 8192

The engine is in this process and has random weights in a published shape. Figures are medians over the repeats.
"""

from __future__ import annotations

from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, middle, new_parser


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 2048, 8192], metavar="TOKENS")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each length, after one to warm up")
    args = parser.parse_args()
    config = engine_config(args.set)
    results = Results("prefill", args.out)
    engine = Engine(args.model, config)
    with tqdm(total=len(args.lengths) * (args.repeats + 1), unit="run") as bar:
        for length in args.lengths:
            bar.set_description(f"{args.model} {length} tokens")
            times = []
            for _ in range(args.repeats + 1):
                times.append(engine.run(1, length, 1).first * 1e3)
                bar.update()
            first, spread = middle(times[1:])
            results.add(
                config, model=args.model, prompt_len=length, repeats=args.repeats, first_token_ms=first,
                range=spread, tok_s=length / first * 1e3,
            )  # fmt: skip


if __name__ == "__main__":
    main()
