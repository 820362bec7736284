"""Tiny models in files, with a tokenizer and a head that drafts about half of their tokens rightly.

A token depends most on the one before, which the head reads, and a little on all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.support.models.gguf_export import export, head_tables
from tests.support.models.mtp_models import GGUF, random_pair
from tests.support.models.tiny_gguf import TINY_TOKENS
from tests.support.models.tiny_hybrid import TOKENIZER

CONTEXT = 1024


def near_pair(name: str, context: int = CONTEXT, share: float = 0.5) -> tuple[Any, Any]:
    """A model of MODELS and its head. `share` scales what a token's layers add to its embedding."""
    model, head = random_pair(name, vocab_size=len(TINY_TOKENS), max_position_embeddings=context)
    is_offset = name.startswith("qwen")  # norms multiply by 1 + weight
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_()
        for module in (model, head):
            for key, weight in module.named_parameters():
                if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                    weight.mul_(share)
        head.enorm.weight.fill_(0.0 if is_offset else 1.0)
        head.post_norm.weight.copy_(model.model.norm.weight)
        head.eh_proj.weight.zero_()
        head.eh_proj.weight.fill_diagonal_(1.0)  # the embedding comes first
    return model, head


def write_headed(path: Path, name: str, spoilt: float | None = None, **options: Any) -> Path:
    """Write a model of GGUF. With `spoilt`, all of its head's weights in `fc` have this value."""
    model, head = near_pair(name, **options)
    if spoilt is not None:
        head.eh_proj.weight.data.fill_(spoilt)
    arch, metadata = GGUF[name]
    given = {f"{arch}.{key}": value for key, value in metadata.items()}
    given |= {f"{arch}.block_count": 3, f"{arch}.nextn_predict_layers": 1}
    return export(model, arch, path, tables=head_tables(head, arch, model.config), **given | TOKENIZER)
