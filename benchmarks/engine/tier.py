"""A conversation after `kill -9`, with the tier and without it, and what the tier costs.

    python -m benchmarks.engine.tier --model llama-3.1-8b --tokens 100000 --memory 64
    python -m benchmarks.engine.tier --model smollm2-135m --tokens 7500 --memory 1 --set num_threads=2

Each engine is a process of its own with random weights in a published shape, without Ray. The first one computes
`--tokens` tokens, stores them, and is killed while it writes an answer. The second one starts on the region that is
left, and answers the conversation's next turn. The third one runs without a tier.

Milliseconds are times to the first token, medians over the repeats.

    | line | figure | what |
    | --- | --- | --- |
    | prompt | prompt_ms | the first engine's prompt |
    | resume | first_ms | the next turn, once the second engine is ready |
    | | tier_ms | the same again; the device's cache is emptied before it |
    | | device_ms, computed_ms | the same with the device's blocks, and with none, under another salt |
    | | different, unlike_device | tokens that differ from the computed ones, and from those with the device's blocks |
    | start | new_s, full_s, none_s | seconds until an engine is ready: empty region, used region, no tier |
    | overhead | with_, without_ | rates and times with a tier that has no hit, and without it; one runner, in turns |
    | copies | store_gb_s, load_gb_s | all blocks of `--copied` GiB at once, nothing else running |
    | disk | first_ms, hit_tokens | with `--disk`: the next turn in an engine whose memory has nothing of it |
    | | read_bytes | from the disk |
    | | computed_ms, different | the same under another salt; tokens that differ |
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from tqdm import tqdm

from benchmarks.library.measure import Engine, Results, engine_config, new_parser
from runtime.assembly.engine import build_engine
from runtime.base.config import EngineConfig
from runtime.base.types import Request, SamplingParams
from runtime.core.engine import EngineCore
from runtime.core.plan import StepPlan, Transfers
from runtime.tier.disk.keeper import bypass_cache, save
from runtime.tier.place import base_folder, forget
from runtime.tier.region import Region

_GIB = 1 << 30
_ANSWER = 16  # tokens of each turn's answer


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the conversation before the next turn")
    parser.add_argument("--turn", type=int, default=64, metavar="TOKENS", help="text of the next turn")
    parser.add_argument("--memory", type=float, default=1.0, metavar="GIB", help="size of the tier")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--cells", nargs="*", default=["8x512x128"], metavar="BATCHxINxOUT", help="work for the overhead"
    )
    parser.add_argument("--copied", type=float, default=0.5, metavar="GIB", help="bytes for the line of copies")
    parser.add_argument("--disk", type=Path, metavar="FOLDER", help="measure a tier on this disk, and nothing else")
    args = parser.parse_args()
    config = engine_config(args.set, kv_tier_memory=args.memory, kv_tier_name=f"benchmark-{os.getpid()}")
    assert config.tensor_parallel_size == 1, "a runner in the engine's process has one rank"
    results, starts = Results("tier", args.out), dict[str, float]()
    common = {"model": args.model, "tokens": args.tokens, "turn": args.turn, "repeats": args.repeats}
    named = replace(config, kv_tier_name=None)
    if args.disk is not None:
        _from_disk(args, replace(config, kv_tier_folder=str(args.disk)), results, common)
        return
    try:
        off = replace(config, kv_tier_memory=0)
        for name, role, own in (("new_s", _first, config), ("full_s", _second, config), ("none_s", _third, off)):
            for line, figures in _run(role, args, own):
                if line == "start":
                    starts[name] = figures["ready_s"]
                else:
                    results.add(named, **common, line=line, **figures)
    finally:
        forget(base_folder(), str(config.kv_tier_name))
        results.add(named, **common, line="start", **starts)


_Line = tuple[str, dict[str, Any]]  # its name and figures


def _run(role: Callable[..., None], args: argparse.Namespace, config: EngineConfig) -> Iterator[_Line]:
    """Yield a process's lines, and kill it after the last one."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=role, args=(sender, args, config, time.monotonic()))
    process.start()
    sender.close()
    try:
        while (line := receiver.recv()) is not None:
            yield line
    finally:
        process.kill()
        process.join()


def _first(lines: Connection, args: argparse.Namespace, config: EngineConfig, begun: float) -> None:
    talk = Conversation(args, config)
    lines.send(("start", {"ready_s": time.monotonic() - begun}))
    prompt_s, _ = talk.answer(talk.history)
    talk.finish()
    lines.send(("prompt", {"prompt_ms": prompt_s * 1e3}))
    lines.send(None)
    while True:  # until the kill
        talk.answer(talk.history + talk.text(args.turn), num_tokens=512)


def _second(lines: Connection, args: argparse.Namespace, config: EngineConfig, begun: float) -> None:
    talk = Conversation(args, config)
    lines.send(("start", {"ready_s": time.monotonic() - begun}))
    lines.send(("resume", talk.resume(args.repeats)))
    lines.send(("copies", _copies(talk.engine, int(args.copied * _GIB))))
    for figures in _overheads(talk.engine, args.cells, args.repeats):
        lines.send(("overhead", figures))
    lines.send(None)


