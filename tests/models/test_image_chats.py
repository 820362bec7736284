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


def inputs_of(llm: LLM, chat: list[dict[str, Any]], **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A chat's token ids and its picture, as transformers takes them."""
    ids, _, _, (span,) = llm._chat(chat, ChatOptions(**options))
    pixels = np.frombuffer(span.image.pixels, np.uint8)
    tiles = np.split(pixels, np.cumsum([3 * h * w for h, w in span.image.sizes])[:-1])
    pictures = [tile.reshape(*size, 3) for tile, size in zip(tiles, span.image.sizes, strict=True)]
    return torch.tensor([ids]), CASES["smolvlm"].inputs(tiny_tower(8), pictures)


def theirs_in(folder: Path) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def test_embeddings_of_pictures_equal_transformers(folder: Path):
    llm = LLM(str(folder), device="cpu", dtype="float32", pooling="last")
    chats = [about(picture(1)), about(Image.fromarray(picture(1))), about(picture(2))]
    one, same, other = map(np.array, llm.embed(chats))
    assert np.array_equal(one, same)
    assert not np.allclose(one, other, atol=1e-4)
    assert np.allclose(llm.embed(chats[0])[0], one, atol=1e-5)
    ids, inputs = inputs_of(llm, chats[0], add_generation_prompt=False)
    want = theirs_in(folder).model(input_ids=ids, **inputs).last_hidden_state[0, -1].numpy()
    assert one @ want / np.linalg.norm(want) > 0.999999


@pytest.mark.parametrize("penalty", [1.0, 99.0])
@torch.no_grad()
def test_repetition_penalty_counts_image_tokens(llm: LLM, folder: Path, penalty: float):
    """The prompt's tokens of an image are repeated tokens, as for transformers. The bias makes the token probable."""
    bias = 30.0
    params = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, repetition_penalty=penalty, logit_bias=((MARK_ID, bias),)
    )
    (answer,) = llm.chat([about(picture(1))], params)
    ids, inputs = inputs_of(llm, about(picture(1)))
    want = theirs_in(folder).generate(
        input_ids=ids, **inputs, do_sample=False, max_new_tokens=8, repetition_penalty=penalty,
        sequence_bias={(MARK_ID,): bias},
    )  # fmt: skip
    assert answer.token_ids == want[0, ids.shape[1] :].tolist()
    assert (MARK_ID in answer.token_ids) == (penalty == 1.0)
