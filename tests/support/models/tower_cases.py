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
    "smolvlm": TowerCase("SmolVLMConfig", _IDEFICS3, _idefics3, _TILES),
    "idefics3": TowerCase("Idefics3Config", _IDEFICS3 | {"scale_factor": 2}, _idefics3, _TILES),
}


def save_tower_model(folder: Path, case: str) -> Any:
    """The checkpoint of a random model."""
    kind = CASES[case]
    model = random_model(kind.model_class, getattr(transformers, kind.kind)(**kind.config))
    model.save_pretrained(folder)
    return model


def random_image(sizes: Sequence[tuple[int, int]], seed: int) -> tuple[Image, Pictures]:
    """An image of random pixels."""
    generator = np.random.default_rng(seed)
    pictures = [generator.integers(0, 256, (height, width, 3), dtype=np.uint8) for height, width in sizes]
    return Image(bytes([seed]) * 16, tuple(sizes), b"".join(p.tobytes() for p in pictures)), pictures
