"""The report of `callboard inspect`: a model's description, without its weights."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime.base.config import MTP, EngineConfig
from runtime.base.model.decoder_spec import DecoderSpec
from runtime.base.model.head_spec import HeadSpec
from runtime.base.model.latent_spec import LatentSpec
from runtime.base.model.tower_spec import TowerSpec
from runtime.base.shard import Shard
from runtime.base.types import CallboardError
from runtime.loading import folder
from runtime.loading.adapter_files import read_adapter
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_architectures import read_gguf_model
from runtime.loading.resolve import resolve, resolve_adapter, with_known_draft
from runtime.media.families import image_rule
from runtime.models import load_spec
from runtime.models.towers.specs import tower_spec
from runtime.models.weight_map import WeightMap
from runtime.quant.at_load import quantized_at_load
from runtime.text.chat import ChatTemplate, load_tokenizer
from runtime.text.sampling_defaults import SamplingDefaults
from runtime.text.tool_calls import name_of

if TYPE_CHECKING:
    from runtime.kernels.numerics import Numerics
    from runtime.loading.checkpoint import Checkpoint

_GIB = 1 << 30
_LABEL_WIDTH = 14
_SIDES = 512, 1024  # sides of example pictures, in pixels
_DTYPES = ("dtype", "torch_dtype")  # keys in a config.json


def model_report(config: EngineConfig) -> str:
    """Describe `config.model` and its use of this machine. A hub model's safetensors are not fetched.

    Raises CallboardError if the model does not exist or is not supported."""
    from runtime.loading.checkpoint import open_checkpoint  # torch loads here, not with the module
    from runtime.models.checkpoint_model import checkpoint_model, unused_tensors
    from runtime.models.weights import locate_parameters

    path = resolve(config.model, config.revision, weights=False)
    has_weights = path.is_file() or any(path.glob("*.safetensors"))
    checkpoint = open_checkpoint(path) if has_weights else None
    config_json = checkpoint.config if checkpoint else folder.model_config(path)
    spec, weight_map = checkpoint_model(config_json, checkpoint) if checkpoint else load_spec(config_json)
    dtypes = (part.get(key) for part in (config_json, config_json.get("text_config") or {}) for key in _DTYPES)
    stored, unused = f"{next(filter(None, dtypes), 'unknown')} by its config.json", []
    if checkpoint:
        found = unused_tensors(spec, weight_map, checkpoint, locate_parameters(spec, weight_map, checkpoint))
        unused += [_line("left out", found.known_line)] * bool(found.left_out)
        unused += [_line("not used", f"{len(found.unknown)} tensors: {found.unknown_line}")] * bool(found.unknown)
        types = Counter(checkpoint.type_name(name) for name in checkpoint.names())
        stored = ", ".join(f"{count} {kind}" for kind, count in types.most_common()) + " tensors"
    tower, no_images = _tower(config, config_json, checkpoint)
    head, head_line = _head(config, path, spec, weight_map, checkpoint or config_json)
    lines = [
        _line("model", config.model),
        _line("files", str(path)),
        _line("architecture", _architecture(config_json, spec)),
        _line("parameters", _parameters(spec)),
        _line("images", no_images or _images(config, tower, path)),
        *[_line("draft head", head_line)] * bool(head_line),
        _line("stored as", stored),
        *unused,
        _line("context", f"{spec.max_positions} tokens; {_positions(spec)}"),
        *_here(config, spec, checkpoint, None if no_images else tower, head),
        *_text(config, path),
    ]
    return "\n".join(lines)


def check_model(config: EngineConfig) -> None:
    """Fetch the model, and check that it supports `config`. Raises CallboardError if it does not.

    Reads only the model's description, without torch, in less than a second."""
    path = resolve(config.model, config.revision)
    spec = _spec_of(path)
    spec.check(config)
    quantized_at_load(spec, config)
    load_tokenizer(path, config)
    with_known_draft(config)
    SamplingDefaults.load(path, config.generation_config, config.model)
    for adapter in config.adapters.values():
        read_adapter(resolve_adapter(adapter)).check_rank(config.max_lora_rank)


