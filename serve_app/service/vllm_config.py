"""Facts about the engines by the names of vLLM's settings, which trainers read from /server_info."""

from __future__ import annotations

from typing import Any

from runtime.base.config import NGRAM, EngineConfig
from runtime.base.model_info import ModelInfo


def vllm_config(
    info: ModelInfo, config: EngineConfig, model: str, draft: str | None, num_engines: int
) -> dict[str, Any]:
    """Return a part of vLLM's configuration. `model` and `draft` are names for clients."""
    lora = {"max_lora_rank": config.max_lora_rank, "max_loras": config.max_loras} if config.max_loras else None
    drafts = {"method": "ngram" if draft == NGRAM else "draft_model", "model": draft}
    return {
        "model_config": {"model": model, "dtype": f"torch.{info.dtype}", "max_model_len": info.max_model_len},
        "parallel_config": {
            "tensor_parallel_size": config.tensor_parallel_size,
            "data_parallel_size": max(1, num_engines),
            "world_size": config.tensor_parallel_size,  # one engine's ranks
        },
        "lora_config": lora,
        "speculative_config": None if draft is None else drafts | {"num_speculative_tokens": config.num_draft_tokens},
        "weight_transfer_config": None if info.weights is None else {"backend": "nccl"},
    }