def _third(lines: Connection, args: argparse.Namespace, config: EngineConfig, begun: float) -> None:
    Engine(args.model, config)
    lines.send(("start", {"ready_s": time.monotonic() - begun}))
    lines.send(None)


def _from_disk(args: argparse.Namespace, config: EngineConfig, results: Results, common: dict[str, Any]) -> None:
    """Answer the next turn from the disk alone."""
    named, found = replace(config, kv_tier_name=None), dict[str, Any]()
    for role, own in ((_writes, config), (_reads, replace(config, kv_tier_folder=str(args.disk)))):
        try:
            for _, figures in _run(role, args, own):
                found |= figures
        finally:
            forget(base_folder(), str(config.kv_tier_name))  # the memory
    results.add(named, **common, line="disk", **found)
    forget(args.disk, str(config.kv_tier_name))


def _writes(lines: Connection, args: argparse.Namespace, config: EngineConfig, begun: float) -> None:
    """Compute a conversation, and copy it to the disk as a keeper does."""
    talk = Conversation(args, config)
    talk.answer(talk.history)
    talk.finish()
    tier, ram = talk.engine.info.tier, _region(talk.engine)
    assert tier is not None
    disk = Region.open(args.disk / ram.folder.name, tier.layout, None, tier.slot_bytes, tier.num_ranks)
    bypass_cache(disk)
    save(ram, disk, ram.entries().keys.tobytes(), 0, 0.0)
    lines.send(None)


def _reads(lines: Connection, args: argparse.Namespace, config: EngineConfig, begun: float) -> None:
    """Answer the next turn, first from the disk."""
    talk = Conversation(args, config)
    first, answer = talk.answer(talk._next)
    stats = talk.engine.core.stats()
    talk.finish()
    computed, right = talk.answer(talk._next, salt="another")
    figures = {"first_ms": first * 1e3, "hit_tokens": stats["tier_disk_tokens"], "read_bytes": stats["tier_disk_bytes"]}
    different = sum(a != b for a, b in zip(answer, right, strict=True))
    lines.send(("disk", {**figures, "computed_ms": computed * 1e3, "different": different}))
    lines.send(None)


class Conversation:
    """Random tokens as a conversation with an engine in this process."""

    def __init__(self, args: argparse.Namespace, config: EngineConfig) -> None:
        self.engine = Engine(args.model, config)
        assert config.kv_tier_memory == 0 or self.engine.info.tier is not None, (
            "there is no tier; the log has the reason"
        )
        self.history = self.text(args.tokens)  # the same in each process
        self._next = self.history + self.text(args.turn)
        self._num_requests = 0

    def text(self, length: int) -> list[int]:
        tokens: list[int] = self.engine.rng.integers(100, self.engine.info.vocab_size - 100, length).tolist()
        return tokens

    def answer(self, prompt: list[int], salt: str = "", num_tokens: int = _ANSWER) -> tuple[float, list[int]]:
        """Return the seconds until the first token, and all tokens."""
        self._num_requests += 1
        core, name = self.engine.core, f"turn-{self._num_requests}"
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        begin, first, answer = time.perf_counter(), 0.0, list[int]()
        core.add(Request(name, prompt, len(prompt), params, cache_salt=salt))
        while len(answer) < num_tokens:
            if (output := core.step()) is not None and len(output.token_ids):
                first = first or time.perf_counter() - begin
                answer += [int(token) for token in output.token_ids]
        return first, answer

    def finish(self) -> None:
        """Run steps until all transfers have ended."""
        while self.engine.core.has_work:
            self.engine.core.step()

    def resume(self, repeats: int) -> dict[str, Any]:
        """Answer the next turn from the tier, from the device, and by computing all of it."""
        stats = self.engine.core.stats
        first, answer = self.answer(self._next)
        hit, num_bytes = stats()["tier_hit_tokens"], stats()["tier_loaded_bytes"]
        answers, tier, device = [answer], list[float](), list[float]()
        for _ in range(repeats):
            self.finish()
            self.engine.core.scheduler.pool.evict_unheld()
            for times in (tier, device):
                seconds, answer = self.answer(self._next)
                times.append(seconds)
                answers.append(answer)
        self.finish()
        loads = (stats()["tier_hit_tokens"] - hit) / hit if hit else 0.0
        computed, right = self.answer(self._next, salt="another")
        self.finish()
        different, unlike_device = (
            sum(a != b for answer in answers for a, b in zip(answer, wanted, strict=True))
            for wanted in (right, answers[-1])
        )
        return {
            "first_ms": first * 1e3, "tier_ms": median(tier) * 1e3, "device_ms": median(device) * 1e3,
            "computed_ms": computed * 1e3, "times_as_fast": computed / first, "different": different,
            "unlike_device": unlike_device,
            "hit_tokens": hit, "loaded_bytes": num_bytes, "loads_again": loads, "damaged": stats()["tier_damaged"],
        }  # fmt: skip


