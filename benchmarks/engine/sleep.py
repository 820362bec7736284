"""The time that a runner in this process takes to sleep (level 1) and to wake up, and the memory that it releases;
random weights.

    python -m benchmarks.engine.sleep --model llama-3.1-8b

The first sleep allocates the host's pinned memory and copies the weights there; later ones reuse them. `same_tokens` is
true if a greedy batch gets the tokens that it got before the first sleep.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

from benchmarks.library.measure import Engine, Results, engine_config, new_parser
from runtime.base.types import Request, SamplingParams


def greedy(engine: Engine, batch: int, length: int) -> list[list[int]]:
    """The answers to `batch` prompts that are the same each time."""
    params, answers = SamplingParams(max_tokens=length, ignore_eos=True, temperature=0.0), [[] for _ in range(batch)]
    for i, answer in enumerate(answers):
        prompt = [(7 * i + 3 * k) % engine.info.vocab_size for k in range(64)]
        engine.core.add(Request(f"greedy-{i}", prompt, len(prompt), params), answer)
    while engine.core.has_work:
        if (output := engine.core.step()) is not None:
            for state, token in zip(output.states, output.token_ids, strict=True):
                state.owner.append(token)
    return answers


def seconds_of(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="sleeps")
    parser.add_argument("--batch", type=int, default=8)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("torch sees no CUDA device; a runner on a CPU gives nothing back.")
    config = engine_config(args.set, model=args.model, sleep_mode=True, deterministic=True)
    engine, results = Engine(args.model, config), Results("engine.sleep", args.out)
    before = greedy(engine, args.batch, 32)
    for number in range(1, args.repeats + 1):
        engine.core.lose()
        free = torch.cuda.mem_get_info()[0]
        to_sleep_s = seconds_of(engine.runner.sleep)
        given_back = torch.cuda.mem_get_info()[0] - free
        to_wake_s = seconds_of(engine.runner.wake)
        engine.core.recover(engine.core.executor)
        results.add(
            config,
            model=args.model,
            sleep=number,
            to_sleep_s=to_sleep_s,
            to_wake_s=to_wake_s,
            first_token_s=engine.run(1, 64, 1).first,
            given_back_gib=given_back / (1 << 30),
            left_gib=(torch.cuda.mem_get_info()[1] - free - given_back) / (1 << 30),
            same_tokens=greedy(engine, args.batch, 32) == before,
        )


if __name__ == "__main__":
    main()
