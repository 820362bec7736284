"""Rules read from a model folder's files."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from runtime.base.types import CallboardError
from runtime.media.families import _FAMILIES, image_rule
from runtime.media.resize import Area
from tests.media.support import SIZES, rule

CONFIG = {"model_type": "qwen3_5", "image_token_id": 99, "vision_config": {"patch_size": 16}}


def write(folder: Path, **files: Any) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_a_folder_without_a_tower_has_no_rule(tmp_path):
    assert image_rule(tmp_path) is None
    assert image_rule(tmp_path / "model.gguf") is None
    for config in (
        {},
        {"model_type": "qwen3"},
        {"model_type": "qwen3_5"},
        {"model_type": "gemma3", "vision_config": None},
    ):
        assert image_rule(write(tmp_path, config=config)) is None


def test_numbers_are_the_files(tmp_path):
    write(tmp_path, config=CONFIG, preprocessor_config={"image_mean": [0.1] * 3, "size": {"shortest_edge": 2048}})
    found = image_rule(tmp_path)
    assert found is not None
    assert (found.token_id, found.marks.mark, found.unit, found.resample) == (99, 99, 32, 3)
    assert (found.mean, found.std) == ((0.1,) * 3, (0.5,) * 3)
    assert found.resize == Area(32, 2048, 16_777_216)
    write(tmp_path, processor_config={"image_processor": {"image_std": [0.2] * 3, "image_mean": None}})
    changed = image_rule(tmp_path)
    assert changed is not None
    assert (changed.std, changed.resize) == ((0.2,) * 3, found.resize)


@pytest.mark.parametrize("model_type", sorted(_FAMILIES))
def test_a_config_without_tokens_has_the_class_default(model_type: str):
    config = AutoConfig.for_model(model_type)
    assert rule(model_type).token_id == config.image_token_id


@pytest.mark.parametrize("max_tokens", [1280, 4096])
@pytest.mark.parametrize("model_type", sorted(_FAMILIES))
def test_a_reduced_size_is_not_reduced_again(model_type: str, max_tokens: int):
    """A client that scales a picture down to the longer side loses nothing more."""
    found, num_reduced = rule(model_type), 0
    for height, width in [*SIZES, (4000, 4000), (6000, 5000), (1000, 4000), (5000, 1200)]:
        plan = found.resize.plan((height, width), "auto", max_tokens)
        if (seen := plan.reduced((height, width), found.unit)) is not None:
            num_reduced += 1
            scale = max(seen) / max(height, width)
            assert scale < 1
            smaller = round(height * scale), round(width * scale)
            assert found.resize.plan(smaller, "auto", max_tokens).reduced(smaller, found.unit) is None
    assert num_reduced


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_broken_file_is_an_error_or_ignored(tmp_path, content: str):
    write(tmp_path, config=CONFIG, preprocessor_config=content)
    if content == "{":
        with pytest.raises(CallboardError, match=r"preprocessor_config\.json is not valid JSON"):
            image_rule(tmp_path)
    else:
        assert image_rule(tmp_path) is not None


def test_senseless_numbers_are_an_error(tmp_path):
    write(tmp_path, config={**CONFIG, "vision_config": {"patch_size": "large"}})
    with pytest.raises(CallboardError, match="describes no qwen3_5 images"):
        image_rule(tmp_path)


def test_rules_travel_to_the_child():
    for model_type in ("mistral3", "smolvlm", "qwen3_vl", "glm4v", "gemma3", "gemma4", "lfm2_vl", "internvl"):
        found = rule(model_type)
        assert pickle.loads(pickle.dumps(found)) == found
