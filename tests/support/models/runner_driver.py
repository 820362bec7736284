"""Drives a ModelRunner with hand-made plans, and keeps the logits that it samples from."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from unittest import mock

import numpy as np
import torch

import tests.support.kernels.kept_traces  # noqa: F401
from runtime.assembly.runner import build_runner
from runtime.base.config import EngineConfig
from runtime.base.images import ImageSpan
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.tower_spec import TowerSpec
from runtime.base.types import SamplingParams
from runtime.core.plan import EMPTY_TABLE, Encoding, NewSlot, StepPlan, StepResult
from runtime.worker.gpu.gpu_steps import GpuSteps
from runtime.worker.runner import ModelRunner
from runtime.worker.sources import CheckpointSource, DummySource
from runtime.worker.warmup import WarmUp
from tests.support.models.specs import TINY

GREEDY = SamplingParams(max_tokens=64, temperature=0.0)


def tiny_runner(
    spec: DecoderSpec = TINY, is_draft: bool = False, tower: TowerSpec | None = None, **config
) -> ModelRunner:
    """A random model; `config` overrides EngineConfig's fields.

    On a CPU its kernels are built by the first steps, which takes less time than steps of all sizes at the start.
    Runners of checkpoints (`open_runner`) warm up."""
    defaults = {"device": "cpu", "num_kv_blocks": 160, "max_num_seqs": 40, "max_model_len": 192, "num_threads": 1}
    own = EngineConfig(**defaults | config)
    builds = mock.patch.object(WarmUp, "build_kernels") if own.device == "cpu" else nullcontext()
    with builds:
        return build_runner(own, DummySource(spec, tower=tower), is_draft=is_draft)


class Driver:
    """Opens slots with blocks of its own choice, and runs rows (slot, start, count, sample)."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        runner.reset()
        self.runner = runner
        self.plan = StepPlan(0)
        blocks = np.random.default_rng(seed).permutation(np.arange(1, runner.info.num_kv_blocks))
        self.free_blocks: list[int] = blocks.tolist()
        self.tables: dict[int, list[int]] = {}  # of the first group of layers
        self.others: dict[int, list[list[int]]] = {}  # of the other groups
        self.spans: dict[int, Sequence[ImageSpan]] = {}
        self.pool: dict[bytes, int] = {}  # first row of each image in the pool
        self.num_pooled = 0  # rows
        self.logits = torch.zeros(0)
        compute = type(runner.decoder).logits

        def keep(hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            logits = compute(runner.decoder, hidden, out)
            self.logits = logits.clone()
            return logits

        runner.decoder.logits = keep  # the instance's, found before the class's

    def open(
        self, slot: int, tokens: list[int], params: SamplingParams = GREEDY, *, prompt_len: int | None = None,
        seed: int = 0, shared: list[int] | None = None, room: int = 40, adapter: int = 0,
        spans: Sequence[ImageSpan] = (),
    ) -> None:  # fmt: skip
        """Enter a request in the next step; its first blocks may be another's in the first group (a prefix hit). It may
        grow by `room` tokens."""
        known = np.array(tokens, np.int32)
        state = slot + 1 if self.runner.info.num_states else 0
        places = np.array([(span.begin, span.num_tokens, *span.grid) for span in spans], np.int32).reshape(-1, 5)
        self.plan.new.append(
            NewSlot(slot, known, prompt_len or len(tokens), seed, params, adapter, state, spans=places)
        )
        self.spans[slot] = spans
        size = self.runner.info.block_size
        num_blocks = -(-min(len(tokens) + room, self.runner.info.max_model_len) // size)
        shared = shared or []
        owner = next((slot for slot, table in self.tables.items() if shared and table[: len(shared)] == shared), None)
        tables = [shared[:]]
        for group in range(len(self.runner.memory.kv_cache.groups) - 1):
            tables.append([] if owner is None else self.others[owner][group][: len(shared)])
        for table in tables:
            table += [self.free_blocks.pop() for _ in range(num_blocks - len(table))]
        self.tables[slot], self.others[slot] = tables[0], tables[1:]
        places = -(-self.runner.info.max_model_len // size)
        entries = [(slot, g * places + i, b) for g, table in enumerate(tables) for i, b in enumerate(table)]
        writes = np.array(entries, np.int32).T
        self.plan.block_table_writes = np.concatenate(
            (self.plan.block_table_writes if self.plan.new else EMPTY_TABLE, writes), 1
        )

    def free(self, slot: int) -> None:
        """The request leaves; its blocks are the next ones to be allocated."""
        del self.spans[slot]
        self.plan.freed = np.append(self.plan.freed, np.int32(slot))
        for table in (*self.others.pop(slot)[::-1], self.tables.pop(slot)):
            self.free_blocks += table[::-1]

    def step(self, *rows: tuple[int, int, int, int]) -> StepResult:
        plan, self.plan = self.plan, StepPlan(self.plan.step_id + 1)
        plan.slots, plan.num_computed, plan.num_tokens, plan.num_samples = np.array(rows, np.int32).T.copy()
        self._add_images(plan)
        self.logits = torch.zeros(0)
        result, steps = self.runner.execute(plan), self.runner.steps
        if isinstance(steps, GpuSteps) and (
            graphs := steps.graphs_for(plan, steps.needs(plan))
        ):  # they do not pass `keep`
            places = graphs[0][0].shape.sample_places(plan)
            # Of several graphs, only the last one's logits remain, which are not all.
            self.logits = (
                steps.kernels.graph_logits[torch.from_numpy(places)].clone() if len(graphs) == 1 else torch.zeros(0)
            )
        return result

    def _add_images(self, plan: StepPlan) -> None:
        """Encode the images in the plan's rows that are not in the pool, and read the embeddings of their tokens. All
        tokens of a span have one."""
        embeds, at = [], 0
        for slot, start, count in np.stack((plan.slots, plan.num_computed, plan.num_tokens), 1).tolist():
            for span in self.spans[slot]:
                first, last = max(start, span.begin), min(start + count, span.end)
                if first >= last:
                    continue
                if span.image.digest not in self.pool:
                    self.pool[span.image.digest] = self.num_pooled
                    plan.encodings = [*plan.encodings, Encoding(span.image, self.num_pooled, span.num_tokens)]
                    self.num_pooled += span.num_tokens
                row = self.pool[span.image.digest] + first - span.begin
                embeds.append((at + first - start, row, last - first))
            at += count
        if embeds:
            plan.embeds = np.array(embeds, np.int32).T.copy()

    def prefill(self, slot: int, tokens: list[int], cuts: tuple[int, ...] = (), start: int = 0) -> torch.Tensor:
        """Compute tokens[start:] in chunks that end at `cuts`, alone; the logits after the last one."""
        edges = [start, *(c for c in sorted(set(cuts)) if start < c < len(tokens)), len(tokens)]
        for a, b in pairwise(edges):
            self.step((slot, a, b - a, int(b == len(tokens))))
        return self.logits[0]


def open_runner(folder: Path, **config) -> ModelRunner:
    """A runner of the checkpoint in a folder, on one thread of the CPU."""
    return build_runner(
        EngineConfig(model="tiny", device="cpu", kv_cache_memory=0.05, num_threads=1, **config),
        CheckpointSource(folder),
    )
