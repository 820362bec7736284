"""The image encoder of a GGUF model: a second file in its folder (mmproj), under Hugging Face names.

Metadata keys begin with `clip.`. A kind of projector is one entry in `_KINDS`."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from runtime.base.types import CallboardError
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_architectures import GgufModel, Source, read_gguf_model
from runtime.loading.sources.gguf_choice import image_encoders
from runtime.media.families import image_rule, rule_of
from runtime.media.rule import ImageRule
from runtime.models.towers.names import LIMITS, named, short_names
from runtime.models.towers.specs import tower_spec

logger = logging.getLogger(__name__)
Fields = dict[str, Any]

# Parameter of a TowerSpec -> GGUF's name
_NAMES = {
    "patch": "v.patch_embd", "positions": "v.position_embd.weight", "patch_norm": "v.pre_ln", "post_norm": "v.post_ln",
    "layers.{}.norm1": "v.blk.{}.ln1", "layers.{}.norm2": "v.blk.{}.ln2", "layers.{}.qkv": "v.blk.{}.attn_qkv",
    **{f"layers.{{}}.{part}": f"v.blk.{{}}.attn_{part}" for part in ("q", "k", "v", "out", "q_norm", "k_norm")},
    **{f"layers.{{}}.{part}": f"v.blk.{{}}.ffn_{part}" for part in ("gate", "up", "down")},
    "layers.{}.post_norm1": "v.blk.{}.attn_post_norm", "layers.{}.post_norm2": "v.blk.{}.ffn_post_norm",
}  # fmt: skip
_TOKENS = {  # key of a config.json -> the token's text in each family
    "image_token_id": ("<image>", "[IMG]", "<image_soft_token>", "<|image_pad|>", "<|image|>"),
    "boi_token_id": ("<start_of_image>", "<|image>"),
    "eoi_token_id": ("<end_of_image>", "<image|>"),
    "vision_start_token_id": ("<|vision_start|>",),
    "vision_end_token_id": ("<|vision_end|>",),
}


class _Kind(NamedTuple):
    architecture: str  # a class with a tower
    model_type: str
    texts: tuple[str, ...]  # architectures of its text models
    names: Mapping[str, str]  # the projector's parameters
    fields: Callable[[GgufFile, Fields], Fields]  # changes the vision_config; returns config.json's other fields


@dataclass(frozen=True, slots=True)
class GgufTower:
    """An image encoder's file."""

    model: GgufModel  # its config has what the text's config lacks
    model_type: str
    processor: Fields  # preprocessor_config.json's content

    @property
    def rule(self) -> ImageRule | None:
        """How a picture becomes pixels and tokens."""
        return rule_of(self.model.config | {"model_type": self.model_type}, self.processor)


def image_rule_of(path: Path) -> ImageRule | None:
    """Return the rule of a model's folder or GGUF file; None for a model that takes no images."""
    if path.is_dir():
        return image_rule(path)
    if not _encoders_near(path):
        return None  # without reading the model's file
    tower = find_tower(path, read_gguf_model(GgufFile(path)))
    return None if tower is None else tower.rule


def find_tower(path: Path, text: GgufModel) -> GgufTower | None:
    """Return the image encoder in a model's folder, or in the one above, that fits it; None without one.

    A damaged encoder is reported and not used, since the model still serves texts."""
    for file in _encoders_near(path):
        try:
            if tower := _fitting(GgufFile(file), text):
                return tower
            logger.info("%s is another model's image encoder, or of an unknown kind, and is not used", file.name)
        except CallboardError as e:
            logger.warning("The image encoder cannot be used: %s", e)
    return None


def _encoders_near(path: Path) -> list[Path]:
    """Return the image encoders in a model's folder, then those in the one above."""
    folders = path.parent, path.parent.parent
    return [folder / name for folder in folders for name in image_encoders(each.name for each in folder.glob("*.gguf"))]


def _fitting(file: GgufFile, text: GgufModel) -> GgufTower | None:
    kind, tokens = _KINDS.get(_projector(file)), _token_ids(text.file)
    width = file.value("clip.vision.projection_dim", int, text.config["hidden_size"])
    arch = text.file.value("general.architecture", str)
    fits = kind is not None and arch in kind.texts and width == text.config["hidden_size"]
    return _tower(file, kind, text, tokens) if kind and fits and "image_token_id" in tokens else None