def _overheads(engine: Engine, cells: list[str], repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the figures of each cell, with two schedulers that have the runner in turns: one has a tier."""
    cores = {"with": engine.core, "without": _core_without_tier(engine)}
    with tqdm(total=len(cells) * (repeats + 1) * 2, unit="run") as bar:
        for cell in cells:
            batch, prompt_len, output_len = map(int, cell.split("x"))
            rows: dict[str, list[dict[str, float]]] = {name: [] for name in cores}
            for repeat in range(repeats + 1):
                for name in list(cores)[:: 1 if repeat % 2 else -1]:
                    engine.core = cores[name]
                    row = _work(engine, batch, prompt_len, output_len)
                    rows[name] += [row] if repeat else []
                    bar.update()
            middles = {name: {key: median(row[key] for row in rows[name]) for key in rows[name][0]} for name in cores}
            ratios = {f"{key}_ratio": middles["with"][key] / value for key, value in middles["without"].items()}
            named = {f"{name}_{key}": value for name, row in middles.items() for key, value in row.items()}
            yield {"cell": cell, **named, **ratios}
    engine.core = cores["with"]


def _core_without_tier(engine: Engine) -> EngineCore:
    return build_engine(engine.config, replace(engine.info, tier=None), engine.core.executor)


def _work(engine: Engine, batch: int, prompt_len: int, output_len: int) -> dict[str, float]:
    """Prefill one prompt, decode a batch, then answer requests that begin one by one."""
    prefill = engine.run(1, batch * prompt_len, 1)
    decode = engine.run(batch, prompt_len, output_len)
    gaps, rate = _serve(engine, batch, prompt_len, output_len)
    while engine.core.has_work:
        engine.core.step()
    return {
        "prefill_tok_s": batch * prompt_len / prefill.first, "decode_tok_s": decode.decode_rate, "served_tok_s": rate,
        "itl_p50_ms": float(np.percentile(gaps, 50)) * 1e3, "itl_p99_ms": float(np.percentile(gaps, 99)) * 1e3,
    }  # fmt: skip


def _serve(engine: Engine, batch: int, prompt_len: int, output_len: int) -> tuple[list[float], float]:
    """Answer three batches, `batch` requests at a time. Return the times between tokens, and output tokens a second."""
    core, left, num_tokens = engine.core, 2 * batch, 0
    last, gaps = dict[Any, float](), list[float]()
    begin = time.perf_counter()
    engine.add(batch, prompt_len, output_len)
    while core.scheduler.requests:
        if (output := core.step()) is None:
            continue
        now = time.perf_counter()
        for state in output.states:
            gaps += [now - last[state]] if state in last else []
            last[state] = now
        num_tokens += len(output.token_ids)
        ended = min(left, batch - len(core.scheduler.requests))
        engine.add(ended, prompt_len, output_len)
        left -= ended
    return gaps, num_tokens / (time.perf_counter() - begin)


def _region(engine: Engine) -> Region:
    """Open the region of the engine's tier."""
    tier = engine.info.tier
    assert tier is not None
    return Region.open(Path(tier.folder), tier.layout, tier.num_slots, tier.slot_bytes, tier.num_ranks)


def _copies(engine: Engine, num_bytes: int) -> dict[str, float]:
    """Store the first group's blocks, and load them again, by plans without rows."""
    tier, executor, region = engine.info.tier, engine.core.executor, _region(engine)
    assert tier is not None
    count = min(num_bytes // tier.slot_bytes, engine.info.num_kv_blocks - 1, tier.num_slots // 2)
    engine.core.scheduler.pool.evict_unheld()
    times = dict[str, float]()
    for _ in range(2):  # the first one touches the memory
        keys = np.frombuffer(engine.rng.bytes(16 * count), "V16")
        keys = keys[region.reserve(keys.tobytes(), 0)]
        numbers = np.arange(len(keys), dtype=np.int32)
        transfers = Transfers(numbers, 0 * numbers, numbers + 1, 0 * numbers, keys.tobytes())
        for name in ("store", "load"):
            begin, ended = time.perf_counter(), 0
            plan = StepPlan(1 << 20, stores=transfers) if name == "store" else StepPlan(1 << 20, loads=transfers)
            while ended < len(keys):
                executor.submit(plan)
                result = executor.collect()
                ended += len(result.stored) + len(result.loaded)
                assert not len(result.damaged), "a block was damaged"
                plan = StepPlan(1 << 20)
            times[name] = len(keys) * tier.slot_bytes / (time.perf_counter() - begin) / 1e9
    region.close()
    return {"copied_bytes": len(keys) * tier.slot_bytes, "block_bytes": tier.slot_bytes} | {
        f"{name}_gb_s": rate for name, rate in times.items()
    }


if __name__ == "__main__":
    main()
