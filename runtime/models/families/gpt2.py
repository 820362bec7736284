"""GPT-2: learned positions, layer norms, biases, no gate; linear maps are stored as [in, out], q, k and v as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.base.model.decoder_spec import AttentionSpec, DecoderSpec, FfnSpec, LayerSpec, RopeSpec
from runtime.base.types import CallboardError
from runtime.models.weight_map import WeightMap

WEIGHT_MAP = WeightMap(
    {
        "embed": "wte.weight",
        "positions": "wpe.weight",
        "final_norm": "ln_f.weight",
        "final_norm_bias": "ln_f.bias",
        "head": "lm_head.weight",
        "attn_norm": "h.{}.ln_1.weight",
        "attn_norm_bias": "h.{}.ln_1.bias",
        "ffn_norm": "h.{}.ln_2.weight",
        "ffn_norm_bias": "h.{}.ln_2.bias",
        "qkv": "h.{}.attn.c_attn",
        "out": "h.{}.attn.c_proj",
        "up": "h.{}.mlp.c_fc",
        "down": "h.{}.mlp.c_proj",
    },
    base="transformer.",
    transposed=True,
    ignored=r"h\.\d+\.attn\.(masked_)?bias",  # causal masks
)


def decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json; raises CallboardError for an activation or an attention that is not supported."""
    activation = config["activation_function"]
    if activation not in ("gelu_new", "gelu_pytorch_tanh"):
        raise CallboardError(f"The model's activation_function is {activation!r}; supported is gelu_new.")
    if config["scale_attn_by_inverse_layer_idx"] or not config["scale_attn_weights"]:
        raise CallboardError("The model scales attention scores by layer or not at all, which is not supported.")
    hidden, heads = config["n_embd"], config["n_head"]
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        rope=RopeSpec(partial=0.0),
        qkv_bias=True,
        out_bias=True,
        fused_qkv=True,
    )
    ffn = FfnSpec(config["n_inner"] or 4 * hidden, "gelu_tanh", gated=False, ffn_bias=True)
    return DecoderSpec(
        layers=(LayerSpec(attention, ffn),) * config["n_layer"],
        hidden_size=hidden,
        vocab_size=config["vocab_size"],
        max_positions=config["n_positions"],
        norm_eps=config["layer_norm_epsilon"],
        norm="layer",
        learned_positions=True,
        tied_head=config["tie_word_embeddings"],
    )