def _projector(file: GgufFile) -> str:
    keys = "clip.projector_type", "clip.vision.projector_type"
    return next((file.value(key, str) for key in keys if key in file.metadata), "")


def _token_ids(file: GgufFile) -> Fields:
    tokens = {text: i for i, text in enumerate(file.value("tokenizer.ggml.tokens", list, []))}
    found = {key: [tokens[text] for text in texts if text in tokens] for key, texts in _TOKENS.items()}
    return {key: ids[0] for key, ids in found.items() if ids}


def _tower(file: GgufFile, kind: _Kind, text: GgufModel, tokens: Fields) -> GgufTower:
    def count(key: str) -> int:
        return file.value(f"clip.vision.{key}", int)

    vision = {
        "hidden_size": count("embedding_length"), "intermediate_size": count("feed_forward_length"),
        "num_hidden_layers": count("block_count"), "num_attention_heads": count("attention.head_count"),
        "patch_size": count("patch_size"), "image_size": count("image_size"),
        "layer_norm_eps": file.value("clip.vision.attention.layer_norm_epsilon", float),
    }  # fmt: skip
    fields = kind.fields(file, vision)
    classes = [*text.config["architectures"], kind.architecture]
    config = text.config | fields | tokens | {"architectures": classes, "vision_config": vision}
    processor = {
        key: value for key in ("image_mean", "image_std") if (value := file.metadata.get(f"clip.vision.{key}"))
    }
    return GgufTower(GgufModel(file, config, _sources(file, kind, config)), kind.model_type, processor)


def _sources(file: GgufFile, kind: _Kind, config: Fields) -> dict[str, Source]:
    """Map the tensors by their Hugging Face names."""
    spec = tower_spec(config)
    assert spec is not None
    names, sources = {**_NAMES, **kind.names}, dict[str, Source]()
    up = file.tensors.get("v.blk.0.ffn_up.weight")
    if not spec.gated and up is not None and up.shape[0] == spec.hidden_size != spec.ffn_size:  # older converters
        names |= {"layers.{}.up": names["layers.{}.down"], "layers.{}.down": names["layers.{}.up"]}
    for parameter, name in short_names(spec).items():
        stored = named(names, parameter, spec.deepstack)
        if stored not in file.tensors:
            raise CallboardError(f"{file.path} has no tensor {stored!r}; the file is incomplete.")
        is_turned = spec.rope == "interleaved" and re.search(r"\.[qk]\.", parameter) is not None
        sources[name] = Source(
            file.tensors[stored],
            interleaved_heads=spec.num_heads if is_turned else 0,
            plus_one=parameter == "soft_norm.weight",
        )
        others = {f"{name}.1": f"{stored}.1"}  # a frame
        others |= {
            name.removesuffix("linear.weight") + limit: stored.removesuffix("weight") + limit for limit in LIMITS
        }
        sources |= {theirs: Source(file.tensors[ours]) for theirs, ours in others.items() if ours in file.tensors}
    return sources


def _idefics3(file: GgufFile, vision: Fields) -> Fields:
    return {"scale_factor": file.value("clip.vision.projector.scale_factor", int)}


def _pixtral(file: GgufFile, vision: Fields) -> Fields:
    vision["hidden_act"] = "silu" if file.value("clip.use_silu", bool, False) else "gelu"
    return {"spatial_merge_size": file.value("clip.vision.spatial_merge_size", int, 2)}


