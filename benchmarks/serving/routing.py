"""The cost of the choice of an engine for a front, and of cache reports for an engine's step. CPU time, us.

    python -m benchmarks.serving.routing [--engines 64] [--prompt 8192] [--blocks 5000] [--rounds 200]

Choice: a prompt without known hashes, of new tokens after a prefix. Each engine holds another share of the prefix, so
the walk ends where the longest share does. `--blocks` others are in each picture. Step: the engine core with a runner
that answers at once, and decode rows. Here "alone" runs without code for followers, and "0 followers" is a single
engine. The others report to fronts at their usual pace, or after each step: "eager". Alternating rounds, the median of
their differences.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import chain, count

import numpy as np

from actors.engine.cache_feed import CacheFeed, Followers
from actors.front.router import Prompt, Router
from actors.wire.link_messages import CacheUpdate, encode
from actors.wire.transport import framed
from benchmarks.serving.step_channel import EchoRunner
from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig, ModelInfo
from runtime.base.types import Request, SamplingParams
from runtime.core.executor import InProcess
from runtime.policy.engine_load import EngineLoad

BLOCK_SIZE = 16
INFO = ModelInfo("routing", 32000, 1 << 20, (0,), 1 << 17, BLOCK_SIZE, "none", "none")
KIND = (INFO.fingerprint, INFO.block_size)
BATCH = 64
STEPS = 200


def cpu_us(work: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    work()
    return (time.thread_time_ns() - start) / 1000


def told(number: int, keys: list[int], is_snapshot: bool = False) -> CacheUpdate:
    return CacheUpdate(number, np.array(keys, "<i8").tobytes(), b"", EngineLoad(), is_snapshot)


def time_choice(num_engines: int, num_tokens: int, num_blocks: int, rounds: int) -> None:
    """Print the time of a choice, and of applying an update of 64 blocks."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 32000, num_tokens).tolist()
    path = list(chain(*Prompt(tokens).keys(KIND)))
    router = Router()
    for i in range(num_engines):
        router.add(str(i), INFO)
        others = rng.integers(-(1 << 62), 1 << 62, num_blocks).tolist()
        router.apply(str(i), told(0, others + path[: len(path) * i // (num_engines - 1)], True))
    streams = count(1)

    def choose() -> None:
        prompt = Prompt(list(tokens))
        engine, num_cached = router.choose(prompt, names)
        router.note_sent(engine, next(streams), num_tokens - num_cached)

    names = [str(i) for i in range(num_engines)]
    prompt = Prompt(tokens)
    router.choose(prompt)
    updates = [told(i + 1, rng.integers(-(1 << 62), 1 << 62, 64).tolist()) for i in range(rounds)]
    for label, times in {
        "choice": [cpu_us(choose) for _ in range(rounds)],
        "of it hashing": [cpu_us(lambda: list(Prompt(tokens).keys(KIND))) for _ in range(rounds)],
        "choice, hashed before": [cpu_us(lambda: router.choose(prompt, names)) for _ in range(rounds)],
        "choice, nobody has any": [cpu_us(lambda: router.choose(Prompt(tokens, "salt"), names)) for _ in range(rounds)],
        "update of 64 blocks": [cpu_us(lambda update=update: router.apply("0", update)) for update in updates],
    }.items():
        least, p50, p90 = np.percentile(times, (0, 50, 90))
        print(f"{label:<24} least {least:8.1f}   p50 {p50:8.1f}   p90 {p90:8.1f}", flush=True)


class Front:
    """A connection that encodes the messages it is sent."""

    last_stream = 1

    def send(self, message: CacheUpdate) -> None:
        framed(encode(message))


class Engine:
    """Rows that decode, and followers."""

    def __init__(self, num_followers: int | None, eager: bool = False) -> None:
        config = EngineConfig(max_num_seqs=BATCH, max_num_batched_tokens=8192, block_size=BLOCK_SIZE)
        self.core = build_engine(config, INFO, InProcess(EchoRunner()))
        self.followers = Followers(CacheFeed(self.core.scheduler), time.monotonic)
        if eager:
            self.followers.EVERY_S = 0.0
        self.has_followers = num_followers is not None
        for _ in range(num_followers or 0):
            self.followers.follow(Front(), True)
        params = SamplingParams(max_tokens=INFO.max_model_len // BATCH, ignore_eos=True)
        for i in range(BATCH):
            prompt = [1 + (i * 31 + k) % 30000 for k in range(32)]
            self.core.add(Request(str(i), prompt, len(prompt), params))
        for _ in range(50):
            self.step()

    def step(self) -> None:
        self.core.step()
        if self.has_followers:
            self.followers.are_behind = True
            self.followers.send_changes()

    def steps_us(self) -> float:
        def steps() -> None:
            for _ in range(STEPS):
                self.step()

        return cpu_us(steps) / STEPS


def time_steps(rounds: int) -> None:
    """Print a step's time alone, and the extra time of followers."""
    kinds = {
        "alone": Engine(None), "0 followers": Engine(0), "1 follower": Engine(1), "4 followers": Engine(4),
        "4 followers, eager": Engine(4, eager=True),
    }  # fmt: skip
    times: dict[str, list[float]] = {label: [] for label in kinds}
    for _ in range(rounds):
        for label, engine in kinds.items():
            times[label].append(engine.steps_us())
    alone = times.pop("alone")
    print(f"a step of {BATCH} rows alone   {statistics.median(alone):8.1f}")
    for label, taken in times.items():
        more = statistics.median(one - other for one, other in zip(taken, alone, strict=True))
        print(f"{label:<24}     {more:+8.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64, help="in the pictures of the front")
    parser.add_argument("--prompt", type=int, default=8192, help="tokens")
    parser.add_argument("--blocks", type=int, default=5000, help="blocks of other prompts in each picture")
    parser.add_argument("--rounds", type=int, default=200, help="of each choice; a tenth of it of steps")
    args = parser.parse_args()
    time_choice(args.engines, args.prompt, args.blocks, args.rounds)
    time_steps(max(3, args.rounds // 10))


if __name__ == "__main__":
    main()