def save_tokenizer(config: EngineConfig, target: Path) -> None:
    """Write the model's tokenizer to a folder that transformers reads. A hub model's weights are not fetched."""
    path = resolve(config.model, config.revision, weights=False)
    tokenizer = load_tokenizer(path, config)
    tokenizer.save(target, config.max_model_len or _spec_of(path).max_positions)


def _spec_of(path: Path) -> DecoderSpec:
    """Return the description of a model's decoder, without reading weights."""
    config = folder.model_config(path) if path.is_dir() else read_gguf_model(GgufFile(path)).config
    return load_spec(config)[0]


def _architecture(config: dict[str, Any], spec: DecoderSpec) -> str:
    mixers = sorted(spec.attentions.values(), key=lambda mixer: not mixer.window)  # with a window first
    first, last, num_shared = mixers[0], mixers[-1], sum(mixer.kv_source is not None for mixer in mixers)
    kv_text = f"{first.num_kv_heads} of keys and values"
    if isinstance(first, LatentSpec):
        kv_text = f"latents of {first.rank} and rotary keys of {first.rope_dim} numbers"
    if last.cached != first.cached:
        kv_text += f" (without a window {last.head_dim}, {last.num_kv_heads})"
    if num_shared:
        kv_text += f", which {num_shared} layers share"
    dense = [layer.ffn.size for layer in spec.layers if layer.ffn.experts is None]
    parts = [
        f"{spec.num_layers} layers",
        f"width {spec.hidden_size}",
        f"{spec.num_heads} heads of {first.head_dim}, {kv_text}",
        f"{'gated ' if spec.ffn.gated else ''}feed-forward {spec.ffn.size}",
        f"vocabulary {spec.vocab_size}{', tied' if spec.tied_head else ''}",
    ]
    if spec.layer_embed_size:
        parts.append(f"embeddings of layers of {spec.layer_embed_size}")
    if spec.experts:
        if spec.ffn.beside:
            parts[3] += f", beside one of {spec.ffn.beside}"
        if dense:
            parts[3] += f", of the first {len(dense)} layers {dense[0]}"
        shared = f", and {spec.experts.shared} for all tokens" if spec.experts.shared else ""
        parts.insert(4, f"{spec.experts.num_experts} experts, {spec.experts.top_k} a token{shared}")
    return f"{config['architectures'][0]}: {'; '.join(parts)}"


def _parameters(spec: DecoderSpec) -> str:
    sizes = {name: math.prod(shape) for name, shape in spec.shapes().items()}
    total = sum(sizes.values())
    if not spec.experts:
        return f"{total:,}"
    expert_size = sum(size for name, size in sizes.items() if ".experts." in name)
    active = total - expert_size + expert_size * spec.experts.choices // spec.experts.all_experts
    return f"{total:,}, of which a token meets {active:,}"


def _tower(
    config: EngineConfig, config_json: dict[str, Any], checkpoint: Checkpoint | None
) -> tuple[TowerSpec | None, str]:
    """Return the image encoder, and why the model takes no images; empty if it takes them."""
    from runtime.models.towers.tower_tensors import tower_tensors

    if (tower := tower_spec(config_json)) is None:
        return None, "none: the model takes no images"
    names = tower_tensors(checkpoint.names(), tower).values() if checkpoint else ()
    missing = [name for name in names if checkpoint and name not in checkpoint]
    if missing:
        return None, f"none: the files lack {len(missing)} tensors of the image encoder, such as {missing[0]}"
    return tower, "off (images)" if config.images == "off" else ""


