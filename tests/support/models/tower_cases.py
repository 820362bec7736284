"""A tiny random image model of every family, saved by transformers, and the features that it gives for pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from runtime.base.images import Image
from runtime.base.model.tower_spec import TowerSpec
from tests.support.models.family_cases import _BASE, _DELTA, random_model, yarn

Pictures = Sequence[NDArray[np.uint8]]  # [height, width, 3] each
Inputs = dict[str, torch.Tensor]
IMAGE = 150  # the token of an embedding; it is never generated
_VIT = {"hidden_size": 48, "intermediate_size": 68, "num_hidden_layers": 3, "num_attention_heads": 2}
_TEXT = _BASE | {"vocab_size": 200}


def _normalized(spec: TowerSpec, pictures: Pictures) -> list[torch.Tensor]:
    """[3, height, width] of each picture."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (spec.mean, spec.std))
    return [(torch.tensor(picture).permute(2, 0, 1) / 255 - mean) / std for picture in pictures]


def _pixtral(spec: TowerSpec, pictures: Pictures) -> Inputs:
    sizes = torch.tensor([picture.shape[:2] for picture in pictures])
    return {"pixel_values": torch.stack(_normalized(spec, pictures)), "image_sizes": sizes}


def _idefics3(spec: TowerSpec, pictures: Pictures) -> Inputs:
    return {"pixel_values": torch.stack(_normalized(spec, pictures))[None]}


def _gemma3(spec: TowerSpec, pictures: Pictures) -> Inputs:
    return {"pixel_values": torch.stack(_normalized(spec, pictures))}


def _patches(spec: TowerSpec, picture: torch.Tensor) -> torch.Tensor:
    """[rows, columns, 3, side, side] of [3, height, width]."""
    side = spec.patch_size
    return picture.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)


def _padded(spec: TowerSpec, pictures: Pictures) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """[pictures, most patches, side * side * 3], and each picture's patches."""
    found = [_patches(spec, picture) for picture in _normalized(spec, pictures)]
    flat = [patches.permute(0, 1, 3, 4, 2).flatten(2).flatten(0, 1) for patches in found]
    return torch.nn.utils.rnn.pad_sequence(flat, batch_first=True), found


def _gemma4(spec: TowerSpec, pictures: Pictures) -> Inputs:
    values, found = _padded(spec, pictures)
    places = torch.full((*values.shape[:2], 2), -1)
    for own, patches in zip(places, found, strict=True):
        rows, columns = torch.meshgrid(*(torch.arange(n) for n in patches.shape[:2]), indexing="ij")
        own[: rows.numel()] = torch.stack((columns, rows), -1).flatten(0, 1)
    return {"pixel_values": values, "image_position_ids": places}


def _lfm2(spec: TowerSpec, pictures: Pictures) -> Inputs:
    values, found = _padded(spec, pictures)
    shapes = torch.tensor([patches.shape[:2] for patches in found])
    mask = torch.arange(values.shape[1]) < shapes.prod(1)[:, None]
    return {"pixel_values": values, "spatial_shapes": shapes, "pixel_attention_mask": mask.long()}


def _qwen(spec: TowerSpec, pictures: Pictures) -> Inputs:
    values, grids, merge = [], [], spec.merge
    for picture in _normalized(spec, pictures):
        patches = _patches(spec, picture)
        grouped = patches.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2).flatten(0, 3)
        values.append(grouped[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1))
        grids.append([1, *patches.shape[:2]])
    return {"pixel_values": torch.cat(values), "image_grid_thw": torch.tensor(grids)}


@torch.no_grad()
def features(model: Any, inputs: Inputs) -> torch.Tensor:
    """The embeddings that transformers gives for images."""
    found = model.model.get_image_features(**inputs)
    pooled, deepstack = found.pooler_output, getattr(found, "deepstack_features", None) or ()
    joined = torch.cat(tuple(part.view(-1, part.shape[-1]) for part in pooled))
    return torch.cat((joined, *(torch.cat(tuple(layer)) for layer in deepstack)), 1)


class TowerCase(NamedTuple):
    """A family's tiny model."""

    kind: str  # transformers' class for configurations
    config: dict[str, Any]
    inputs: Callable[[TowerSpec, Pictures], Inputs]  # what transformers gets
    sizes: tuple[tuple[tuple[int, int], ...], ...]  # images as their pictures' (height, width)
    architecture: str = ""  # if not the kind's

    @property
    def model_class(self) -> Any:
        """transformers' class for the model."""
        return getattr(transformers, self.architecture or self.kind.replace("Config", "ForConditionalGeneration"))


