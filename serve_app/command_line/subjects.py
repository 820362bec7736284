"""The flags' subjects, as `--help=SUBJECT` shows them, with each subject's settings.

A setting without a subject in this table belongs to its class's subject in `HOME`."""

from __future__ import annotations

from typing import NamedTuple

from runtime.base.config import EngineConfig
from serve_app.settings import HttpSettings, ScalingSettings


class Subject(NamedTuple):
    """A subject's description, and the names of its settings."""

    about: str
    names: tuple[str, ...] = ()


SUBJECTS = {
    "model": Subject(
        "the model, its texts and its vectors",
        ("revision", "chat_template", "tool_call_parser", "channel_grammar", "plain_tool_calls",
         "special_tokens_in_contents", "generation_config", "pooling", "routed_experts"),
    ),
    "http": Subject("where the server listens, and what a request may hold"),
    "access": Subject(
        "which clients may use the server",
        ("api_key", "api_key_file", "allowed_host", "cors_origin", "client_priority", "allow_chaos"),
    ),
    "scaling": Subject("the number of engines and fronts", ("routing_policy",)),
    "device": Subject(
        "what the model runs on, and how steps are launched there",
        ("device", "tensor_parallel_size", "num_threads", "kernel_backend", "cuda_graphs", "prefill_graph_tokens",
         "packed_weights", "sleep_mode"),
    ),
    "quantization": Subject(
        "the forms of weights, of the KV cache and of numbers in between",
        ("quantization", "head_quantization", "dtype", "kv_cache_dtype", "cpu_activations"),
    ),
    "memory": Subject(
        "the context, the KV cache and their memory",
        ("max_model_len", "gpu_memory_utilization", "kv_cache_memory", "num_kv_blocks", "block_size", "kv_layout",
         "prefix_cache", "kv_tier_memory", "kv_tier_folder", "kv_tier_name"),
    ),
    "engine": Subject(
        "how requests share steps: policies, which change speed or memory, and tokens at most by rounding",
    ),
    "images": Subject("images in requests", ("images", "max_image_tokens", "image_pool_tokens")),
    "queue": Subject(
        "how long requests and steps may take, and how many requests may wait",
        ("max_queued_requests", "max_queued_tokens", "max_queued_bytes", "queue_timeout_s", "step_timeout_s",
         "request_timeout_s", "drain_timeout_s"),
    ),
    "exactness": Subject("the same bits under any load", ("deterministic", "rank_invariant")),
    "speculation": Subject(
        "draft tokens, several of which the model verifies in a step",
        ("draft", "num_draft_tokens", "draft_quantization", "draft_device", "draft_ahead", "draft_kv_cache_memory",
         "draft_shared", "draft_layers", "pinned_acceptance"),
    ),
    "adapters": Subject(
        "adapters (LoRA), which clients use as models",
        ("lora", "max_loras", "max_lora_rank", "lora_folder", "lora_on_demand"),
    ),
    "weights": Subject(
        "updates of the weights by a trainer, while the server runs",
        ("weight_updates", "trainer_timeout_s", "weight_store", "weight_folder"),
    ),
    "batches": Subject(
        "files and batches of requests",
        ("batch_folder", "batch_file_bytes", "batch_max_requests", "batch_concurrency", "batch_max_open",
         "batch_max_open_per_key", "batch_max_ended_per_key", "batch_max_files", "batch_max_files_per_key",
         "batch_max_bytes", "batch_max_bytes_per_key", "batch_max_uploads", "batch_max_uploads_per_key"),
    ),
    "stored": Subject(
        "stored answers, the request log and traces",
        ("response_store_bytes", "response_life_s", "recorded_request_bytes", "request_log", "otlp_traces_endpoint"),
    ),
    "sampling": Subject("how tokens are chosen"),
}  # fmt: skip

HOME = {EngineConfig: "engine", ScalingSettings: "scaling", HttpSettings: "http"}  # subjects of the other settings
