"""The memory plan: the memory that a model needs, computed from its spec before a weight is read."""

from __future__ import annotations

import os
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from runtime.base.config import EngineConfig
from runtime.base.kv_cache_spec import KVCacheSpec, StateGroupSpec
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.tower_spec import TowerSpec
from runtime.base.shard import NUM_LEAVES
from runtime.base.types import CallboardError
from runtime.kernels.attention.attention_torch import MAX_GATHERED
from runtime.kernels.attention.latent_expanded import MOST_EXPANDED
from runtime.kernels.attention.latent_torch import MAX_EXPANDED
from runtime.kernels.linear.lora import padded_rank
from runtime.kernels.numerics import Numerics
from runtime.kernels.sampling.penalties import NUM_TABLES
from runtime.models.heads.quantized_head import copy_bytes
from runtime.quant.model_formats import dequantized_copy_bytes, staged_bytes, weight_bytes
from runtime.worker.gpu.graph_runner import MAX_VERIFIED

_GIB = 1 << 30
MIN_LOGIT_ROWS = 64  # logits rows that a step has memory for, at least
_DEFAULT_CPU_KV = 1.0  # GiB
_MOST_SNAPSHOTS = 1024  # an eviction looks at all snapshots
_SNAPSHOT_SHARE = 0.25  # share of the KV cache's memory for state snapshots
_TILES_AT_ONCE = 8  # tiles that a GPU encodes at a time (models/towers/tower.py)
_LIBRARY_BYTES = 1 << 30  # libraries loaded later, and graph memory besides tensors
_STAGING_BYTES = 128 << 20  # a GPU's memory for blocks on their way to and from a tier
_STAGING_SHARE = 1 / 16  # the largest share of the KV cache's memory for it
_PAGE_BYTES = 4096  # a tier's slots have whole pages, so that a GPU's driver can pin them


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes in bytes, the KV cache's geometry, and the limits that the sizes hold for."""

    weights: int
    kv: int
    kv_cache: KVCacheSpec
    working: int  # the largest step's activations, logits and gathered KV
    states: int  # the state cache, snapshots included
    graphs: int  # the largest CUDA graph's working memory, which other steps do not use
    adapters: int  # room for max_loras adapters
    updates: int  # room for a second copy of the weights, if weight_updates on a GPU
    tower: int  # the image encoder's weights
    images: int  # the pool of embeddings, and what the largest image's encoding needs beyond `working`
    staging: int  # a GPU's memory for copies to and from a tier
    available: int
    block_size: int  # tokens
    num_kv_blocks: int  # block 0, the null block, included
    num_states: int  # state cache rows, the null row included; 0 without states
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    largest_context: int  # tokens that one request could have in the memory next to the weights
    feature_bytes: int = 0  # of a draft head, for each KV block

    def __str__(self) -> str:
        num_snapshots = self.num_states - 1 - self.max_num_seqs
        parts = [
            ("weights", self.weights, ""),
            ("KV cache", self.kv, f"{self.num_kv_blocks} blocks of {self.block_size} tokens, num_kv_blocks or "
             "kv_cache_memory"),
            ("working memory", self.working, "max_num_batched_tokens, max_num_seqs"),
            ("states", self.states, f"max_num_seqs; {num_snapshots} snapshots, snapshot_memory"),
            ("CUDA graphs", self.graphs, "prefill_graph_tokens"),
            ("adapters", self.adapters, "max_loras, max_lora_rank"),
            ("new weights", self.updates, "weight_updates"),
            ("image encoder", self.tower, "images"),
            ("images", self.images, "image_pool_tokens, max_image_tokens"),
            ("copies of the KV tier", self.staging, "kv_tier_memory"),
        ]  # fmt: skip
        needed = " + ".join(f"{name} {_gib(size)}{why and f' ({why})'}" for name, size, why in parts if size)
        return (
            f"memory plan: {needed} = {_gib(self.total)} of {_gib(self.available)} available; context "
            f"{self.max_model_len} tokens (max_model_len), at most {self.largest_context} would fit"
        )

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        parts = self.weights, self.kv, self.working, self.states, self.graphs, self.adapters, self.updates
        return sum(parts) + self.tower + self.images + self.staging

    def with_blocks(self, num_kv_blocks: int) -> MemoryPlan:
        """The plan with this number of blocks in the KV cache."""
        kv = self.kv_cache.total_bytes(num_kv_blocks, self.block_size) + num_kv_blocks * self.feature_bytes
        return replace(self, num_kv_blocks=num_kv_blocks, kv=kv)


