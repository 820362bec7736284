"""The facts about a model and the memory that it takes, before it is loaded."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from runtime.base.config import EngineConfig
from runtime.base.model_info import ModelInfo
from runtime.base.shard import Shard
from runtime.loading.resolve import resolve, with_known_draft
from runtime.models.heads.quantized_head import quantized_head
from runtime.quant.at_load import quantized_at_load
from runtime.quant.model_formats import format_names
from runtime.worker.memory import plan_memory
from runtime.worker.runner import choose_numerics
from runtime.worker.sources import CheckpointSource, image_info

_PROCESSES_BYTES = 1 << 29  # an engine's processes besides the plan: interpreters and libraries


class Expected(NamedTuple):
    """A model before its first engine."""

    info: ModelInfo  # lacks a fingerprint
    num_bytes: int  # memory for one engine on a CPU; 0 if it computes on GPUs


def expected_model(config: EngineConfig, gpu: bool, most_bytes: int) -> Expected:
    """Plan a model on a machine with `most_bytes` for models; the weights are not read.

    Raises CallboardError with the sizes if it does not fit."""
    config = with_known_draft(config)
    own = replace(config, device="cpu", kernel_backend="auto") if gpu else config
    source = CheckpointSource(resolve(config.model, config.revision))
    numerics, size = choose_numerics(own), config.tensor_parallel_size
    first, head = Shard(0, size), source.head(config.draft, config.head_layers)
    layers = () if head is None else head.spec.layers
    spec = replace(quantized_at_load(source.spec, own, "cpu"), draft_layers=layers).of_rank(first)
    rank_head = None if head is None else quantized_head(head.spec, spec, own, numerics).for_rank(first)
    available = 1 << 62 if gpu else (most_bytes - _PROCESSES_BYTES) // size
    images = image_info(source, config.sized_for("cuda" if gpu else "cpu"))
    tower = None if images is None else source.tower
    plan = plan_memory(own.sized_for("cpu"), spec, numerics, available, tower, rank_head)
    num_bytes = plan.total * size + _PROCESSES_BYTES
    if config.has_draft_model:
        num_bytes += expected_model(config.draft_config(), gpu, most_bytes - num_bytes).num_bytes
    info = ModelInfo(
        fingerprint="",
        vocab_size=spec.whole.vocab_size,
        max_model_len=(config.max_model_len or spec.max_positions) if gpu else plan.max_model_len,
        eos_token_ids=source.eos_token_ids,
        num_kv_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        dtype=numerics.dtype_name,
        device="cuda" if gpu else "cpu",
        weight_formats=format_names(spec, numerics),
        makes_text=spec.makes_text,
        can_sleep=config.sleep_mode,
        pooling=source.pooling(config.pooling),
        images=images,
    )
    return Expected(info, 0 if gpu else num_bytes)
