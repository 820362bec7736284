"""Chats about pictures, end to end on a CPU: a tiny random SmolVLM, in process and behind the front's endpoints."""

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from runtime.base.types import CallboardError, SamplingParams
from runtime.llm import LLM
from runtime.output.image_forms import file_of
from tests.support.http.fake_engine import byte_tokenizer
from tests.support.http.fake_images import MARK, MARK_ID, TEMPLATE
from tests.support.models.family_cases import random_model
from tests.support.models.tower_cases import CASES

MARKS = MARK, "<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))
NUM_TOKENS = 4  # tokens of a tile with 64 x 64 pixels
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smolvlm")
    config = CASES["smolvlm"].config
    text = config["text_config"] | {"vocab_size": 320, "max_position_embeddings": 1024}
    config = config | {"text_config": text, "image_token_id": MARK_ID}
    random_model(CASES["smolvlm"].model_class, transformers.SmolVLMConfig(**config)).save_pretrained(path)
    byte_tokenizer(marks=MARKS)._backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    sizes = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    return path


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), device="cpu", dtype="float32")


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (50, 70, 3), np.uint8)


def about(*images: Any) -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [{"type": "text", "text": "What is this? "}, *parts]}]


def test_a_chat_sees_its_pictures(llm: LLM, tmp_path: Path):
    (tmp_path / "a.png").write_bytes(file_of("a", picture(1)))
    url = "data:image/png;base64," + base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    same = picture(1), Image.fromarray(picture(1)), str(tmp_path / "a.png"), url
    first, *others = llm.chat([about(image) for image in same], GREEDY)
    assert first.prompt_token_ids.count(MARK_ID) % NUM_TOKENS == 0 != first.prompt_token_ids.count(MARK_ID)
    assert not first.error
    assert all(other.token_ids == first.token_ids for other in others)
    two, swapped = llm.chat([about(picture(1), picture(2)), about(picture(2), picture(1))], GREEDY)
    assert two.prompt_token_ids == swapped.prompt_token_ids
    assert [lp.logprob for lp in two.logprobs] != [lp.logprob for lp in swapped.logprobs]


def test_a_model_without_its_encoder_refuses_pictures(folder: Path):
    with pytest.raises(CallboardError, match="takes no images here"):
        LLM(str(folder), device="cpu", dtype="float32", images="off").chat(about(picture(1)), GREEDY)