def _images(config: EngineConfig, tower: TowerSpec | None, path: Path) -> str:
    """Describe the image encoder, and the tokens that a picture takes."""
    from runtime.worker.runner import choose_numerics

    assert tower is not None
    most = config.sized_for(choose_numerics(config).device.type).max_image_tokens
    assert most is not None
    parts = [f"{tower.num_layers} layers", f"width {tower.hidden_size}", f"{tower.num_heads} heads of {tower.head_dim}"]
    parts += [
        f"feed-forward {tower.ffn_size}",
        f"patches of {tower.patch_size} pixels",
        f"{tower.num_weights:,} parameters",
    ]
    if (rule := image_rule(path)) is not None:
        counts = [rule.num_embeddings(rule.resize.plan((side, side), "auto", most).parts) for side in _SIDES]
        parts += [f"{n} tokens for {side} x {side}" for side, n in zip(_SIDES, counts, strict=True)]
    return "; ".join(parts)


def _head(
    config: EngineConfig, path: Path, spec: DecoderSpec, weight_map: WeightMap, files: Checkpoint | dict[str, Any]
) -> tuple[HeadSpec | None, str]:
    """Return the head that `config.draft` names, for the plan, and the text about it or the checkpoint's own.

    `files` is the config.json where weights are not here. The text is empty without a head."""
    from runtime.models.heads.find import brings_head, checkpoint_head
    from runtime.models.heads.quantized_head import copy_bytes, quantized_head
    from runtime.quant.model_formats import weight_bytes
    from runtime.worker.runner import choose_numerics
    from runtime.worker.sources import CheckpointSource

    config_json, names = (files, ()) if isinstance(files, dict) else (files.config, files.names())
    config = with_known_draft(config)
    if not config.has_head and not brings_head(config_json, names, spec.num_layers, weight_map):
        return None, ""
    if isinstance(files, dict):
        return None, "by its config.json; the weights' files decide whether it runs"
    numerics, size = choose_numerics(config), config.tensor_parallel_size
    target = quantized_at_load(spec, config, numerics.device.type).of_rank(Shard(0, size))
    try:
        if config.draft == MTP or not config.has_head:
            found = checkpoint_head(config_json, files, "", spec, weight_map).spec
        else:
            source = CheckpointSource(path).head(config.draft, config.head_layers)
            assert source is not None, "`config.draft` names a head"
            found = source.spec
        rank = quantized_head(found, target, config, numerics).for_rank(Shard(0, size))
    except CallboardError as e:
        return None, f"none that runs. {e}"
    copied, parts = copy_bytes(rank.decoder, numerics), [found.kind]
    parts[0] += f", {sum(map(math.prod, found.decoder.shapes().values())):,} parameters"
    parts.append(f"{weight_bytes(rank.decoder, numerics) / _GIB:.2f} GiB on {'the device' if size == 1 else 'a rank'}")
    parts += [f"{copied / _GIB:.2f} GiB for a copy of the output head (draft_quantization)"] if copied else []
    parts += [f"reads the inputs of layers {', '.join(map(str, found.taps))} (draft_layers)"] if found.taps else []
    parts += [] if config.has_head else ["--draft mtp uses it"]
    return rank if config.has_head else None, "; ".join(parts)


def _positions(spec: DecoderSpec) -> str:
    if spec.learned_positions:
        return "learned positions"
    mixers = sorted(spec.attentions.values(), key=lambda mixer: mixer.window)  # without a window first
    rope = next((mixer.rope for mixer in mixers if mixer.rope.partial), mixers[0].rope)
    text = f"RoPE {rope.type}, base {rope.theta:g}"
    if num_bare := sum(not mixer.rope.partial for mixer in mixers):
        text += f", none in {num_bare} of {spec.num_layers} layers"
    if num_sliding := sum(mixer.window > 0 for mixer in mixers):
        text += f"; {num_sliding} of {spec.num_layers} layers see {mixers[-1].window} tokens"
    return text


