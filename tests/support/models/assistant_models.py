"""Tiny Gemma 4 models with an assistant, and transformers' model as the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

VOCAB, WINDOW, CENTROIDS = 128, 24, 16
_COMMON = {
    "vocab_size": VOCAB, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "global_head_dim": 32, "max_position_embeddings": 256, "sliding_window": WINDOW,
}  # fmt: skip
_KINDS = ["sliding_attention", "sliding_attention", "full_attention"] * 2
_ONE_HEAD = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
# name -> the target's fields, and those in its assistant's text_config
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared": (  # E2B: the last layers share keys and values, and layers have embeddings
        {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "num_kv_shared_layers": 3,
         "use_double_wide_mlp": True, "final_logit_softcapping": 5.0},
        {"final_logit_softcapping": 5.0},
    ),
    "experts": (  # 26B-A4B: keys are values, and layers have experts
        _ONE_HEAD | {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
                     "moe_intermediate_size": 16},
        _ONE_HEAD,
    ),
}  # fmt: skip
_OF_CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": CENTROIDS, "centroid_intermediate_top_k": 3}


def random_pair(name: str, centroids: bool) -> tuple[PreTrainedModel, Gemma4AssistantForCausalLM]:
    """A model of MODELS, and its assistant, with random weights."""
    target, own = MODELS[name]
    torch.manual_seed(0)
    config = Gemma4TextConfig(**_COMMON, **target, hidden_size=32, num_hidden_layers=6, layer_types=_KINDS)
    model = Gemma4ForCausalLM(config).eval()
    text = Gemma4TextConfig(
        **_COMMON, **own, hidden_size=24, num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + _KINDS[2:3],
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=0, num_kv_shared_layers=4,
    )  # fmt: skip
    head = Gemma4AssistantForCausalLM(
        Gemma4AssistantConfig(text_config=text, backbone_hidden_size=32, **(_OF_CENTROIDS if centroids else {}))
    ).eval()
    for module in (model, head):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.25)
        for key, buffer in module.named_buffers():
            if key.endswith("layer_scalar"):
                torch.nn.init.uniform_(buffer, 0.5, 1.5)
    if centroids:
        head.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB))
    return model, head


def write_pair(
    folder: Path, model: PreTrainedModel, head: Gemma4AssistantForCausalLM, **config: Any
) -> tuple[Path, Path]:
    """Folders of the model and the head. The head's config.json also has `config`."""
    paths = folder / "model", folder / "head"
    for path, module in zip(paths, (model, head), strict=True):
        module.save_pretrained(path)
    file = paths[1] / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return paths


@torch.inference_mode()
def oracle(
    model: PreTrainedModel, head: Gemma4AssistantForCausalLM, token_ids: list[int], drafts: list[int], shift: int = 0
) -> torch.Tensor:
    """[len(drafts), vocabulary]: logits of draft tokens after these tokens. The last token lacks keys.

    `shift` is added to the position. transformers' mask shows one key more than the target's window, so that keys are
    cut here. Its pass leaves out the head's `final_logit_softcapping`, which vLLM's has."""
    out = model(torch.tensor([token_ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
    kinds = {"sliding_attention": -WINDOW, "full_attention": 0}
    kv = {kind: tuple(x[:, :, first:] for x in out.shared_kv_states[kind]) for kind, first in kinds.items()}
    hidden, position = out.hidden_states[-1][:, -1:], torch.tensor([[len(token_ids) - 1 + shift]])
    found = []
    for token in (token_ids[-1], *drafts[:-1]):
        embeds = model.get_input_embeddings()(torch.tensor([[token]]))
        made = head(inputs_embeds=torch.cat((embeds, hidden), -1), position_ids=position, shared_kv_states=kv)
        found.append(made.logits[:, 0])
        hidden = made.last_hidden_state
    logits, cap = torch.cat(found), head.config.text_config.final_logit_softcapping
    return logits if cap is None else cap * (logits / cap).tanh()