def _gemma3(file: GgufFile, vision: Fields) -> Fields:
    merge = file.value("clip.vision.projector.scale_factor", int, 4)
    return {"mm_tokens_per_image": (vision["image_size"] // vision["patch_size"] // merge) ** 2}


def _gemma4(file: GgufFile, vision: Fields) -> Fields:
    vision |= {
        "rms_norm_eps": vision["layer_norm_eps"],
        "num_key_value_heads": vision["num_attention_heads"],
        "head_dim": _shape(file, "v.blk.0.attn_q.weight")[0] // vision["num_attention_heads"],
        "pooling_kernel_size": file.value("clip.vision.projector.scale_factor", int, 3),
        "position_embedding_size": _shape(file, "v.position_embd.weight")[1],
        "use_clipped_linears": "v.blk.0.attn_q.input_min" in file.tensors,
        "standardize": "v.std_bias" in file.tensors,
    }
    return {}


def _qwen3_vl(file: GgufFile, vision: Fields) -> Fields:
    layers = file.value("clip.vision.is_deepstack_layers", list, [])
    vision |= {
        "spatial_merge_size": file.value("clip.vision.spatial_merge_size", int, 2),
        "num_position_embeddings": _shape(file, "v.position_embd.weight")[0],
        "deepstack_visual_indexes": [i for i, has_merger in enumerate(layers) if has_merger],
    }
    return {}


def _glm4v(file: GgufFile, vision: Fields) -> Fields:
    vision |= {
        "rms_norm_eps": vision["layer_norm_eps"],
        "intermediate_size": _shape(file, "mm.up.weight")[0],
        "out_hidden_size": _shape(file, "v.blk.0.ffn_up.weight")[0],
        "attention_bias": "v.blk.0.attn_qkv.bias" in file.tensors,
        "spatial_merge_size": file.value("clip.vision.spatial_merge_size", int, 2),
    }
    return {}


def _lfm2(file: GgufFile, vision: Fields) -> Fields:
    vision["num_patches"] = _shape(file, "v.position_embd.weight")[0]
    return {
        "downsample_factor": file.value("clip.vision.projector.scale_factor", int, 2),
        "projector_hidden_size": _shape(file, "mm.1.weight")[0],
        "projector_use_layernorm": "mm.input_norm.weight" in file.tensors,
    }


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    if name not in file.tensors:
        raise CallboardError(f"{file.path} has no tensor {name!r}; the file is incomplete.")
    return file.tensors[name].shape


_KINDS = {  # key: clip.projector_type
    "idefics3": _Kind(
        "Idefics3ForConditionalGeneration", "idefics3", ("llama",), {"projection": "mm.model.fc"}, _idefics3
    ),
    "pixtral": _Kind(
        "Mistral3ForConditionalGeneration",
        "mistral3",
        ("llama", "mistral3"),
        {"norm": "mm.input_norm", "merging": "mm.patch_merger", "linear_1": "mm.1", "linear_2": "mm.2"},
        _pixtral,
    ),
    "gemma3": _Kind(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        ("gemma3",),
        {"soft_norm": "mm.soft_emb_norm", "projection.weight": "mm.input_projection.weight"},
        _gemma3,
    ),
    "gemma4v": _Kind(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        ("gemma4",),
        {"standard.bias": "v.std_bias", "standard.weight": "v.std_scale", "projection": "mm.input_projection"},
        _gemma4,
    ),
    "glm4v": _Kind(
        "Glm4vForConditionalGeneration",
        "glm4v",
        ("glm4", "glm4moe"),
        {
            "patch_norm": "v.norm_embd",
            "downsample": "mm.patch_merger",
            "projection": "mm.model.fc",
            "norm": "mm.post_norm",
            **{f"merger.{part}": f"mm.{part}" for part in ("gate", "up", "down")},
        },
        _glm4v,
    ),
    "lfm2": _Kind(
        "Lfm2VlForConditionalGeneration",
        "lfm2_vl",
        ("lfm2", "lfm2moe"),
        {"norm": "mm.input_norm", "linear_1": "mm.1", "linear_2": "mm.2"},
        _lfm2,
    ),
    "qwen3vl_merger": _Kind(
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        ("qwen3vl", "qwen35", "qwen35moe"),
        {
            "norm": "v.post_ln",
            "linear_fc1": "mm.0",
            "linear_fc2": "mm.2",
            "deepstack.{}.norm": "v.deepstack.{}.norm",
            "deepstack.{}.linear_fc1": "v.deepstack.{}.fc1",
            "deepstack.{}.linear_fc2": "v.deepstack.{}.fc2",
        },
        _qwen3_vl,
    ),
}