_TILES = (((64, 64),), ((64, 64),) * 3)
_IDEFICS3 = {
    "text_config": _TEXT | {"model_type": "llama", "pad_token_id": 0},
    "vision_config": _VIT | {"image_size": 64, "patch_size": 8},
    "scale_factor": 4,
    "image_token_id": 150,
    "pad_token_id": 0,
}
_SECTIONS = {
    "head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2], "mrope_interleaved": True,
        "partial_rotary_factor": 1.0,
    },
}  # fmt: skip
_QWEN_VIT = {
    "hidden_size": 48, "intermediate_size": 68, "depth": 4, "num_heads": 2, "patch_size": 4, "out_hidden_size": 60,
    "num_position_embeddings": 64,
}  # fmt: skip
_GLM_VIT = {
    "hidden_size": 48, "intermediate_size": 68, "depth": 3, "num_heads": 2, "patch_size": 4, "out_hidden_size": 60,
    "image_size": 24,
}  # fmt: skip
_GLM_TEXT = _TEXT | {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 1], "partial_rotary_factor": 0.8,
    },
}  # fmt: skip
_QWEN_SIZES = (((8, 8),), ((40, 24),), ((16, 88),), ((32, 32),))
_GEMMA4_VIT = _VIT | {"patch_size": 4, "head_dim": 16, "num_key_value_heads": 2, "position_embedding_size": 40}
_GEMMA4_TEXT = _TEXT | {"hidden_size_per_layer_input": 0, "num_hidden_layers": 2, "vocab_size_per_layer_input": 200}
_PIXTRAL = _VIT | {"model_type": "pixtral", "patch_size": 6, "image_size": 120, "head_dim": 24}
CASES = {
    "mistral3": TowerCase(
        "Mistral3Config",
        {
            "text_config": _TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": _PIXTRAL | {"hidden_act": "silu"},
            "image_token_index": 150,
        },
        _pixtral,
        (((24, 12),), ((60, 36),), ((24, 108),)),
    ),
    "ministral3": TowerCase(
        "Mistral3Config",
        {
            "text_config": _TEXT | {"model_type": "ministral3"} | yarn(llama_4_scaling_beta=0.1),
            "vision_config": _PIXTRAL | {"rope_parameters": {"rope_type": "axial", "rope_theta": 50.0}},
            "image_token_index": 150,
            "multimodal_projector_bias": True,
            "vision_feature_layer": -2,
            "spatial_merge_size": 3,
        },
        _pixtral,
        (((18, 36),), ((54, 18),)),
    ),
    "qwen3.5": TowerCase(
        "Qwen3_5Config",
        {"text_config": _TEXT | _DELTA | _SECTIONS, "vision_config": _QWEN_VIT, "image_token_id": 150},
        _qwen,
        _QWEN_SIZES,
    ),
    "qwen3-vl": TowerCase(
        "Qwen3VLConfig",
        {
            "text_config": _TEXT | _SECTIONS,
            "vision_config": _QWEN_VIT | {"deepstack_visual_indexes": [0, 2]},
            "image_token_id": 150,
        },
        _qwen,
        _QWEN_SIZES,
    ),
    "qwen3-vl, experts": TowerCase(
        "Qwen3VLMoeConfig",
        {
            "text_config": _TEXT
            | _SECTIONS
            | {"moe_intermediate_size": 28, "num_experts": 9, "num_experts_per_tok": 3},
            "vision_config": _QWEN_VIT | {"deepstack_visual_indexes": [1]},
            "image_token_id": 150,
        },
        _qwen,
        _QWEN_SIZES,
    ),
    "glm4v": TowerCase(
        "Glm4vConfig",
        {"text_config": _GLM_TEXT, "vision_config": _GLM_VIT, "image_token_id": 150},
        _qwen,
        _QWEN_SIZES,
    ),
    "glm4v, experts": TowerCase(
        "Glm4vMoeConfig",
        {
            "text_config": _GLM_TEXT | {"moe_intermediate_size": 28, "n_routed_experts": 9, "num_experts_per_tok": 3},
            "vision_config": _GLM_VIT | {"attention_bias": True, "spatial_merge_size": 3},
            "image_token_id": 150,
        },
        _qwen,
        (((12, 36),), ((24, 60),)),
    ),
    "gemma3": TowerCase(
        "Gemma3Config",
        {
            "text_config": _TEXT,
            "vision_config": _VIT | {"image_size": 48, "patch_size": 4},
            "mm_tokens_per_image": 9,
            "image_token_index": 150,
        },
        _gemma3,
        (((48, 48),),),
    ),
    "gemma4": TowerCase(
        "Gemma4Config",
        {"text_config": _GEMMA4_TEXT, "vision_config": _GEMMA4_VIT, "image_token_id": 150},
        _gemma4,
        (((12, 12),), ((36, 60),), ((24, 108),)),
    ),
    "gemma4, inputs": TowerCase(  # layers have inputs, and see whole images
        "Gemma4Config",
        {
            "text_config": _GEMMA4_TEXT | {"hidden_size_per_layer_input": 8, "use_bidirectional_attention": "vision"},
            "vision_config": _GEMMA4_VIT,
            "image_token_id": 150,
        },
        _gemma4,
        (((36, 24),),),
    ),
    "gemma4, clipped": TowerCase(
        "Gemma4Config",
        {
            "text_config": _GEMMA4_TEXT,
            "vision_config": _GEMMA4_VIT | {"use_clipped_linears": True, "standardize": True, "pooling_kernel_size": 2},
            "image_token_id": 150,
        },
        _gemma4,
        (((16, 40),),),
    ),
    "lfm2": TowerCase(
        "Lfm2VlConfig",
        {
            "text_config": _TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
            "vision_config": _VIT | {"patch_size": 4, "num_patches": 36},
            "image_token_id": 150,
            "projector_hidden_size": 44,
        },
        _lfm2,
        (((24, 24),), ((16, 16), (16, 16), (40, 8)), ((64, 32),)),
    ),
    "lfm2, no norm": TowerCase(
        "Lfm2VlConfig",
        {
            "text_config": _TEXT | {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]},
            "vision_config": _VIT | {"patch_size": 4, "num_patches": 36},
            "image_token_id": 150,
            "projector_use_layernorm": False,
        },
        _lfm2,
        (((16, 40),),),
    ),
    "internvl": TowerCase(
        "InternVLConfig",
        {
            "text_config": _TEXT | {"model_type": "qwen2"},
            "vision_config": _VIT | {"image_size": [32, 32], "patch_size": [4, 4], "norm_type": "layer_norm"},
            "image_token_id": 150,
        },
        _gemma3,
        (((32, 32),), ((32, 32),) * 3),
    ),
    "smolvlm": TowerCase("SmolVLMConfig", _IDEFICS3, _idefics3, _TILES),
    "idefics3": TowerCase("Idefics3Config", _IDEFICS3 | {"scale_factor": 2}, _idefics3, _TILES),
}


