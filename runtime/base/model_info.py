"""ModelInfo: what engine and fronts need to know about a loaded model."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.base.images import ImageInfo
from runtime.base.kv_cache_spec import KVCacheSpec
from runtime.base.model.pooling import Pooling
from runtime.base.weight_version import WeightVersion


@dataclass(frozen=True, slots=True)
class TierInfo:
    """A tier of KV blocks and states in host memory that outlives the engine. The runner describes it.

    A slot holds one rank's bytes of one block, or one part of a state."""

    folder: str  # the region's files
    layout: str  # what a slot's bytes mean; regions with other layouts are apart
    slot_bytes: int
    num_slots: int
    num_ranks: int = 1
    state_slots: int = 0  # slots of a state's snapshot; 0 for a model without states
    environment: bytes = b""  # digest of what changes bits but not the fingerprint: versions, device, threads
    host: str = ""  # the machine that has the folder


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """A head that drafts within the runner's steps."""

    kind: str
    most_drafts: int  # draft tokens of a round, at most
    step_us: tuple[tuple[int, float], ...] = ()  # (rows, time of one more draft token in each), measured at the start


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model for engine and fronts. The runner finds them once and sends them as plain data."""

    fingerprint: str  # hash of weights, numerics and the KV cache's layout: part of every block's identity (C5)
    vocab_size: int  # output head rows, padding included
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_kv_blocks: int  # block 0, the null block, included
    block_size: int  # tokens; max_model_len rounded up when kv_layout is contiguous
    dtype: str
    device: str
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    step_us: tuple[tuple[int, float], ...] = ()  # (tokens, time of such a decode step), measured at the start
    kv_cache: KVCacheSpec | None = None  # its groups; None for one group without a window, and no states
    num_states: int = 0  # state cache rows, the null row included: more than max_num_seqs; 0 without states
    weight_formats: str = "dense"  # the checkpoint's linear layer formats (runtime.quant), most frequent first
    latency_us: float = 0.0  # a step's overhead if the next one is not planned before it ends
    pooling: Pooling | None = None  # how it makes prompt vectors; None if it makes none
    makes_text: bool = True  # False without an output head
    can_sleep: bool = False  # value of sleep_mode
    weights: WeightVersion | None = None  # None without weight_updates
    routed_experts: tuple[int, int] | None = None  # layers with experts, and choices per token; None if not reported
    images: ImageInfo | None = None  # None for a model that takes no images
    tier: TierInfo | None = None  # None without a tier
    head: HeadInfo | None = None  # None if the runner drafts no tokens
