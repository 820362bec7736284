"""Decoding with a draft head, at a pinned acceptance, against decoding without: one model in this process.

A batch decodes by an engine with the head, and without. Then the parts are timed on the device, without the engine:

    round_us          a whole round, with the host's part
    plain_step_us     a decode step
    verify_us         the verifying step
    extend_us         the head's extend and first draft token; extend_only_us: without one
    single_us         each further draft token
    beside_us         round_us without verify_us and the head's passes
    beyond_bytes_us   round_us without verify_us and the time for reading the head's weights

    python -m benchmarks.drafts.heads --model llama-3.1-8b --head eagle3 --length 3.0 --batches 1 8 64
    python -m benchmarks.drafts.heads --model qwen3.6-35b-a3b --head mtp --length 2.8 --context 8192 --batches 1 16
    python -m benchmarks.drafts.heads --model gemma-4-26b-a4b --head assistant --batches 1 8
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.library.measure import Engine, Results, engine_config, middle, new_parser
from benchmarks.library.models import assistant_head, eagle3_head, spec_of
from runtime.assembly.engine import build_engine, speculation_of
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.types import SamplingParams
from runtime.core.executor import InProcess
from runtime.core.plan import DEVICE_DRAFT, EMPTY, NewSlot, StepPlan
from runtime.models.heads.mtp import mtp_spec
from runtime.worker.gpu.gpu_steps import GpuSteps
from runtime.worker.gpu.graph_runner import MAX_VERIFIED, CapturedGraph
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import DummySource

HEADS: dict[str, Callable[[DecoderSpec], HeadSpec]] = {
    "eagle3": eagle3_head, "mtp": mtp_spec, "assistant": assistant_head
}  # fmt: skip
_BANDWIDTH = 4.45e12  # bytes a second that an H200 reads
_REPLAYS = 16


class HeadEngine(Engine):
    """An engine that has a head with random weights. `drafts` switches it."""

    def __init__(self, spec: DecoderSpec, head: HeadSpec, config: EngineConfig) -> None:
        self.config, self.sampling, self.adapters = config, {"temperature": 0.0}, [""]
        self.runner = build_runner(config, DummySource(spec, draft_head=head))
        self.info, self.rng, self._num_requests = self.runner.info, np.random.default_rng(0), 0
        self._head = self.runner.steps.head
        self.drafts(True)

    def drafts(self, on: bool) -> None:
        """Decode with the head, or as a runner without it."""
        self.runner.reset()
        self.runner.steps.head = self._head if on else None
        speculation = speculation_of(self.config, self.info, time.perf_counter) if on else None
        self.core = build_engine(self.config, self.info, InProcess(self.runner), speculation)


class Parts:
    """Times of a round's parts, on rows with `context` tokens."""

    def __init__(self, runner: ModelRunner, batch: int, context: int, drafts: int) -> None:
        runner.reset()
        self.runner, self.steps, self.batch, self.context, self.drafts = runner, runner.steps, batch, context, drafts
        self.slots = np.arange(batch, dtype=np.int32)
        self._open()

    def _open(self) -> None:
        """Fill slots with random tokens. Keys and values are what the cache has: their values do not matter."""
        size, rng = self.runner.info.block_size, np.random.default_rng(0)
        num_blocks = -(-(self.context + 512) // size)
        groups, places = len(self.runner.memory.kv_cache.groups), -(-self.runner.info.max_model_len // size)
        new, writes = [], []
        for slot in self.slots.tolist():
            tokens = rng.integers(0, self.runner.info.vocab_size, self.context + 1, dtype=np.int32)
            state = slot + 1 if self.runner.info.num_states else 0
            params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
            new.append(NewSlot(slot, tokens, len(tokens), slot, params, state=state))
            for group in range(groups):
                first = 1 + (slot * groups + group) * num_blocks
                ids = (first + np.arange(num_blocks)) % (self.runner.info.num_kv_blocks - 1) + 1
                writes.append(np.stack((np.full(num_blocks, slot), group * places + np.arange(num_blocks), ids)))
        plan = StepPlan(0, new=new, block_table_writes=np.concatenate(writes, 1).astype(np.int32))
        self.runner.execute(plan)
        self.at = np.full(self.batch, self.context, np.int32)

    def plan(self, given: int, next_drafts: int) -> StepPlan:
        """A step of the rows, each with its last token and `given` draft tokens."""
        counts = np.full(self.batch, given + 1, np.int32)
        lens = np.full(self.batch, given, np.int32) if given else EMPTY
        tokens = np.full(self.batch * given, DEVICE_DRAFT, np.int32)
        columns: dict[str, Any] = {"num_computed": self.at.copy(), "num_tokens": counts, "num_samples": counts}
        columns |= {"draft_lens": lens, "draft_token_ids": tokens, "next_drafts": next_drafts}
        return StepPlan(1, slots=self.slots, **columns)

    def step(self, given: int, next_drafts: int) -> None:
        """Run a step and commit its samples."""
        result = self.runner.execute(self.plan(given, next_drafts))
        samples = result.token_ids.reshape(self.batch, given + 1)
        accepted = np.zeros(self.batch, np.int32)
        if given:
            accepted = (samples[:, :given] == result.draft_token_ids.reshape(self.batch, given)).cumprod(1).sum(1)
        self.at += accepted.astype(np.int32) + 1

    def steps_us(self, given: int, next_drafts: int, count: int = 40) -> float:
        """Time of a step after another, with the host's part."""
        for _ in range(3):
            self.step(given, next_drafts)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self.step(given, next_drafts)
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / count * 1e6

    def graph_us(self, given: int) -> tuple[float, CapturedGraph]:
        """The device's time of the graph for a step, and the graph. Its rows go on by one token a replay."""
        assert isinstance(self.steps, GpuSteps)
        runner, plan = self.steps.graph_runner, self.plan(given, 0)
        graph = runner.find(plan)
        assert graph is not None, "the batch has a graph"
        plan.num_steps = _REPLAYS
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(2):  # the first one warms up
            start.record()
            runner.replay(graph, plan, [np.zeros(1, np.int32)])
            end.record()
            torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / _REPLAYS * 1e3, graph


def replays_us(graph: Any) -> float:
    """The device's time of a graph without input."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / _REPLAYS * 1e3


def num_bytes(root: Any) -> int:
    """Bytes of the tensors in an object, each memory once."""
    seen: set[int] = set()
    found: dict[int, int] = {}

    def visit(x: Any, depth: int) -> None:
        if id(x) in seen or depth > 8:
            return
        seen.add(id(x))
        if isinstance(x, torch.Tensor):
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(x, list | tuple):
            for item in x:
                visit(item, depth + 1)
        elif hasattr(x, "__dict__") or hasattr(type(x), "__slots__"):
            names = {*getattr(x, "__dict__", {}), *getattr(type(x), "__slots__", ())} - {"target", "communicator"}
            for name in names:
                visit(getattr(x, name, None), depth + 1)

    visit(root, 0)
    return sum(found.values())


def measure_parts(engine: HeadEngine, batch: int, args: argparse.Namespace) -> dict[str, float]:
    """The parts of a round with `args.drafts` draft tokens, in microseconds."""
    runner, k = engine.runner, args.drafts
    engine.drafts(True)
    head = engine._head
    round_us = Parts(runner, batch, args.context, k).steps_us(k, k)
    parts = Parts(runner, batch, args.context, k)
    parts.step(0, k)
    verify_us, graph = parts.graph_us(k)
    plain_us, _ = parts.graph_us(0)
    extend_us = replays_us(head.graphs[graph.shape, True])
    extend_only = head.graphs.get((graph.shape, False))  # a head without a cache has none
    extend_only_us = 0.0 if extend_only is None else replays_us(extend_only)
    single_us = replays_us(head.graphs[graph.shape.num_rows])
    layer_bytes = num_bytes(head.head)
    own_head = 0 if head.head.spec.own_head else num_bytes(head.head.target.head)
    bytes_us = k * (layer_bytes + own_head) / _BANDWIDTH * 1e6
    passes_us = extend_us + (k - 1) * single_us
    return {
        "round_us": round_us, "verify_us": verify_us, "plain_step_us": plain_us, "extend_us": extend_us,
        "extend_only_us": extend_only_us, "single_us": single_us, "head_bytes": layer_bytes + own_head,
        "head_bytes_us": bytes_us, "beside_us": round_us - verify_us - passes_us,
        "beyond_bytes_us": round_us - verify_us - bytes_us,
    }  # fmt: skip


def main() -> None:
    parser = new_parser(__doc__)
    parser.add_argument("--head", choices=sorted(HEADS), default="mtp")
    parser.add_argument("--length", type=float, default=3.0, help="mean tokens that a round accepts")
    parser.add_argument("--drafts", type=int, default=3, help="draft tokens of a round; 0 for what pays")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    defaults: dict[str, Any] = {
        "draft": "mtp",
        "num_draft_tokens": args.drafts or None,
        "pinned_acceptance": args.length,
    }
    defaults |= {"max_num_seqs": max(args.batches), "max_model_len": args.context + args.output_len + 512}
    config = engine_config(args.set, **defaults)
    spec = spec_of(args.model)
    start = time.perf_counter()
    engine = HeadEngine(spec, HEADS[args.head](spec), config)
    start_s, results = time.perf_counter() - start, Results("heads", args.out)
    for batch in args.batches:
        rates: dict[bool, list[float]] = {True: [], False: []}
        for number in range(args.repeats + 1):
            for on in (True, False):
                engine.drafts(on)
                rate = engine.run(batch, args.context, args.output_len).decode_rate
                if number:  # the first one warms up
                    rates[on].append(rate)
        (with_head, spread), (plain, plain_spread) = (middle(rates[on]) for on in (True, False))
        has_graph = engine.runner.numerics.device.type == "cuda" and batch * (args.drafts + 1) <= MAX_VERIFIED
        parts = measure_parts(engine, batch, args) if has_graph and args.drafts else {}
        shape = {"model": args.model, "head": args.head, "length": args.length, "drafts": args.drafts}
        figures = {"tok_s": with_head, "tok_s_range": spread, "plain_tok_s": plain, "plain_tok_s_range": plain_spread}
        results.add(config, **shape, batch=batch, context=args.context, start_s=start_s, **figures, **parts)


if __name__ == "__main__":
    main()
