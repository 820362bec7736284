"""Chats about pictures, end to end on a CPU: a tiny random SmolVLM, in process and behind the front's endpoints."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.base.types import CallboardError, SamplingParams
from runtime.llm import LLM
from runtime.output.image_forms import file_of
from tests.support.http.fake_images import MARK_ID
from tests.support.models.tiny_images import write_tiny_smolvlm

NUM_TOKENS = 4  # tokens of a tile with 64 x 64 pixels
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_smolvlm(tmp_path_factory.mktemp("smolvlm"))


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
