"""Tiny models in files, with a tokenizer and a head that drafts about half of their tokens rightly.

A token depends most on the one before, which the head reads, and a little on all tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpLayer

from tests.support.models.gguf_export import export, head_tables
from tests.support.models.mtp_models import GGUF, random_pair
from tests.support.models.tiny_gguf import TINY_TOKENS
from tests.support.models.tiny_hybrid import TOKENIZER

CONTEXT = 1024


def near_pair(name: str, context: int = CONTEXT) -> tuple[PreTrainedModel, MtpLayer]:
    """A model of MODELS and its head."""
    model, head = random_pair(name, vocab_size=len(TINY_TOKENS), max_position_embeddings=context)
    bring_near(model.model, head, is_offset=name.startswith("qwen"))
    return model, head


@torch.no_grad()
def bring_near(text: PreTrainedModel, head: MtpLayer, is_offset: bool) -> None:
    """Change the weights of a text model and its head. With `is_offset` norms multiply by 1 + weight."""
    text.embed_tokens.weight.normal_()
    for module in (text, head):
        for key, weight in module.named_parameters():
            if key.endswith(("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")):
                weight.mul_(0.5)
    head.enorm.weight.fill_(0.0 if is_offset else 1.0)
    head.post_norm.weight.copy_(text.norm.weight)
    head.eh_proj.weight.zero_()
    head.eh_proj.weight.fill_diagonal_(1.0)  # the embedding comes first


def write_headed(path: Path, name: str, spoilt: float | None = None, **options: Any) -> Path:
    """Write a model of GGUF. With `spoilt`, all of its head's weights in `fc` have this value."""
    model, head = near_pair(name, **options)
    if spoilt is not None:
        head.eh_proj.weight.data.fill_(spoilt)
    arch, metadata = GGUF[name]
    given = {f"{arch}.{key}": value for key, value in metadata.items()}
    given |= {f"{arch}.block_count": 3, f"{arch}.nextn_predict_layers": 1}
    return export(model, arch, path, tables=head_tables(head, arch, model.config), **given | TOKENIZER)
