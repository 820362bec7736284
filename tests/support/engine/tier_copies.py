"""A rank's cache, a region and the copier between both, on any backend. Tests play the engine's part."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from runtime.base.kv_cache_spec import KVCacheSpec, KVGroupSpec, StateGroupSpec
from runtime.core.plan import StepPlan, StepResult, Transfers
from runtime.kernels.numerics import Numerics
from runtime.tier.region import Region
from runtime.tier.runner_tier import copier_of
from runtime.worker.kv_cache import KVCache
from runtime.worker.memory import tier_slot_bytes
from runtime.worker.state_cache import StateCache

SIZE = 16  # tokens in a block
STATE = -1  # the group of a state


def _group(layers: Sequence[int], heads: int, dim: int, dtype: str = "bfloat16", **more) -> KVGroupSpec:
    return KVGroupSpec(tuple(layers), heads, dim, dtype, **more)


INT8 = {"dtype": "int8", "scale_dtype": "float16"}
_STATES = StateGroupSpec((1, 2), channels=24, dtype="bfloat16", heads=3, key_dim=16, value_dim=40)
SPECS = {
    "float32": KVCacheSpec((_group(range(3), 2, 40, "float32"),)),
    "bfloat16": KVCacheSpec((_group(range(4), 2, 64),)),
    "two lengths": KVCacheSpec((_group((0, 2, 4), 2, 64), _group((1, 3), 2, 64, window=64))),
    "fp8": KVCacheSpec((_group(range(3), 2, 48, "float8_e4m3fn"),)),
    "int8": KVCacheSpec((_group(range(3), 2, 48, **INT8),)),
    "latent": KVCacheSpec((_group(range(3), 1, 72, vectors=1),)),
    "mixed": KVCacheSpec((_group((0, 1, 3), 2, 32), _group((2,), 1, 64))),
    "mixed fp8": KVCacheSpec((_group((0, 1, 3), 2, 32, "float8_e4m3fn"), _group((2,), 1, 64, "float8_e4m3fn"))),
    "mixed int8": KVCacheSpec((_group((0, 1, 3), 2, 32, **INT8), _group((2,), 1, 64, **INT8))),
    "states": KVCacheSpec((_group((0, 3), 2, 32),), _STATES),
    "convolutions": KVCacheSpec((_group((0,), 2, 64),), StateGroupSpec((1, 2), channels=24, dtype="bfloat16")),
}


def numerics_of(backend: str) -> Numerics:
    """torch or triton on the CPU, or cuda."""
    device = torch.device("cuda", 0) if backend == "cuda" else torch.device("cpu")
    return Numerics(torch.float32, device, "torch" if backend == "torch" else "triton", False, False)


def keys_of(*names: object) -> bytes:
    return b"".join(hashlib.blake2b(repr(name).encode(), digest_size=16).digest() for name in names)


class CopiedCache:
    """A cache with random bytes, its copier, and the engine's view of the region."""

    def __init__(
        self,
        folder: Path,
        spec: KVCacheSpec,
        backend: str,
        *,
        num_blocks: int = 40,
        num_slots: int = 128,
        staging: int = 8,
        rank: int = 0,
        handles: Sequence[bytes] = (b"",),
        barrier=lambda: None,
    ) -> None:
        numerics, slot_bytes = numerics_of(backend), tier_slot_bytes(spec, SIZE)
        self.spec, self.device = spec, numerics.device
        # The engine's, and the runner's
        self.region, own = (
            Region.open(folder / "tier", repr(spec), num_slots, slot_bytes, len(handles)) for _ in range(2)
        )
        self.copier = copier_of(own, spec, repr(spec), rank, numerics)
        self.num_parts = self.copier.info.state_slots
        states = None if spec.states is None else StateCache(spec.states, 12, 4, numerics.device)
        self.cache = KVCache(spec, num_blocks, SIZE, numerics.device, states=states)
        self.num_blocks, self._numbers, self._step = num_blocks, 0, 0
        self.copier.open(self.cache, staging * slot_bytes, handles, barrier)
        self.copier.ready()
        self.fill(0)

    def memory(self) -> list[torch.Tensor]:
        """All words of the cache."""
        found = {runs.words.data_ptr(): runs.words for group in range(len(self.spec.groups))
                 for runs in self.cache.runs(group)}  # fmt: skip
        states = [] if self.cache.states is None else [self.cache.states.rows.view(torch.int64).view(-1)]
        return [*found.values(), *states]

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for words in self.memory():
            words.copy_(torch.randint(-(2**63), 2**63 - 1, words.shape, generator=generator))

    def block(self, group: int, block: int) -> list[torch.Tensor]:
        """What kernels of the group's layers read in a block, or a state's row."""
        if group == STATE:
            return [self.cache.states.rows[block].clone()]
        found = []
        for layer in self.spec.groups[group].layers:
            values, scales, own = self.cache.layers[layer]
            at = block * self.cache.table_factors[own]
            found.append(values[:, :, at].clone().view(torch.uint8))
            if scales is not None and scales.dim() > 2:
                found.append(scales[:, at].clone().view(torch.uint8))
        return found

    def transfers(self, blocks: Sequence[tuple[int, int]], names: Sequence[object]) -> Transfers:
        """(group, block) of each name. A state takes several transfers, one for each part."""
        rows = [
            (group, block, part, (name, part))
            for (group, block), name in zip(blocks, names, strict=True)
            for part in range(self.num_parts if group == STATE else 1)
        ]
        groups, numbers, parts = (np.array([row[i] for row in rows], np.int32) for i in range(3))
        self._numbers += len(rows)
        own = np.arange(self._numbers - len(rows), self._numbers, dtype=np.int32)
        return Transfers(own, groups, numbers, parts, keys_of(*(row[3] for row in rows)))

    def start(self, stores: Transfers | None = None, loads: Transfers | None = None) -> None:
        if stores is not None:
            self.region.reserve(stores.keys, 0)
        self._step += 1
        with torch.inference_mode():
            self.copier.start(StepPlan(self._step, stores=stores, loads=loads))

    def ended(self, count: int) -> tuple[set[int], set[int], set[int]]:
        """Read results until `count` transfers have ended: the numbers of stored, loaded and damaged ones."""
        found: tuple[set[int], set[int], set[int]] = set(), set(), set()
        end = time.monotonic() + 60
        while sum(map(len, found)) < count:
            assert time.monotonic() < end, f"{found} of {count} transfers have ended"
            result = StepResult(0, np.zeros(0, np.int32))
            self.copier.report(result, wait=True)
            for numbers, own in zip(found, (result.stored, result.loaded, result.damaged), strict=True):
                assert not numbers & set(own.tolist())
                numbers |= set(own.tolist())
        return found

    def store(self, blocks: Sequence[tuple[int, int]], names: Sequence[object]) -> None:
        """Store blocks, and wait."""
        stores = self.transfers(blocks, names)
        self.start(stores=stores)
        assert self.ended(len(stores.numbers)) == (set(stores.numbers.tolist()), set(), set())

    def load(self, blocks: Sequence[tuple[int, int]], names: Sequence[object]) -> list[bool]:
        """Load blocks, and wait. Returns whether each has been loaded."""
        loads = self.transfers(blocks, names)
        self.start(loads=loads)
        stored, loaded, damaged = self.ended(len(loads.numbers))
        assert not stored
        assert loaded | damaged == set(loads.numbers.tolist())
        return [number in loaded for number in loads.numbers.tolist()]
