"""Pooling of texts against prefill: the same prompts, pooled, and with one sampled token each, in alternation.

    python -m benchmarks.engine.embeddings --model qwen3-0.6b --texts 256 --length 512

The engine is in this process and has random weights of a published shape. Medians of the repeats.
"""

from __future__ import annotations

import time

from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, middle, new_parser
from runtime.base.types import Request, SamplingParams


def run(engine: Engine, params: SamplingParams, num_texts: int, length: int) -> float:
    """Seconds for a batch of fresh random prompts."""
    prompts = engine.rng.integers(0, engine.info.vocab_size, (num_texts, length)).tolist()
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        engine.core.add(Request(f"{params.pooled}-{i}", prompt, length, params))
    while engine.core.has_work:
        engine.core.step()
    return time.perf_counter() - start


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--texts", type=int, default=256, help="of a batch")
    parser.add_argument("--length", type=int, default=512, help="tokens of each")
    parser.add_argument("--repeats", type=int, default=5, help="timed batches of each kind, after one to warm up")
    args = parser.parse_args()
    config = engine_config(args.set, pooling="last")
    results, engine = Results("embeddings", args.out), Engine(args.model, config)
    kinds = {
        "prefill": SamplingParams(max_tokens=1, temperature=0.0),
        "pooled": SamplingParams(max_tokens=1, temperature=0.0, pooled=True),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    with tqdm(total=len(kinds) * (args.repeats + 1), unit="batch") as bar:
        for _ in range(args.repeats + 1):
            for kind, params in kinds.items():
                times[kind].append(run(engine, params, args.texts, args.length))
                bar.update()
    rates = {kind: args.texts * args.length / middle(found[1:])[0] for kind, found in times.items()}
    results.add(
        config, model=args.model, texts=args.texts, length=args.length, repeats=args.repeats,
        prefill_tok_s=rates["prefill"], pooled_tok_s=rates["pooled"], ratio=rates["pooled"] / rates["prefill"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
