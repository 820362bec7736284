"""The towers of families: a TowerSpec from a config.json, with transformers' defaults for keys that it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runtime.base.model.tower_spec import TowerSpec
from runtime.models.families.defaults import with_defaults
from runtime.models.towers.specs import gemma4, glm, parts, pixtral, qwen, siglip
from runtime.models.towers.specs.parts import Config


def takes_images(architecture: str) -> bool:
    """Return True if the family's models have an image encoder."""
    return architecture in TOWERS


def tower_spec(config: Config) -> TowerSpec | None:
    """Return the image encoder that a config.json describes; None for a model that takes no images.

    Raises CallboardError for a variant that is not supported."""
    named, vision = config.get("architectures"), config.get("vision_config")
    name = str(named[-1]) if isinstance(named, list) and named else ""  # a GGUF file's text is the first
    if name not in TOWERS or not isinstance(vision, Mapping):
        return None
    return TOWERS[name](config, parts.with_squares(vision), with_defaults(config, name))


TOWERS: dict[str, Callable[[Config, dict[str, Any], Config], TowerSpec]] = {
    "Gemma3ForConditionalGeneration": siglip.gemma3,
    "Gemma4ForConditionalGeneration": gemma4.gemma4,
    "Glm4vForConditionalGeneration": glm.glm4v,
    "Glm4vMoeForConditionalGeneration": glm.glm4v,
    "Idefics3ForConditionalGeneration": siglip.idefics3,
    "InternVLForConditionalGeneration": siglip.internvl,
    "Lfm2VlForConditionalGeneration": siglip.lfm2,
    "Mistral3ForConditionalGeneration": pixtral.mistral3,
    "Qwen3VLForConditionalGeneration": qwen.qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen.qwen3_vl,
    "Qwen3_5ForConditionalGeneration": qwen.qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen.qwen3_5,
    "SmolVLMForConditionalGeneration": siglip.idefics3,
}