def save_tower_model(folder: Path, case: str) -> Any:
    """The checkpoint of a random model."""
    kind = CASES[case]
    model = random_model(kind.model_class, getattr(transformers, kind.kind)(**kind.config))
    for name, buffer in model.named_buffers():
        if name.endswith(("input_min", "output_min", "input_max", "output_max")):
            buffer.fill_(0.5 if name.endswith("max") else -0.4)
        elif name.endswith(("std_bias", "std_scale")):
            buffer.copy_(torch.randn_like(buffer))
    model.get_output_embeddings().weight.data[IMAGE] = 0.0
    model.save_pretrained(folder)
    if kind.kind == "Qwen3VLMoeConfig":  # as published; transformers saves them the other way
        _transpose_experts(folder / "model.safetensors")
    return model


def _transpose_experts(path: Path) -> None:
    tensors = load_file(path)
    turned = {name: x.mT.contiguous() if "experts" in name else x for name, x in tensors.items()}
    save_file(turned, path, {"format": "pt"})


def random_image(sizes: Sequence[tuple[int, int]], seed: int) -> tuple[Image, Pictures]:
    """An image of random pixels."""
    generator = np.random.default_rng(seed)
    pictures = [generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in sizes]
    return Image(bytes([seed]) * 16, tuple(sizes), b"".join(p.tobytes() for p in pictures)), pictures