def plan_memory(
    config: EngineConfig,
    spec: DecoderSpec,
    numerics: Numerics,
    available: int,
    tower: TowerSpec | None = None,
    head: HeadSpec | None = None,
) -> MemoryPlan:
    """Weights + KV + working memory; on a GPU the KV cache gets all remaining memory.

    `config` is `sized_for` a device, `tower` is the image encoder in use, and `head` drafts (a rank's spec). Raises
    CallboardError, with the flag to change, if they do not fit."""
    spec.check(config)
    max_num_seqs, max_num_tokens = config.max_num_seqs or 0, config.max_num_batched_tokens or 0
    assert max_num_seqs * max_num_tokens, "`config` is not sized for a device"
    weights, features = _weight_bytes(spec, head, numerics)
    kv_cache = planned_cache(config, spec, numerics)
    longest = (wanted := config.max_model_len) or spec.max_positions
    num_tokens = max_num_tokens if config.chunked_prefill else max(max_num_tokens, longest)
    working = _working_bytes(spec, numerics, num_tokens, max_num_seqs, longest)
    graphs = _graph_bytes(config, spec, numerics, max_num_tokens, max_num_seqs)
    adapters = _adapter_bytes(config, spec, numerics, num_tokens)
    encoder, images = _image_bytes(config, tower, numerics, working)
    updates = _update_bytes(config, spec, numerics, encoder)
    slot_bytes = tier_slot_bytes(kv_cache, config.block_size)
    staging = _staging_bytes(slot_bytes) if has_tier(config) and numerics.device.type == "cuda" else 0
    room = available - weights - working - graphs - adapters - updates - encoder - images - staging
    states, num_states = 0, 0
    if (state_spec := kv_cache.states) is not None:
        max_num_seqs = _seqs_with_states(state_spec, max_num_seqs, room)
        states = (max_num_seqs + 1) * (state_spec.bytes_per_state + state_spec.bytes_per_slot)
        num_states, room = max_num_seqs + 1, room - states
    budget = max(room, 0) if numerics.device.type == "cuda" else int(_DEFAULT_CPU_KV * _GIB) // spec.shard.size
    if config.kv_cache_memory is not None:
        budget = int(config.kv_cache_memory * _GIB)
    flag = "kv_cache_memory"
    if config.kv_cache_memory is None and budget > room:
        budget, flag = max(room, 0), "max_num_batched_tokens"
    if state_spec is not None and config.prefix_cache and config.kv_layout == "paged":
        num_snapshots = _num_snapshots(config.snapshot_memory, state_spec, budget, room)
        taken = num_snapshots * state_spec.bytes_per_state
        states, num_states, room = states + taken, num_states + num_snapshots, room - taken
        budget = budget - taken if config.snapshot_memory is None else min(budget, max(room, 0))
    if config.kv_layout == "contiguous":
        num_blocks = max_num_seqs + 1
        block_size = wanted or min(spec.max_positions, budget // (kv_cache.bytes_per_token * num_blocks))
        max_model_len = capacity = block_size
        largest = room // kv_cache.bytes_per_token - block_size
    else:
        block_bytes = kv_cache.bytes_per_block(block_size := config.block_size) + features
        context_blocks = kv_cache.most_blocks(longest, block_size, num_tokens)
        if wanted and config.kv_cache_memory is None:  # the default on a CPU grows for the context
            budget = max(budget, min(room, (context_blocks + 1) * block_bytes))
        fits = min(budget // block_bytes, max_num_seqs * context_blocks + 1)
        num_blocks = fits if config.num_kv_blocks is None else config.num_kv_blocks
        capacity = kv_cache.most_tokens(num_blocks - 1, block_size, num_tokens)
        max_model_len = wanted or min(spec.max_positions, capacity)
        largest = kv_cache.most_tokens(room // block_bytes - 1, block_size, num_tokens)
    kv = kv_cache.total_bytes(num_blocks, block_size) + num_blocks * features
    staging = min(staging, _staging_bytes(slot_bytes, kv))
    largest = max(min(spec.max_positions, largest), 0)
    limits = max_num_seqs, max_num_tokens, max_model_len
    sizes = weights, kv, kv_cache, working, states, graphs, adapters, updates, encoder, images
    plan = MemoryPlan(*sizes, staging, available, block_size, num_blocks, num_states, *limits, largest, features)
    _check_total(plan, "num_kv_blocks" if config.num_kv_blocks else flag)
    if max_model_len < 2 or capacity < max_model_len:
        raise CallboardError(
            f"The KV cache holds fewer than max_model_len tokens; raise {flag} or lower max_model_len: {plan}."
        )
    return plan


def _weight_bytes(spec: DecoderSpec, head: HeadSpec | None, numerics: Numerics) -> tuple[int, int]:
    """Bytes of the weights with a head's, and of the feature that a head keeps for each block."""
    own = weight_bytes(spec, numerics)
    if head is None:
        return own, 0
    weights = weight_bytes(head.decoder, numerics) + copy_bytes(head.decoder, numerics)
    return own + weights, head.block_width * numerics.dtype.itemsize


def _num_snapshots(asked: float | None, states: StateGroupSpec, budget: int, room: int) -> int:
    """The number of state snapshots in `asked` GiB, or in a share of the KV cache."""
    own = int(budget * _SNAPSHOT_SHARE) if asked is None else min(int(asked * _GIB), max(room, 0))
    return min(own // states.bytes_per_state, _MOST_SNAPSHOTS)


def has_tier(config: EngineConfig) -> bool:
    """True if the settings request a tier, which keeps blocks in the host's memory."""
    is_paged = config.prefix_cache and config.kv_layout == "paged" and config.block_size % 8 == 0
    return config.kv_tier_name is not None and config.kv_tier_memory != 0 and is_paged


def tier_slot_bytes(kv_cache: KVCacheSpec, block_size: int) -> int:
    """Bytes in a tier's slot, which holds any group's block."""
    return -(-kv_cache.bytes_per_block(block_size) // _PAGE_BYTES) * _PAGE_BYTES


def _staging_bytes(slot_bytes: int, kv: int | None = None) -> int:
    """Four equal parts, one for each copy that runs at a time. `kv` has the cache's bytes."""
    size = _STAGING_BYTES if kv is None else min(_STAGING_BYTES, int(kv * _STAGING_SHARE))
    return 4 * slot_bytes * max(1, size // (4 * slot_bytes))


def _check_total(plan: MemoryPlan, lower: str) -> None:
    """Raise CallboardError with the flag `lower`, or a room that can be left out, if the plan needs too much memory."""
    missing = plan.total - plan.available
    if missing <= 0:
        return
    lower = f"lower {lower}"
    if plan.updates >= missing:
        lower = f"serve without weight_updates, {lower}"
    elif plan.tower + plan.images >= missing:
        lower = f"serve with images=off, {lower}"
    raise CallboardError(
        f"Too little memory; {lower}, max_num_seqs or max_model_len, or take a narrower dtype: {plan}; "
        f"{_gib(missing)} are missing."
    )


def _seqs_with_states(states: StateGroupSpec, max_num_seqs: int, room: int) -> int:
    """A step's most requests. Their states take at most half the memory next to the weights."""
    return max(1, min(max_num_seqs, room // 2 // (states.bytes_per_state + states.bytes_per_slot) - 1))


def planned_cache(config: EngineConfig, spec: DecoderSpec, numerics: Numerics) -> KVCacheSpec:
    """A model's KV cache, or a rank's share. The longest request decides how its layers are grouped."""
    longest = 0 if config.kv_layout == "contiguous" else config.max_model_len or spec.max_positions
    return spec.kv_cache(numerics.dtype_name, config.kv_cache_dtype, longest)


def available_memory(device: torch.device, gpu_memory_utilization: float = 1.0) -> int:
    """Bytes that this process may still take. On a GPU: free memory less the share that must stay free. On a CPU: the
    memory that the kernel and the cgroup leave."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, free - int((1.0 - gpu_memory_utilization) * total))
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        limits.append(int(meminfo.read_text().split("MemAvailable:")[1].split()[0]) * 1024)
    group = Path("/sys/fs/cgroup")
    with suppress(OSError, ValueError):  # no cgroup v2 here, or no limit ("max")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(limits)


def resize_kv(plan: MemoryPlan, config: EngineConfig, room: int) -> MemoryPlan:
    """The plan with a KV cache for `room` bytes, the memory next to the largest step. Raises CallboardError if the plan
    needs more."""
    block_bytes = plan.kv_cache.bytes_per_block(plan.block_size) + plan.feature_bytes
    fits = (room - plan.graphs - plan.updates - plan.images - plan.staging) // block_bytes
    fixed = config.num_kv_blocks is not None or config.kv_cache_memory is not None or config.kv_layout == "contiguous"
    chunk = plan.max_num_batched_tokens if config.chunked_prefill else plan.max_model_len
    context_blocks = plan.kv_cache.most_blocks(plan.max_model_len, plan.block_size, chunk)
    num_blocks = plan.num_kv_blocks if fixed else min(fits, plan.max_num_seqs * context_blocks + 1)
    plan = replace(plan, num_kv_blocks=num_blocks, kv=num_blocks * block_bytes,
                   working=plan.available - plan.weights - plan.tower - plan.adapters - plan.states - room)  # fmt: skip
    if num_blocks > fits or num_blocks <= context_blocks:
        raise CallboardError(
            f"Too little GPU memory is left after the largest step; lower max_num_batched_tokens, max_num_seqs or "
            f"max_model_len, or raise gpu_memory_utilization: {plan}; "
            f"{_gib((max(num_blocks, context_blocks + 1) - fits) * block_bytes)} are missing."
        )
    return plan


def _working_bytes(spec: DecoderSpec, numerics: Numerics, tokens: int, max_num_seqs: int, max_model_len: int) -> int:
    """An upper bound for the largest step: one layer's activations and a dequantized weight, fp32 logits with three
    copies, token counts, gathered KV."""
    activations, size = _activation_bytes(spec, numerics, tokens), numerics.dtype.itemsize
    vocab_size = spec.whole.vocab_size  # ranks have parts until a row needs all
    logits = min(max(max_num_seqs, MIN_LOGIT_ROWS), tokens) * (spec.vocab_size + 3 * vocab_size) * 4
    if numerics.backend == "triton":
        expanded = 0 if spec.latent is None else 3 * MOST_EXPANDED * size
        return activations + logits + expanded + NUM_TABLES * vocab_size * 4
    attentions = spec.attentions.values()
    num_masks = 2 if any(mixer.window for mixer in attentions) else 1  # layers with a window have a second mask
    mask = min(tokens, max_model_len) * max_model_len * size * num_masks
    row = max(mixer.cached.num_kv_heads * mixer.cached.head_dim for mixer in attentions)
    gathered = max(max_model_len, MAX_GATHERED) * 2 * row * 4  # in fp32
    if spec.latent is not None:  # some heads' k and v, which are computed from latents
        head_size = spec.latent.expanded + spec.latent.head_dim
        gathered += max(MAX_EXPANDED, max_model_len * head_size) * 4
    return activations + logits + mask + 2 * gathered


def _graph_bytes(
    config: EngineConfig, spec: DecoderSpec, numerics: Numerics, max_num_tokens: int, max_num_seqs: int
) -> int:
    """Working memory for the largest CUDA graph, and for libraries."""
    if numerics.backend != "triton":
        return 0
    graph_tokens = min(config.prefill_graph_tokens, max_num_tokens) if config.cuda_graphs else 0
    num_gathered = spec.whole.vocab_size if spec.shard.size > 1 else 0  # filters take all ranks' logits
    graph_logits = max(max_num_seqs, MAX_VERIFIED) * (spec.vocab_size + num_gathered) * 4
    return _LIBRARY_BYTES + _activation_bytes(spec, numerics, graph_tokens) + graph_logits


def _adapter_bytes(config: EngineConfig, spec: DecoderSpec, numerics: Numerics, num_tokens: int) -> int:
    """Room for `max_loras` adapters, and their results in a step with `num_tokens`."""
    if not config.max_loras:
        return 0
    rank = padded_rank(config.max_lora_rank)
    maps = (parts.values() for layer in range(spec.num_layers) for parts in spec.adapted_linears(layer).values())
    sizes = (rank * (size_out + size_in) for shapes in maps for size_out, size_in in shapes)
    return config.max_loras * sum(sizes) * numerics.dtype.itemsize + 3 * rank * num_tokens * 4


def _update_bytes(config: EngineConfig, spec: DecoderSpec, numerics: Numerics, encoder: int) -> int:
    """A second copy of the weights, as a trainer sends them, and the largest layer while it is built.

    `encoder` has the bytes of the image encoder."""
    if not config.weight_updates or numerics.device.type != "cuda":
        return 0
    sizes = defaultdict[str, int](int)
    for parameter, num_bytes in staged_bytes(spec, numerics).items():
        sizes[".".join(parameter.split(".")[:2]) if parameter.startswith("layers.") else parameter] += num_bytes
    return sum(sizes.values()) + encoder + max(2 * max(sizes.values()), encoder)


def _image_bytes(config: EngineConfig, tower: TowerSpec | None, numerics: Numerics, working: int) -> tuple[int, int]:
    """The encoder's weights. The pool, and what the largest image's encoding needs beyond a step's working memory."""
    if tower is None:
        return 0, 0
    assert config.max_image_tokens is not None, "`config` is not sized for a device"
    patches, size = config.max_image_tokens * tower.merge**2, numerics.dtype.itemsize
    if tower.positions in ("learned", "buckets"):  # its pictures are one size; some are encoded at a time
        patches = min(patches, tower.position_shape[0] * (1 if numerics.device.type == "cpu" else _TILES_AT_ONCE))
    pixels = 3 * tower.patch_size**2
    elements = 8 * tower.hidden_size + 3 * tower.ffn_size  # compute dtype; others are float32
    encoding = patches * (elements * size + (4 * tower.hidden_size + 3 * pixels) * 4)
    pool = config.image_pool_tokens * tower.width * size
    return tower.num_weights * size, pool + max(0, encoding - working)


def _activation_bytes(spec: DecoderSpec, numerics: Numerics, tokens: int) -> int:
    attending = max(layer.mixer.activations for layer in spec.layers)
    ffn = 3 * max(layer.ffn.size for layer in spec.layers)
    if spec.experts is not None:  # each choice for a token has its own intermediate values and result
        beside = max(layer.ffn.beside for layer in spec.layers)
        ffn = max(3 * beside, spec.experts.choices * (ffn + 2 * spec.hidden_size))
    inputs = 2 * spec.num_layers * spec.layer_embed_size
    rows = tokens * (4 * spec.hidden_size + attending + ffn + inputs) * numerics.dtype.itemsize
    if numerics.rank_invariant:  # all leaves' results
        choices = 1 if spec.experts is None else 1 + spec.experts.choices
        rows += tokens * choices * NUM_LEAVES // spec.shard.size * spec.hidden_size * 4
    return rows + dequantized_copy_bytes(spec, numerics)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f} GiB"
