"""Chats about pictures, end to end on a CPU: a tiny random SmolVLM, in process and behind the front's endpoints."""

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from runtime.base.types import CallboardError, SamplingParams
from runtime.llm import LLM
from runtime.output.image_forms import file_of
from runtime.output.options import ChatOptions
from tests.support.http.fake_images import MARK_ID
from tests.support.models.tiny_images import tiny_tower, write_tiny_smolvlm
from tests.support.models.tower_cases import CASES

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


@torch.no_grad()
def test_embeddings_of_pictures_equal_transformers(folder: Path):
    llm = LLM(str(folder), device="cpu", dtype="float32", pooling="last")
    chats = [about(picture(1)), about(Image.fromarray(picture(1))), about(picture(2))]
    one, same, other = map(np.array, llm.embed(chats))
    assert np.array_equal(one, same)
    assert not np.allclose(one, other, atol=1e-4)
    assert np.allclose(llm.embed(chats[0])[0], one, atol=1e-5)
    ids, _, _, (span,) = llm._chat(chats[0], ChatOptions(add_generation_prompt=False))
    pixels = np.frombuffer(span.image.pixels, np.uint8)
    tiles = np.split(pixels, np.cumsum([3 * h * w for h, w in span.image.sizes])[:-1])
    pictures = [tile.reshape(*size, 3) for tile, size in zip(tiles, span.image.sizes, strict=True)]
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = CASES["smolvlm"].inputs(tiny_tower(8), pictures)
    want = theirs.model(input_ids=torch.tensor([ids]), **inputs).last_hidden_state[0, -1].numpy()
    assert one @ want / np.linalg.norm(want) > 0.999999