def _here(
    config: EngineConfig,
    spec: DecoderSpec,
    checkpoint: Checkpoint | None,
    tower: TowerSpec | None,
    head: HeadSpec | None,
) -> list[str]:
    """Describe the model's use of this machine. Raises CallboardError if its weights cannot have the requested form."""
    from runtime.quant.model_formats import check_products
    from runtime.quant.report import weight_report
    from runtime.worker.memory import available_memory, plan_memory
    from runtime.worker.runner import choose_numerics

    numerics = choose_numerics(config)
    device = numerics.device.type
    spec = quantized_at_load(spec, config, device).of_rank(Shard(0, config.tensor_parallel_size))
    check_products(spec, numerics, config)
    spec = spec if head is None else replace(spec, draft_layers=head.layers)
    try:
        available = available_memory(numerics.device, config.gpu_memory_utilization)
        available = available // spec.shard.size if device == "cpu" else available
        plan = str(plan_memory(config.sized_for(device), spec, numerics, available, tower, head)).removeprefix(
            "memory plan: "
        )
    except CallboardError as e:
        plan = f"it does not fit. {e}"
    return [
        _line("dtype", f"{numerics.dtype_name} on {device}, {numerics.backend} kernels"),
        *(_line("" if i else "weights", line) for i, line in enumerate(weight_report(spec, numerics))),
        _line("KV cache", _kv_cache(config, spec, numerics, checkpoint)),
        _line("memory plan", plan if spec.shard.size == 1 else f"each of {spec.shard.size} ranks: {plan}"),
    ]


def _kv_cache(config: EngineConfig, spec: DecoderSpec, numerics: Numerics, checkpoint: Checkpoint | None) -> str:
    from runtime.models.kv_scales import has_kv_scales
    from runtime.worker.memory import planned_cache

    has_scales = checkpoint is not None and has_kv_scales(checkpoint)
    form = spec.kv_cache_form(config.kv_cache_dtype)
    stored = {"none": numerics.dtype_name, "int8": "int8 with a scale a token and head"}.get(form)
    if stored is None:
        stored = f"fp8 with {'the scales of the checkpoint' if has_scales else 'scale 1'}"
    all_bytes = spec.kv_cache(numerics.dtype_name, config.kv_cache_dtype).bytes_per_token
    planned = planned_cache(config, spec, numerics)
    lasting = sum(group.bytes_per_token for group in planned.groups if group.window is None)
    window = max(group.window or 0 for group in planned.groups)
    kept = "" if lasting == all_bytes else f"; beyond the last {window} tokens {lasting:,} bytes"
    if (states := planned.states) is not None:
        kept += f"; states of {len(states.layers)} layers, {states.bytes_per_state:,} bytes a request or snapshot"
    return f"{stored}, {all_bytes:,} bytes a token{kept}"


def _text(config: EngineConfig, path: Path) -> list[str]:
    """Describe the tokenizer and the default sampling, and quote the chat template."""
    tokenizer = load_tokenizer(path, config)
    ends = ", ".join(f"{i} {tokenizer.id_to_token(i)}" for i in tokenizer.eos_token_ids) or "none"
    begin = "none" if tokenizer.bos_token_id is None else f"{tokenizer.bos_token_id}"
    lines = [_line("tokenizer", f"{tokenizer.vocab_size} tokens; begin of text {begin}; ends {ends}")]
    lines.append(_line("sampling", str(SamplingDefaults.load(path, config.generation_config, config.model))))
    if tokenizer.chat_template is None:
        return [*lines, _line("chat template", "none: this model completes texts")]
    name = name_of(ChatTemplate.of(tokenizer).tool_format)
    tools = f"with tool calls ({name})" if name else "without tool calls"
    if name == "generic":
        tools += "; it describes none in a known format, so the system message does"
    return [*lines, _line("chat template", f"{tools}:"), tokenizer.chat_template.rstrip()]


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}} {text}"
