"""Two published models: the texts that they are known to write, and `transformers`' perplexity on the same weights.

Gemma 3 270M (a base model, under the Gemma Terms of Use) is only a test's download: about 240 MB, once a machine."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

from runtime.base.types import SamplingParams
from runtime.llm import LLM
from runtime.loading.checkpoint import open_checkpoint
from runtime.loading.gguf import GgufFile
from runtime.loading.gguf_architectures import read_gguf_model
from runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

STORY = "Once upon a time, in a small village by the sea,"
TEXTS = {
    "smollm2": {
        STORY: " there was a wise old wizard named Thorold. He lived in a tower surrounded by a beautiful garden",
        "The three primary colors are": " the primary colors of the RGB color model: red, blue, and green.",
    },
    "gemma3": {
        STORY: " there lived a man named John. He was a kind and gentle man, who loved his family and friends",
        "def fibonacci": "(n):\n    if n == 0:\n        return 0\n    elif n == 1:\n        return 1\n",
    },
}
PARAGRAPH = (
    "The lighthouse had been dark for eleven years when the keeper's granddaughter came back to the island. She found "
    "the door unlocked, the stairs dry and the great lamp wrapped in sailcloth, as if somebody had meant to return. "
    "That night she climbed up with a can of oil and a box of matches, and ships that had long since stopped looking "
    "for it saw a light on the rocks again. In the morning there were three letters under the door."
)
PERPLEXITIES = {"smollm2": 49.14, "gemma3": 40.73}  # of this paragraph, in float32


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.thorough)])
def model(request) -> tuple[str, Path]:
    return request.param, request.getfixturevalue(f"{request.param}_path")


@pytest.fixture(scope="module")
def ours(model) -> LLM:
    return LLM(str(model[1]), dtype="float32", num_threads=1, kv_cache_memory=0.1, max_model_len=512)


def test_texts(ours, model):
    greedy = SamplingParams(max_tokens=16, temperature=0.0)
    texts = TEXTS[model[0]]
    for answer, known in zip(ours.generate(list(texts), greedy), texts.values(), strict=True):
        assert answer.text.startswith(known) or known.startswith(answer.text)
        assert len(answer.token_ids) == 16


def test_perplexity(ours, model):
    ids = ours.tokenizer.encode(PARAGRAPH)
    (scored,) = ours.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=0))
    checkpoint = open_checkpoint(model[1])
    weights = {name: checkpoint.tensor(name, torch.float32) for name in checkpoint.names()}
    kind = getattr(transformers, checkpoint.config["architectures"][0])
    config = kind.config_class(**checkpoint.config)
    theirs, report = kind.from_pretrained(None, config=config, state_dict=weights, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        loss = theirs(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    perplexity = torch.tensor([-s.logprob for s in scored.prompt_logprobs]).mean().exp()
    assert perplexity == pytest.approx(loss.exp().item(), rel=5e-4)
    assert perplexity == pytest.approx(PERPLEXITIES[model[0]], rel=5e-3)


def test_gemma3_reads_and_writes_any_text(gemma3_path):
    tokenizer = Tokenizer.load(gemma3_path)
    text = Path(__file__).read_text() + "  \t日本語 \U0001f600 ünï\u200d\n\n\n<start_of_turn>"
    ids = tokenizer.encode(text)
    assert (ids[0], ids[-1]) == (tokenizer.bos_token_id, 105)
    assert tokenizer.decode(ids[1:], skip_special_tokens=False) == text
    assert len(ids) < len(text) / 2.5


def test_gemma3_tensors_equal_those_of_the_gguf_package(gemma3_path):
    checkpoint, model = open_checkpoint(gemma3_path), read_gguf_model(GgufFile(gemma3_path))
    assert len(checkpoint.names()) == 236
    stored = {}
    for name, source in model.sources.items():
        stored.setdefault(source.tensor.type_name, []).append((name, source.tensor))
    assert set(stored) == {"F32", "Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    for kind, tensors in stored.items():
        for name, tensor in tensors[:3]:
            raw = model.file.raw(tensor.name)[:500]
            want = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1)
            want = want - np.float32(1) if name.endswith("norm.weight") else want
            found = checkpoint.tensor(name, torch.float32).reshape(-1)[: len(want)]
            assert torch.equal(found, torch.tensor(want)), name
