"""A tiny random image model of every family, saved by transformers, and the features that it gives for pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from runtime.base.images import Image
from runtime.base.model.tower_spec import TowerSpec
from tests.support.models.family_cases import _BASE, random_model, yarn

Pictures = Sequence[NDArray[np.uint8]]  # [height, width, 3] each
_VIT = {"hidden_size": 48, "intermediate_size": 68, "num_hidden_layers": 3, "num_attention_heads": 2}
_TEXT = _BASE | {"vocab_size": 200}


def _normalized(spec: TowerSpec, pictures: Pictures) -> list[torch.Tensor]:
    """[3, height, width] of each picture."""
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (spec.mean, spec.std))
    return [(torch.tensor(picture).permute(2, 0, 1) / 255 - mean) / std for picture in pictures]


def _pixtral(model: Any, spec: TowerSpec, pictures: Pictures) -> torch.Tensor:
    features = [
        model.model.get_image_features(x[None], image_sizes=torch.tensor([x.shape[1:]])).pooler_output[0]
        for x in _normalized(spec, pictures)
    ]
    return torch.cat(features)


def _idefics3(model: Any, spec: TowerSpec, pictures: Pictures) -> torch.Tensor:
    tiles = torch.stack(_normalized(spec, pictures))
    return torch.cat(tuple(model.model.get_image_features(tiles[None]).pooler_output))


def _gemma3(model: Any, spec: TowerSpec, pictures: Pictures) -> torch.Tensor:
    return model.model.get_image_features(torch.stack(_normalized(spec, pictures))).pooler_output.flatten(0, 1)


def _patches(spec: TowerSpec, picture: torch.Tensor) -> torch.Tensor:
    """[rows, columns, 3, side, side] of [3, height, width]."""
    side = spec.patch_size
    return picture.unfold(1, side, side).unfold(2, side, side).permute(1, 2, 0, 3, 4)


def _gemma4(model: Any, spec: TowerSpec, pictures: Pictures) -> torch.Tensor:
    features = []
    for picture in pictures:
        patches = _patches(spec, torch.tensor(picture).permute(2, 0, 1) / 255)
        rows, columns = torch.meshgrid(*(torch.arange(n) for n in patches.shape[:2]), indexing="ij")
        flat = patches.permute(0, 1, 3, 4, 2).flatten(2).flatten(0, 1)
        places = torch.stack((columns, rows), -1).flatten(0, 1)
        features += model.model.get_image_features(flat[None], places[None]).pooler_output
    return torch.cat(features)


def _lfm2(model: Any, spec: TowerSpec, pictures: Pictures) -> torch.Tensor:
    features = []
    for picture in _normalized(spec, pictures):
        patches = _patches(spec, picture)
        flat = patches.permute(0, 1, 3, 4, 2).flatten(2).flatten(0, 1)
        shape = torch.tensor([patches.shape[:2]])
        mask = torch.ones(1, len(flat), dtype=torch.int64)
        features += model.model.get_image_features(flat[None], shape, mask).pooler_output
    return torch.cat(features)


def _qwen(model: Any, spec: TowerSpec, pictures: Pictures) -> torch.Tensor:
    features = []
    for picture in _normalized(spec, pictures):
        patches = _patches(spec, picture)
        (rows, columns), merge = patches.shape[:2], spec.merge
        grouped = patches.unflatten(1, (-1, merge)).unflatten(0, (-1, merge)).transpose(1, 2).flatten(0, 3)
        frames = grouped[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1)
        found = model.model.get_image_features(frames, torch.tensor([[1, rows, columns]]))
        deepstack = getattr(found, "deepstack_features", None) or ()
        features.append(torch.cat((*found.pooler_output, *(layer[0] for layer in deepstack)), 1))
    return torch.cat(features)


class TowerCase(NamedTuple):
    """A family's tiny model."""

    kind: str  # transformers' class for configurations
    config: dict[str, Any]
    features: Callable[[Any, TowerSpec, Pictures], torch.Tensor]
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
_QWEN_VIT = {
    "hidden_size": 48, "intermediate_size": 68, "depth": 4, "num_heads": 2, "patch_size": 4, "out_hidden_size": 60,
    "num_position_embeddings": 64,
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
        "Qwen3_5Config", {"text_config": _TEXT, "vision_config": _QWEN_VIT, "image_token_id": 150}, _qwen, _QWEN_SIZES
    ),
    "qwen3-vl": TowerCase(
        "Qwen3VLConfig",
        {
            "text_config": _TEXT,
            "vision_config": _QWEN_VIT | {"deepstack_visual_indexes": [0, 2]},
            "image_token_id": 150,
        },
        _qwen,
        _QWEN_SIZES,
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
    model.save_pretrained(folder)
    return model


def random_image(sizes: Sequence[tuple[int, int]], seed: int) -> tuple[Image, Pictures]:
    """An image of random pixels."""
    generator = np.random.default_rng(seed)
    pictures = [generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in sizes]
    return Image(bytes([seed]) * 16, tuple(sizes), b"".join(p.tobytes() for p in pictures)), pictures
