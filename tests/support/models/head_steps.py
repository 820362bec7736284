"""A model and its head on a small KV cache, one request, without a runner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from runtime.base.config import EngineConfig
from runtime.base.shard import Shard
from runtime.kernels.attention.attention_torch import AttentionShape, plan_attention
from runtime.kernels.collectives.communicator import Communicator, OneRank
from runtime.kernels.numerics import Numerics
from runtime.kernels.step.state_rows import StateRows
from runtime.models.forward_batch import ForwardBatch, GroupRows
from runtime.worker.kv_cache import KVCache
from runtime.worker.runner import choose_numerics
from runtime.worker.sources import ModelSource
from runtime.worker.state_cache import StateCache

MOST = 64  # positions


def in_float32(**settings) -> Numerics:
    """A CPU's float32 with torch's kernels."""
    return choose_numerics(EngineConfig(device="cpu", dtype="float32", kernel_backend="torch", **settings))


class HeadDriver:
    """Runs a model and the head that `--draft` names."""

    def __init__(self, source: ModelSource, communicator: Communicator | None = None, draft: str = "mtp") -> None:
        ranks, self.numerics, found = communicator or OneRank(), in_float32(), source.head(draft)
        assert found is not None
        shard = Shard(ranks.rank, ranks.size)
        self.spec = spec = replace(source.spec, draft_layers=found.spec.layers).of_rank(shard)
        self.decoder = source.load(spec, self.numerics, MOST, ranks)
        self.head = found.load(self.decoder, found.spec.for_rank(shard), MOST)
        cache_spec, device = spec.kv_cache("float32"), self.numerics.device
        self.num_groups = len(cache_spec.groups)
        states = None if cache_spec.states is None else StateCache(cache_spec.states, 3, 2, device)
        num_blocks = 1 + 4 * self.num_groups
        self.cache = KVCache(cache_spec, num_blocks, 16, device, states=states)
        apart = 1 if cache_spec.is_mixed else num_blocks
        self.shapes = [
            AttentionShape(spec.num_heads, group.num_kv_heads, apart, 16, torch.float32, device, False)
            for group in cache_spec.groups
        ]

    def batch(self, token_ids: list[int], start: int) -> ForwardBatch:
        """Tokens at consecutive positions."""
        count = len(token_ids)
        positions = torch.arange(start, start + count)
        numbers = [torch.tensor(n, dtype=torch.int32) for n in ([0], [start], [0, count])]
        states = StateRows(*numbers, torch.tensor([[1, start + count - 1, 0, 0]], dtype=torch.int32), 1, count, count)
        groups = []
        for i, (shape, factor) in enumerate(zip(self.shapes, self.cache.table_factors, strict=True)):
            table = (np.arange(1, 5, dtype=np.int32) + 4 * i)[None] * factor
            plan = plan_attention(table, np.array([start], np.int32), np.array([count], np.int32), shape)
            places = torch.from_numpy(table)[0, positions // 16].long() * 16 + positions % 16
            groups.append(GroupRows(places, plan))
        return ForwardBatch(torch.tensor(token_ids), positions, groups, states=states)

    def target(self, token_ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's normed hidden states and logits from position 0."""
        batch, caches = self.batch(token_ids, 0), self.cache.layers[: self.spec.num_layers]
        x = self.decoder.forward(batch, caches)
        return self.decoder.normed(x).clone(), self.decoder.logits(x).clone()

    def extend(self, token_ids: list[int], start: int, hidden: torch.Tensor, only_stores: bool = False) -> torch.Tensor:
        """The head's result for tokens, from the hidden states before each."""
        caches, batch = self.cache.layers[self.spec.num_layers :], self.batch(token_ids, start)
        batch.only_stores = only_stores
        return self.head.forward(batch, hidden, caches)

    @torch.inference_mode()
    def drafts(self, token_ids: list[int], sample: int, count: int, cuts: tuple[int, ...] = ()) -> torch.Tensor:
        """[count, vocabulary]: logits of draft tokens after a prompt and its sample. `cuts` divide the extend pass,
        and only its last part does more than to store."""
        hidden, _ = self.target(token_ids)
        tokens, at = [*token_ids[1:], sample], 0
        for cut in (*cuts, len(tokens)):
            x = self.extend(tokens[at:cut], at + 1, hidden[at:cut], cut < len(tokens))[-1:]
            at = cut
        found = [self.head.logits(x).clone()]
        for i in range(1, count):
            token = int(found[-1].argmax())
            x = self.extend([token], len(token_ids) + i, self.head.recycled(x))
            found.append(self.head.logits(x).clone())
        return torch.cat(found)
