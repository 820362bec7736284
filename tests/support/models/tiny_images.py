"""A tiny tower, images for prompts of random tokens, and a tiny model that chats about pictures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from runtime.base.images import Image, ImageSpan
from runtime.base.model.tower_spec import Step, TowerSpec

TOKEN_ID = 1  # DummySource.image_token_id
_SIDE = 8  # pixels of an embedding


def tiny_tower(out_size: int) -> TowerSpec:
    """A tower with patches of 4 x 4 pixels. Four patches become one embedding."""
    return TowerSpec(
        num_layers=2, hidden_size=24, ffn_size=40, num_heads=2, head_dim=12, out_size=out_size, patch_size=4, merge=2,
        projector=(Step("blocks"), Step("linear", "projection", (out_size, 96), True)), names={}, rope="halves",
    )  # fmt: skip


def image_of(seed: int, rows: int, columns: int) -> Image:
    """An image with `rows` x `columns` embeddings."""
    height, width = rows * _SIDE, columns * _SIDE
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image(b"%06d%05d%05d" % (seed, rows, columns), ((height, width),), pixels.tobytes())


def span_of(begin: int, seed: int, rows: int, columns: int) -> ImageSpan:
    """A span in which each token has an embedding."""
    return ImageSpan(begin, rows * columns, image_of(seed, rows, columns), (1, rows, columns))


def write_tiny_smolvlm(path: Path, context: int = 1024) -> Path:
    """A random SmolVLM of bytes. A tile has four tokens; pictures above 64 pixels have several."""
    import transformers

    from tests.support.http.fake_engine import byte_tokenizer
    from tests.support.http.fake_images import MARK, MARK_ID, TEMPLATE
    from tests.support.models.family_cases import random_model
    from tests.support.models.tower_cases import CASES

    marks = MARK, "<fake_token_around_image>", "<global-img>", *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2))
    config = CASES["smolvlm"].config
    text = config["text_config"] | {"vocab_size": 320, "max_position_embeddings": context}
    config = config | {"text_config": text, "image_token_id": MARK_ID}
    random_model(CASES["smolvlm"].model_class, transformers.SmolVLMConfig(**config)).save_pretrained(path)
    byte_tokenizer(marks=marks)._backend.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "<eos>"}))
    sizes = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}}
    (path / "preprocessor_config.json").write_text(json.dumps(sizes))
    return path
